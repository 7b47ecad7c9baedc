"""What `/metrics` tells Prometheus. Every figure comes from an event of the block log, so the two cannot differ."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mlxkv.cache.block_log import BlockEvent, RequestEvent, as_fields
from mlxkv.prompt_cache.block_cache import request_line

FIRST_TOKEN_BUCKETS = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
BETWEEN_TOKENS_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5)
KEPT_REQUESTS = 200
HISTORY_STEP_S, HISTORY_STEPS = 10, 360


@dataclass
class Tokens:
    """Prompt tokens by where they came from."""

    hot: int = 0
    cold: int = 0
    computed: int = 0

    def add(self, event: RequestEvent) -> None:
        self.hot += event.hot_tokens
        self.cold += event.cold_tokens
        self.computed += event.computed_tokens


class Metrics:
    """Owner: `on_event` and `on_request` are called by the threads they happen on; reading is for the server's loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.tokens = Tokens()
        self.finished = 0
        self.requests: deque[dict[str, Any]] = deque(maxlen=KEPT_REQUESTS)
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY_STEPS)
        self.evicted: dict[str, int] = {}
        self.quarantined = 0
        registry = self.registry
        self._prompt = Counter(
            "mlxkv_prompt_tokens", "Prompt tokens by source: hot, cold or computed.", ["source"], registry=registry
        )
        for source in ("hot", "cold", "computed"):
            self._prompt.labels(source)
        self._output = Counter("mlxkv_output_tokens", "Tokens of replies.", registry=registry)
        self._ended = Counter("mlxkv_requests", "Requests that ended.", registry=registry)
        self._first = Histogram(
            "mlxkv_first_token_seconds",
            "Seconds from leaving the queue to the first token.",
            registry=registry,
            buckets=FIRST_TOKEN_BUCKETS,
        )
        self._between = Histogram(
            "mlxkv_between_tokens_seconds",
            "Seconds between two tokens of a reply.",
            registry=registry,
            buckets=BETWEEN_TOKENS_BUCKETS,
        )
        self._restored = Counter("mlxkv_restored_bytes", "Keys, values and states restored.", registry=registry)
        self._restoring = Counter("mlxkv_restore_seconds", "Seconds of matching and restoring.", registry=registry)
        self._offloaded = Counter("mlxkv_offloaded_bytes", "Bytes written to the SSD.", registry=registry)
        self._evictions = Counter("mlxkv_evictions", "Blocks evicted.", ["tier", "reason"], registry=registry)
        self._damaged = Counter("mlxkv_quarantined_blocks", "Damaged block files set aside.", registry=registry)
        self._used = Gauge("mlxkv_tier_used_bytes", "Bytes a tier holds.", ["tier"], registry=registry)
        self._budget = Gauge("mlxkv_tier_budget_bytes", "Most bytes a tier may hold.", ["tier"], registry=registry)
        self._queued = Gauge("mlxkv_queued_requests", "Requests that wait.", registry=registry)
        self._running = Gauge("mlxkv_running_requests", "Requests that run.", registry=registry)
        self._live = Gauge(
            "mlxkv_live_bytes", "Bytes of the arrays of running requests, with padding.", registry=registry
        )

    def on_event(self, event: BlockEvent | RequestEvent) -> None:
        """Take in an event of the block log."""
        if isinstance(event, RequestEvent):
            self._on_request(event)
        elif event.event == "evict":
            reason = event.reason or "unknown"
            self._evictions.labels(event.tier or "unknown", reason).inc()
            self.evicted[reason] = self.evicted.get(reason, 0) + 1
        elif event.event == "quarantine":
            self._damaged.inc()
            self.quarantined += 1
        elif event.event == "offload":
            self._offloaded.inc(event.bytes or 0)

    def between_tokens(self, seconds: float) -> None:
        """Note the time between two tokens of a reply."""
        self._between.observe(seconds)

    def text(self, tiers: dict[str, tuple[int, int]], queued: int, running: int, live_bytes: int) -> bytes:
        """The page in Prometheus' text format; `tiers` has used and budget bytes by name."""
        for tier, (used, budget) in tiers.items():
            self._used.labels(tier).set(used)
            self._budget.labels(tier).set(budget)
        self._queued.set(queued)
        self._running.set(running)
        self._live.set(live_bytes)
        return generate_latest(self.registry)

    def _on_request(self, event: RequestEvent) -> None:
        self.tokens.add(event)
        self.finished += 1
        self._ended.inc()
        self._prompt.labels("hot").inc(event.hot_tokens)
        self._prompt.labels("cold").inc(event.cold_tokens)
        self._prompt.labels("computed").inc(event.computed_tokens)
        self._output.inc(event.output_tokens)
        self._restored.inc(event.restored_bytes)
        self._restoring.inc(event.restore_s)
        if event.ttft_s is not None:
            self._first.observe(event.ttft_s)
        now = time.time()
        self.requests.appendleft({"time": now, **as_fields(event), "line": request_line(event)})
        step = int(now // HISTORY_STEP_S * HISTORY_STEP_S)
        if not self.history or self.history[-1]["time"] != step:
            self.history.append({"time": step, "hot": 0, "cold": 0, "computed": 0, "requests": 0})
        last = self.history[-1]
        last["hot"] += event.hot_tokens
        last["cold"] += event.cold_tokens
        last["computed"] += event.computed_tokens
        last["requests"] += 1
