"""oMLX's server log, versions 0.1.2 to 0.6.4, as events.

Its lines say what a request did one by one, and the last of them (the completion) does not name the request: they are
joined here by id and by order. At INFO most of it is missing; then what is known is said and the rest left open.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

from mlxkv.blocklog.events import Event

OPEN_REQUESTS = 256  # that wait for their end at most; an older one is given up as unfinished

_SIZES = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_SIZE = re.compile(r"([\d.]+) ?([KMGT]?B)")


def iso_time(asctime: bytes) -> str:
    """Python's `2026-11-30 19:12:38,779` as ISO 8601; its zone is not in the log."""
    return asctime.translate(_ISO).decode()


@lru_cache(maxsize=1024)
def size_bytes(text: str) -> int:
    """Bytes of a size as oMLX writes it, in steps of 1,024; 0 of what is no size, such as `disabled`.

    >>> size_bytes("768.00 KB"), size_bytes("12.3GB")
    (786432, 13207024435)
    """
    found = _SIZE.fullmatch(text)
    return int(float(found[1]) * _SIZES[found[2]]) if found else 0


@dataclass
class Open:
    """A request that has not ended yet."""

    request: str
    time: str
    looked_up: int | None = None
    reused: int | None = None
    prompt: int | None = None
    hot_blocks: int = 0
    cold_blocks: int = 0
    reason: str | None = None
    output: int | None = None
    restore_ms: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)


Match = Callable[[str], re.Match[str] | None]


def _shapes_by_word() -> dict[str, list[tuple[str, Match]]]:
    """First word of a message -> (kind, pattern) of the lines that begin so; frequent lines stand first in the file."""
    table: dict[str, list[tuple[str, Match]]] = {}
    for shape in json.loads((files("mlxkv.blocklog") / "omlx_lines.json").read_text(encoding="utf-8")):
        table.setdefault(shape["word"], []).append((shape["kind"], re.compile(shape["pattern"]).match))
    return table


_TABLE = _shapes_by_word()
# Nine lines of ten at DEBUG, with their header: one match on bytes is several times as fast as what `feed` does.
_FREQUENT = re.compile(
    rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - omlx\.[\w.]+ - ([A-Z]+) - (?:\[[^\] ]*\] - )?(?:"
    rb"Loaded block (?:with metadata )?from (hot cache|SSD cache|pending [a-z ]+): ([0-9a-f]{16})\.\.\."
    rb"|Saved block \d+ to (?:tiered cache|paged SSD): tokens \[(\d+):(\d+)\], \d+ layers"
    rb"|Enqueued block for SSD (?:cache write|write-through): ([0-9a-f]{16})\.\.\., size=(\d+(?:\.\d+)? [KMGT]?B)"
    rb"|Evicted hot cache block to SSD write queue: ([0-9a-f]{16})\.\.\.)$"
).match
_ISO = bytes.maketrans(b" ,", b"T.")
_GUARD = "[guard:"
_HTTP_ERROR = re.compile(r"(?P<method>[A-Z]+) (?P<path>/\S+) \S+ (?P<status>\d{3}) \((?P<what>[^)]*)\): ")
_TROUBLE = {
    "trouble_pool": "out of cache blocks",
    "queue": "SSD write queue full",
    "disk_full": "disk full",
    "disk_pressure": "disk nearly full",
    "missing": "cache file missing",
    "damaged": "damaged cache file",
    "save_failed": "block could not be saved",
    "async_failed": "store failed",
    "corruption": "cache corruption",
    "shrank": "hot tier shrunk under memory pressure",
    "model_evict": "model evicted under memory pressure",
    "rejected": "request rejected by the memory guard",
    "disabled": "cache disabled",
}


def match_shape(message: str) -> tuple[str, re.Match[str]] | None:
    """Which known line a message is; None for any other."""
    word = message[: message.find(" ")]
    for kind, match in _TABLE.get(word, ()) or _TABLE.get(word[: len(_GUARD)], ()):
        found = match(message)
        if found is not None:
            return kind, found
    found = _HTTP_ERROR.match(message)
    return ("http_error", found) if found is not None else None


class OmlxReader:
    """Feeds on records, gives events. Owner: whoever reads the log; one for each server's log.

    `levels` are those seen: without DEBUG most of what a request reused is not in the log.
    """

    def __init__(self) -> None:
        self.levels: set[str] = set()
        self._open: OrderedDict[str, Open] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._current: Open | None = None
        self._model: str | None = None
        self._unnamed = 0
        self._at: str = ""
        self._asctime = b""

    def feed(self, time: str, level: str, message: str) -> list[Event] | None:
        """The events of one record; None when its shape is not known."""
        found = match_shape(message)
        if found is None:
            return None
        if level not in self.levels:
            self.levels.add(level)
        self._at, self._asctime = time, b""
        kind, match = found
        handler = _HANDLERS.get(kind)
        if handler is not None:
            return handler(self, match)
        if kind in _TROUBLE:
            return [self._trouble(_TROUBLE[kind])]
        return []

    def feed_frequent(self, line: bytes) -> Event | None:
        """The event of a whole line, header included, of the frequent kinds; None for any other line."""
        found = _FREQUENT(line)
        if found is None:
            return None
        asctime, level, tier, loaded, first, last, written, size, evicted = found.groups()
        if asctime != self._asctime:
            self._asctime, self._at = asctime, iso_time(asctime)
        self.levels.add(level.decode())
        if loaded is not None:
            return self._load(loaded.decode(), hot=tier == b"hot cache")
        if written is not None:
            return self._event("offload", block=written.decode(), bytes=size_bytes(size.decode()), tier="cold")
        if evicted is not None:
            return self._event("evict", block=evicted.decode(), tier="hot", reason="budget")
        return self._event("commit", tokens=int(last) - int(first))

    def finish(self) -> Iterator[Event]:
        """The requests whose end never came."""
        for waiting in list(self._open.values()):
            yield self._request(waiting, finished=False)
        self._open.clear()

    # a request's own lines

    def _of(self, request: str) -> Open:
        """The open request of that id; one that has ended is not opened again."""
        if request in self._open:
            return self._open[request]
        waiting = Open(request, self._at)
        if request not in self._closed:
            self._open[request] = waiting
        return waiting

    def _hit(self, m: re.Match[str]) -> list[Event]:
        waiting = self._of(m["req"])
        waiting.looked_up = int(m["tokens"])
        waiting.hot_blocks = waiting.cold_blocks = 0  # a look-up that is repeated counts once
        self._current = waiting
        return self._overflow()

    def _miss(self, m: re.Match[str]) -> list[Event]:
        waiting = self._of(m["req"])
        waiting.looked_up, waiting.reused, waiting.reason = 0, 0, "never seen"
        self._current = waiting
        return self._overflow()

    def _paged_hit(self, m: re.Match[str]) -> list[Event]:
        waiting = self._of(m["req"])
        found = m.groupdict()
        waiting.reused = int(m["cached"])
        waiting.prompt = int(m["cached"]) + int(m["remaining"])
        before = found.get("looked_up")
        waiting.looked_up = int(before) if before else max(waiting.looked_up or 0, waiting.reused)
        if before and waiting.reason is None:
            waiting.reason = "reconstruction cut short"
        self._current = waiting
        return self._overflow()

    def _failed(self, m: re.Match[str]) -> list[Event]:
        waiting = self._of(m["req"])
        waiting.reused, waiting.reason = 0, m["why"].replace("paged cache ", "")
        return self._overflow()

    def _restore(self, m: re.Match[str]) -> list[Event]:
        waiting = self._of(m["req"])
        waiting.reused, waiting.prompt = int(m["cached"]), int(m["cached"]) + int(m["suffix"])
        waiting.looked_up = max(waiting.looked_up or 0, waiting.reused)
        waiting.restore_ms = float(m["lookup"]) + float(m["reconstruct"])
        self._current = waiting
        return self._overflow()

    def _divergence(self, m: re.Match[str]) -> list[Event]:
        waiting = self._of(m["req"])
        waiting.prompt, waiting.reused = int(m["prompt"]), int(m["reused"])
        waiting.looked_up = max(waiting.looked_up or 0, waiting.reused)
        waiting.reason = f"diverged at token {m['common']}"
        waiting.detail = {"nearest": m["stored"], "common_tokens": int(m["common"])}
        return self._overflow()

    def _probe(self, m: re.Match[str]) -> list[Event]:
        waiting = self._of(m["req"])
        waiting.prompt, waiting.reused = int(m["prompt"]), int(m["cached"])
        waiting.detail = {"nearest": m["stored"], "common_tokens": int(m["common"])}
        if int(m["common"]) < int(m["reusable"]) and waiting.reason in (None, "never seen"):
            waiting.reason = f"diverged at token {m['common']}"
        return self._overflow()

    def _stored_paged(self, m: re.Match[str]) -> list[Event]:
        waiting = self._of(m["req"])
        waiting.prompt, waiting.output = int(m["prompt"]), int(m["out"])
        return self._overflow()

    def _boundary(self, m: re.Match[str]) -> list[Event]:
        self._of(m["req"])
        lost = int(m["total"]) - int(m["stored"])
        return [*self._overflow(), self._event("boundary", tokens=int(m["stored"]), detail={"unstored_tokens": lost})]

    def _rejected(self, m: re.Match[str]) -> list[Event]:
        request = m.groupdict().get("req")
        waiting = self._open.get(request) if request else None
        ended = []
        if waiting is not None:
            waiting.reason = "rejected"
            ended = [self._request(waiting, finished=False)]
        return [*ended, self._trouble(_TROUBLE["rejected"], request=request)]

    def _done(self, m: re.Match[str]) -> list[Event]:
        found = m.groupdict()
        prompt = int(m["prompt"]) if m["prompt"] else None
        waiting = next((each for each in self._open.values() if prompt is not None and each.prompt == prompt), None)
        if waiting is None:
            waiting = next((each for each in self._open.values() if prompt is None or each.prompt is None), None)
        if waiting is None:
            self._unnamed += 1
            waiting = Open(f"unnamed-{self._unnamed}", self._at)
        waiting.prompt = prompt if prompt is not None else waiting.prompt
        waiting.output = int(m["out"])
        first = found.get("ttft") or found.get("visible")
        return [self._request(waiting, model=m["model"], ttft_s=float(first) if first else None, seconds=float(m["s"]))]

    def _overflow(self) -> list[Event]:
        if len(self._open) <= OPEN_REQUESTS:
            return []
        return [self._request(next(iter(self._open.values())), finished=False)]

    def _request(
        self, waiting: Open, *, model: str | None = None, ttft_s: float | None = None, seconds: float | None = None,
        finished: bool = True,
    ) -> Event:  # fmt: skip
        self._open.pop(waiting.request, None)
        self._closed[waiting.request] = None
        if len(self._closed) > OPEN_REQUESTS:
            self._closed.popitem(last=False)
        reused, loaded = waiting.reused, waiting.hot_blocks + waiting.cold_blocks
        hot = cold = None
        if reused is not None and loaded:
            cold = reused * waiting.cold_blocks // loaded
            hot, reused = reused - cold, None
        computed = None
        if waiting.prompt is not None and waiting.reused is not None:
            computed = waiting.prompt - waiting.reused
        return Event(
            event="request", source="oMLX", time=self._at, model=model or self._model, request=waiting.request,
            prompt_tokens=waiting.prompt, hot_tokens=hot, cold_tokens=cold, reused_tokens=reused,
            computed_tokens=computed, looked_up_tokens=waiting.looked_up, matched_tokens=waiting.reused,
            restore_s=None if waiting.restore_ms is None else waiting.restore_ms / 1e3, ttft_s=ttft_s, seconds=seconds,
            output_tokens=waiting.output, reason=waiting.reason, finished=finished, detail=waiting.detail or None,
        )  # fmt: skip

    # lines of nobody in particular

    def _model_info(self, m: re.Match[str]) -> list[Event]:
        numbers = {k: int(m[k]) for k in ("layers", "kv_layers", "kv_heads", "head_dim") if m[k] is not None}
        override = size_bytes(m["kv_override"]) if m["kv_override"] else None
        detail = numbers | {
            "block64_bytes": size_bytes(m["block64"]),
            "rotating": m["rotating"],
            "token_bytes": override,
        }
        return [self._event("geometry", detail=detail)]

    def _block_size(self, m: re.Match[str]) -> list[Event]:
        found = m.groupdict()
        tokens = found.get("block_size") or found.get("block_size2")
        events = [self._event("geometry", tokens=int(tokens))] if tokens else []
        return [*events, *self._tiers(m)]

    def _aligned(self, m: re.Match[str]) -> list[Event]:
        return [self._event("geometry", tokens=int(m["new"]))]

    def _tiers(self, m: re.Match[str]) -> list[Event]:
        found = m.groupdict()
        events = []
        for tier in ("hot", "cold"):
            if found.get(tier):
                events.append(self._event("open", tier=tier, bytes=size_bytes(found[tier])))
        if found.get("used"):
            events.append(self._event("scan", bytes=size_bytes(found["used"])))
        return events

    def _scan(self, m: re.Match[str]) -> list[Event]:
        numbers = {k: int(m[k]) for k in ("scanned", "indexed", "errors", "stale", "incompatible", "gdn") if m[k]}
        return [self._event("scan", bytes=size_bytes(m["total"]), detail=numbers)]

    def _loaded(self, m: re.Match[str]) -> list[Event]:
        self._model = m["model"]
        return []

    def _load_line(self, m: re.Match[str]) -> list[Event]:
        return [self._load(m["hash"], hot=m["tier"] == "hot cache")]

    def _saved(self, m: re.Match[str]) -> list[Event]:
        return [self._event("commit", tokens=int(m["b"]) - int(m["a"]))]

    def _load(self, block: str, *, hot: bool) -> Event:
        if self._current is not None:
            if hot:
                self._current.hot_blocks += 1
            else:
                self._current.cold_blocks += 1
        return self._event("restore", block=block, tier="hot" if hot else "cold")

    def _write(self, m: re.Match[str]) -> list[Event]:
        return [self._event("offload", block=m["hash"], bytes=size_bytes(m["size"]), tier="cold")]

    def _hot_evict(self, m: re.Match[str]) -> list[Event]:
        return [self._event("evict", block=m["hash"], tier="hot", reason="budget")]

    def _evict_file(self, m: re.Match[str]) -> list[Event]:
        name = re.split(r"[/\\]", m["path"])[-1].partition(".")[0][:16]
        return [self._event("evict", block=name, tier="cold", reason="budget")]

    def _enforce(self, m: re.Match[str]) -> list[Event]:
        return [self._event("enforce", bytes=size_bytes(m["freed"]), index=int(m["n"]), tier="cold")]

    def _walkback(self, m: re.Match[str]) -> list[Event]:
        if self._current is not None and self._current.reason is None:
            self._current.reason = "walk-back (layers that cannot be cut)"
        return [self._event("reject", reason="walk-back", tokens=int(m["tokens"]), index=int(m["dropped"]))]

    def _reject(self, m: re.Match[str]) -> list[Event]:
        if self._current is not None:
            self._current.reason = f"{m['kind']} layers cannot be cut"
        return [self._event("reject", reason=m["kind"])]

    def _gdn(self, m: re.Match[str]) -> list[Event]:
        if self._current is not None:
            self._current.reason = "no checkpoint"
        return [self._event("reject", reason=m[0].partition(" block")[0])]

    def _mismatch(self, m: re.Match[str]) -> list[Event]:
        if self._current is not None:
            self._current.reason = "incompatible block"
        return [self._event("reject", reason=re.sub(r"\d+", "N", m["what"]))]

    def _pressure(self, m: re.Match[str]) -> list[Event]:
        sizes = {k: size_bytes(m[k]) for k in ("current", "soft", "hard", "ceiling") if m[k]}
        return [self._event("pressure", reason=m["now"], detail=sizes)]

    def _http_error(self, m: re.Match[str]) -> list[Event]:
        return [self._trouble(f"HTTP {m['status']}")]

    def _stale(self, m: re.Match[str]) -> list[Event]:
        return [self._event("reject", reason="stale layer signature", index=int(m["n"]))]

    def _trouble(self, what: str, *, request: str | None = None) -> Event:
        return self._event("trouble", reason=what, request=request)

    def _event(self, event: str, **found: Any) -> Event:
        return Event(event=event, source="oMLX", time=self._at, model=self._model, **found)


_HANDLERS: dict[str, Callable[[OmlxReader, re.Match[str]], list[Event]]] = {
    "hit": OmlxReader._hit, "miss": OmlxReader._miss, "paged_hit": OmlxReader._paged_hit,
    "failed": OmlxReader._failed, "restore": OmlxReader._restore, "divergence": OmlxReader._divergence,
    "probe": OmlxReader._probe, "stored_paged": OmlxReader._stored_paged, "boundary": OmlxReader._boundary,
    "rejected": OmlxReader._rejected, "done": OmlxReader._done, "model_info": OmlxReader._model_info,
    "block_size": OmlxReader._block_size, "aligned": OmlxReader._aligned, "tiers": OmlxReader._tiers,
    "tier_hot": OmlxReader._tiers, "scan": OmlxReader._scan, "loaded": OmlxReader._loaded,
    "load": OmlxReader._load_line, "saved": OmlxReader._saved,
    "write": OmlxReader._write, "hot_evict": OmlxReader._hot_evict,
    "evict_file": OmlxReader._evict_file, "enforce": OmlxReader._enforce, "walkback": OmlxReader._walkback,
    "reject": OmlxReader._reject, "gdn": OmlxReader._gdn, "mismatch": OmlxReader._mismatch,
    "pressure": OmlxReader._pressure, "http_error": OmlxReader._http_error, "stale": OmlxReader._stale,
}  # fmt: skip
