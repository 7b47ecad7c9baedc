"""What a whole log comes to, in constant memory: counted event by event."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mlxkv.blocklog.events import Event, reason_class, seconds_of
from mlxkv.blocklog.readers import LogReader
from mlxkv.blocklog.why import ADVICE, Cause, Record, explain
from mlxkv.cache.names import BLOCK_TOKENS

BINS = 120
SAMPLES = 10_000
REMEMBERED_BLOCKS = 200_000  # names of written blocks, to tell a block that is written again
REMEMBERED_PROMPTS = 16  # of each root, to tell why the next one left them
EXPLAINED = 2_000  # requests at most, for each costs a comparison with those
MOSTLY, HARDLY = 0.9, 0.1

TtftClass = str


@dataclass
class Quantiles:
    """A sample of at most 10,000 values, each as likely to be in it; exact up to that many."""

    count: int = 0
    total: float = 0.0
    _values: list[float] = field(default_factory=list)
    _source: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        if len(self._values) < SAMPLES:
            self._values.append(value)
        elif (at := self._source.randrange(self.count)) < SAMPLES:
            self._values[at] = value

    def at(self, share: float) -> float | None:
        """The value below which `share` of all lie, between two neighbours in proportion; None without any.

        0.5 is the median: of an even number of values the mean of the middle two.
        """
        if not self._values:
            return None
        ordered = sorted(self._values)
        below, part = divmod(share * (len(ordered) - 1), 1)
        low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
        return low + (high - low) * part


@dataclass
class Bins:
    """Tokens over time in at most 120 equal steps, which double when the log goes on."""

    start: float | None = None
    step_s: float = 1.0
    hot: list[int] = field(default_factory=list)
    cold: list[int] = field(default_factory=list)
    untiered: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)

    def add(self, at: float, hot: int, cold: int, untiered: int, prompt: int) -> None:
        if self.start is None:
            self.start = at
        rows = (self.hot, self.cold, self.untiered, self.prompt)
        while (place := int((at - self.start) / self.step_s)) >= BINS:
            self.step_s *= 2
            for row in rows:
                row[:] = [sum(row[i : i + 2]) for i in range(0, len(row), 2)]
        place = max(place, 0)  # a clock that went back
        for row, tokens in zip(rows, (hot, cold, untiered, prompt), strict=True):
            row += [0] * (place + 1 - len(row))
            row[place] += tokens

    def hits(self) -> list[int]:
        """Prompt tokens that were reused in each step."""
        return list(map(sum, zip(self.hot, self.cold, self.untiered, strict=True)))


@dataclass
class Lost:
    """Requests that stopped matching for one reason, and the prompt tokens they computed because of it."""

    requests: int = 0
    tokens: int = 0


@dataclass
class Tier:
    """A tier as far as the log tells: what went in and out of it since the log begins; `peak_bytes` at the fullest."""

    budget_bytes: int | None = None
    held_bytes: int = 0
    peak_bytes: int = 0
    off: bool = False

    def move(self, nbytes: int) -> None:
        held = self.held_bytes + nbytes
        self.held_bytes = held if held > 0 else 0
        if held > self.peak_bytes:
            self.peak_bytes = held


@dataclass
class Geometry:
    """What oMLX said a block costs, against the layers it named."""

    layers: int
    kv_layers: int | None
    kv_heads: int
    head_dim: int
    block64_bytes: int
    rotating: str | None = None
    token_bytes: int | None = None

    @property
    def exact_bytes(self) -> int:
        """64 tokens of 2-byte keys and values in the layers that hold KV."""
        kv_layers = self.layers if self.kv_layers is None else self.kv_layers
        return kv_layers * self.kv_heads * self.head_dim * 2 * 2 * BLOCK_TOKENS

    @property
    def counts_all_layers(self) -> bool:
        """Whether the line counts layers that hold no KV."""
        return self.kv_layers is not None and self.kv_layers < self.layers and self.block64_bytes > self.exact_bytes


@dataclass
class Summary:
    """Counts of one log. Tokens are prompt tokens; `None` in a sum is nowhere: what a log does not say is left out.

    `prompt_tokens` = hot + cold + untiered + computed of the requests whose reuse is known, plus `unknown_tokens` of
    those where it is not. `tail_tokens` are part of `hot_tokens`. `looked_up_tokens` were found in an index,
    `restored_tokens` came back from the SSD, `hit_tokens` were really not computed.
    """

    sources: Counter[str] = field(default_factory=Counter)
    first_time: str | None = None
    last_time: str | None = None
    processes: set[int] = field(default_factory=set)
    models: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    unfinished_requests: int = 0
    unknown_requests: int = 0
    short_requests: int = 0
    prompt_tokens: int = 0
    hot_tokens: int = 0
    cold_tokens: int = 0
    untiered_tokens: int = 0
    tail_tokens: int = 0
    computed_tokens: int = 0
    unknown_tokens: int = 0
    output_tokens: int = 0
    looked_up_tokens: int = 0
    restored_bytes: int = 0
    committed_blocks: int = 0
    committed_tails: int = 0
    committed_checkpoints: int = 0
    committed_bytes: int = 0
    restores: int = 0
    evicted_blocks: Counter[str] = field(default_factory=Counter)
    evicted_for_room: Counter[str] = field(default_factory=Counter)
    evicted_bytes: int = 0
    quarantined_blocks: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    written_blocks: int = 0
    written_bytes: int = 0
    rewritten_bytes: int = 0
    reasons: dict[str, Lost] = field(default_factory=dict)
    causes: dict[Cause, Lost] = field(default_factory=dict)
    ttft: dict[TtftClass, Quantiles] = field(default_factory=dict)
    bins: Bins = field(default_factory=Bins)
    block_bytes: dict[str, Counter[int]] = field(default_factory=dict)
    tiers: dict[str, Tier] = field(default_factory=dict)
    geometry: list[Geometry] = field(default_factory=list)
    block_tokens: int | None = None
    scans: dict[str, int] = field(default_factory=dict)
    rejects: Counter[str] = field(default_factory=Counter)
    unstored_tokens: int = 0
    pressure: Counter[str] = field(default_factory=Counter)
    logged_trouble: Counter[str] = field(default_factory=Counter)

    @property
    def hit_tokens(self) -> int:
        return self.hot_tokens + self.cold_tokens + self.untiered_tokens

    @property
    def hit_share(self) -> float | None:
        """Of the prompt tokens whose reuse is known, the share that was not computed; None without any."""
        known = self.hit_tokens + self.computed_tokens
        return self.hit_tokens / known if known else None

    @property
    def write_amplification(self) -> float | None:
        """Bytes written for each byte of a block written for the first time; 1 when none was written twice."""
        first = self.written_bytes - self.rewritten_bytes
        return self.written_bytes / first if first else None

    def lost(self) -> list[tuple[str, Lost]]:
        """The reasons matching stopped, most tokens first."""
        return sorted(self.reasons.items(), key=lambda item: (-item[1].tokens, -item[1].requests, item[0]))

    def ranked_causes(self) -> list[tuple[Cause, Lost]]:
        """The likely causes, most tokens first; those with nothing to mend last."""
        return sorted(
            self.causes.items(), key=lambda item: (ADVICE[item[0]].startswith("Nothing"), -item[1].tokens, item[0])
        )


class Summarizer:
    """Adds events to a summary. Owner: whoever reads the log. Memory does not grow with the log."""

    def __init__(self) -> None:
        self.summary = Summary()
        self._hot: dict[int | None, Tier] = {}
        self._cold = Tier()
        self._written: OrderedDict[str, None] = OrderedDict()
        self._recent: dict[str, deque[Record]] = {}
        self._explained = 0
        self._handlers: dict[str, Callable[[Event], None]] = {
            "commit": self._commit, "offload": self._offload, "restore": self._restore, "evict": self._evict,
            "quarantine": self._quarantine, "drop": self._drop, "open": self._open, "request": self._request,
            "geometry": self._geometry, "scan": self._scan, "reject": self._reject, "boundary": self._boundary,
            "enforce": self._enforce, "pressure": self._pressure, "trouble": self._trouble,
        }  # fmt: skip

    def add_all(self, events: Iterable[Event]) -> Summary:
        """Add events; returns the summary, which goes on growing when more are added."""
        find = self._handlers.get
        last = None
        for event in events:
            if last is None and self.summary.first_time is None:
                self.summary.first_time = event.time
            last = event
            handler = find(event.event)
            if handler is not None:
                handler(event)
        if last is not None:
            self.summary.last_time = last.time or self.summary.last_time
        if self._hot:
            fullest = max(self._hot.values(), key=lambda tier: tier.peak_bytes)
            shown = self.summary.tiers.setdefault("hot", Tier())
            shown.peak_bytes, shown.held_bytes = fullest.peak_bytes, fullest.held_bytes
        if self._cold != Tier():
            self.summary.tiers["cold"] = self._cold
        return self.summary

    def _commit(self, event: Event) -> None:
        found = self.summary
        tokens, nbytes = event.tokens, event.bytes or 0
        if tokens == 0:
            found.committed_checkpoints += 1
        elif tokens is not None and tokens < BLOCK_TOKENS and event.source == "mlxkv":
            found.committed_tails += 1
        else:
            found.committed_blocks += 1
            if nbytes and event.model:
                sizes = found.block_bytes.get(event.model)
                if sizes is None:
                    sizes = found.block_bytes[event.model] = Counter()
                sizes[nbytes] += 1
        found.committed_bytes += nbytes
        if event.tier == "hot":
            self._hot_tier(event).move(nbytes)

    def _offload(self, event: Event) -> None:
        found, nbytes = self.summary, event.bytes or 0
        found.written_blocks += 1
        found.written_bytes += nbytes
        name = (event.block or "")[:16]
        if name in self._written:
            found.rewritten_bytes += nbytes
            self._written.move_to_end(name)
        else:
            self._written[name] = None
            if len(self._written) > REMEMBERED_BLOCKS:
                self._written.popitem(last=False)
        self._cold.move(nbytes)

    def _restore(self, event: Event) -> None:
        self.summary.restores += 1
        self.summary.restored_bytes += event.bytes or 0

    def _evict(self, event: Event) -> None:
        found, nbytes = self.summary, event.bytes or 0
        tier = event.tier or "cold"
        found.evicted_blocks[tier] += 1
        found.evicted_for_room[tier] += event.reason in ("budget", None)
        found.evicted_bytes += nbytes
        (self._hot_tier(event) if tier == "hot" else self._cold).move(-nbytes)

    def _quarantine(self, event: Event) -> None:
        del event
        self.summary.quarantined_blocks += 1

    def _drop(self, event: Event) -> None:
        self.summary.dropped[event.reason or "not said"] += 1

    def _open(self, event: Event) -> None:
        tier = self.summary.tiers.setdefault("hot", Tier()) if event.tier == "hot" else self._cold
        tier.budget_bytes, tier.off = event.bytes, event.bytes == 0
        if event.tier == "hot":
            self._hot[event.process] = Tier()
        if event.process is not None:
            self.summary.processes.add(event.process)
        if event.reason:
            self.summary.logged_trouble[f"{event.tier} tier not usable: {event.reason}"] += 1

    def _hot_tier(self, event: Event) -> Tier:
        """The hot tier of the event's process; the summary shows the fullest."""
        tier = self._hot.get(event.process)
        if tier is None:
            tier = self._hot[event.process] = Tier()
        return tier

    def _request(self, event: Event) -> None:
        found = self.summary
        found.requests += 1
        found.sources[event.source] += 1
        if event.model:
            found.models[event.model] += 1
        if event.process is not None:
            found.processes.add(event.process)
        found.unfinished_requests += not event.finished
        found.output_tokens += event.output_tokens or 0
        hit, computed = event.hit_tokens, event.computed_tokens
        prompt = event.prompt_tokens or 0
        looked_up = event.looked_up_tokens if event.source != "mlxkv" else event.matched_tokens
        found.looked_up_tokens += looked_up or 0
        found.prompt_tokens += prompt
        if hit is None or computed is None:
            found.unknown_requests += 1
            found.unknown_tokens += prompt
            return
        found.hot_tokens += event.hot_tokens or 0
        found.cold_tokens += event.cold_tokens or 0
        found.untiered_tokens += event.reused_tokens or 0
        found.tail_tokens += event.tail_tokens or 0
        found.computed_tokens += computed
        if prompt < BLOCK_TOKENS:
            found.short_requests += 1
        self._why(event, computed)
        if event.ttft_s is not None and prompt:
            share = hit / prompt
            kind = "reused" if share >= MOSTLY else "computed" if share <= HARDLY else "partly reused"
            found.ttft.setdefault(kind, Quantiles()).add(event.ttft_s)
        at = seconds_of(event.time)
        if at is not None:
            tiers = (event.hot_tokens or 0, event.cold_tokens or 0, event.reused_tokens or 0)
            found.bins.add(at, *tiers, prompt)

    def _why(self, event: Event, computed: int) -> None:
        """Count the reason, and the likely cause where outlines tell it."""
        said = event.reason is not None or event.source == "mlxkv" or computed <= 1
        lost = self.summary.reasons.setdefault(reason_class(event.reason) if said else "not logged", Lost())
        lost.requests += 1
        lost.tokens += max(computed - 1, 0) if event.reason is not None or not said else 0
        if self._explained >= EXPLAINED or event.root is None or not bytes(event.outline):
            return
        record = Record.of(event.to_fields())
        recent = self._recent.setdefault(event.root, deque(maxlen=REMEMBERED_PROMPTS))
        if event.reason is not None and computed > 1:
            self._explained += 1
            cause = explain(record, recent).cause
            counted = self.summary.causes.setdefault(cause, Lost())
            counted.requests += 1
            counted.tokens += computed - 1
        recent.append(record)

    def _geometry(self, event: Event) -> None:
        if event.tokens is not None:
            self.summary.block_tokens = event.tokens
        if event.detail is not None:
            known = {name: event.detail.get(name) for name in Geometry.__dataclass_fields__}
            geometry = Geometry(**known)  # type: ignore[arg-type]
            if geometry not in self.summary.geometry:
                self.summary.geometry.append(geometry)

    def _scan(self, event: Event) -> None:
        for name, count in (event.detail or {}).items():
            self.summary.scans[name] = self.summary.scans.get(name, 0) + count
        if event.bytes is not None:
            self._cold.held_bytes = event.bytes
            self._cold.peak_bytes = max(self._cold.peak_bytes, event.bytes)

    def _reject(self, event: Event) -> None:
        self.summary.rejects[event.reason or "not said"] += 1

    def _boundary(self, event: Event) -> None:
        self.summary.unstored_tokens += (event.detail or {}).get("unstored_tokens", 0)

    def _enforce(self, event: Event) -> None:
        self.summary.evicted_bytes += event.bytes or 0
        self._cold.move(-(event.bytes or 0))

    def _pressure(self, event: Event) -> None:
        self.summary.pressure[event.reason or "not said"] += 1

    def _trouble(self, event: Event) -> None:
        self.summary.logged_trouble[event.reason or "not said"] += 1


def summarize(reader: LogReader, events: Iterable[Event]) -> Summary:
    """The summary of everything a reader gives."""
    found = Summarizer().add_all(events)
    for source, count in reader.records.items():
        if count:
            found.sources.setdefault(source, 0)
    return found
