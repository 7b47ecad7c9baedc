"""The block store: both tiers, the mover and the log behind one owner; it knows names and bytes, not models.

Match and plan, then load; commit in prefix order. Every failure to read is a miss, every failure to write leaves a
block in memory, and the reason goes into the log.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mlxkv.cache.block_log import BlockEvent, BlockLog
from mlxkv.cache.codec import BlockIdentity, View
from mlxkv.cache.cold import ColdTier
from mlxkv.cache.hot import HotTier, Payload
from mlxkv.cache.layout import Layout
from mlxkv.cache.mover import Mover
from mlxkv.cache.names import (
    BLOCK_TOKEN_BYTES,
    BLOCK_TOKENS,
    TOKEN_BYTES,
    BlockName,
    block_name,
    checkpoint_name,
    common_tokens,
)
from mlxkv.cache.prefix import Held, Match, Part, TierName, match
from mlxkv.core.config import CacheConfig, default_floor_bytes
from mlxkv.core.errors import DamagedBlockError

CHECKPOINT_BATCH = 64
REMEMBERED = 100_000  # names of blocks that went, so that a miss can say why
CLOSE_S = 30.0
REFUSED_PAUSE_S = 1.0  # after a refused write nothing is offered for this long
_SMOOTHING = 0.3

MakeViews = Callable[[int], tuple[list[View], list[int]]]
"""Block index -> writable bytes of its place in the sequence being restored, in payload order, and which tensors."""


class Rate:
    """Units per second, smoothed over measurements; None until measured once."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, amount: float, seconds: float) -> None:
        if seconds > 0:
            now = amount / seconds
            self.value = now if self.value is None else (1 - _SMOOTHING) * self.value + _SMOOTHING * now

    def seconds(self, amount: float) -> float | None:
        return None if self.value is None else amount / self.value


class Read(NamedTuple):
    """How many parts arrived in order, and whether a reader may still be writing into the views of the others."""

    parts: int
    overran: bool


class Reading:
    """Cold parts on their way into place. Owner: the thread that owns the store."""

    def __init__(
        self,
        store: BlockStore,
        root: BlockName,
        parts: list[Part],
        futures: list[Future[int]],
        deadline_s: float,
        request: str | None,
    ) -> None:
        self.root = root
        self.parts = parts
        self.futures = futures
        self.request = request
        self.started = time.perf_counter()
        self._store = store
        self._deadline_s = deadline_s

    def ready(self) -> bool:
        """Whether there is nothing more to wait for: all are done, or the time is up."""
        return all(future.done() for future in self.futures) or self._left() <= 0

    def finish(self) -> Read:
        """Wait as long as the deadline allows and say what may be used."""
        wait(self.futures, timeout=max(self._left(), 0))
        return self._store._take(self)

    def _left(self) -> float:
        return self._deadline_s - (time.perf_counter() - self.started)


@dataclass
class Plan:
    """What a restore will take, pinned until `BlockStore.release`. `reason` says why it is not longer.

    `checkpoint` is where a model with states resumes: at the end of the last part.
    """

    match: Match
    reason: str | None
    checkpoint: Part | None = None
    pins: list[tuple[TierName, BlockName]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Queued:
    """A block on its way to the cold tier; it can be matched and copied like a hot one."""

    block: BlockIdentity
    payload: Payload

    @property
    def name(self) -> BlockName:
        return self.block.name

    @property
    def parent(self) -> BlockName:
        return self.block.parent

    @property
    def tokens(self) -> bytes:
        return self.block.tokens


class BlockStore:
    """Owner: the thread that owns MLX. The mover's threads only see bytes and the cold tier.

    Invariants: each tier is prefix-closed by itself; both keep their budgets; pins are zero when nothing is planned.
    """

    def __init__(self, config: CacheConfig) -> None:
        """Open the tiers.

        Raises:
            CacheRootError: the directory is not safe to use.
        """
        self.config = config
        self.log = BlockLog(config.log)
        self.hot = HotTier(config.hot_bytes)
        self.cold: ColdTier | None = None
        self.hot_rate, self.cold_rate = Rate(), Rate()
        self._mover: Mover | None = None
        self._queued: dict[BlockName, _Queued] = {}
        self._roots: dict[BlockName, tuple[Layout, Mapping[str, str]]] = {}
        self._seen: OrderedDict[BlockName, None] = OrderedDict()
        self._gone: OrderedDict[BlockName, str] = OrderedDict()
        self._doubted: set[BlockName] = set()  # rows that the mover will drop, for a file was damaged or missing
        self._unreadable: set[BlockName] = set()
        self._withdrawn: Counter[BlockName] = Counter()  # the SSD may still hold them, until the mover was there
        self._erased: queue.SimpleQueue[Sequence[BlockName]] = queue.SimpleQueue()  # it was
        self._replaced: list[_Queued] = []  # withdrawn while they were being written
        self._no_offload_before = 0.0
        self._closed = False
        if config.directory is not None and config.cold_bytes and config.cold_mode != "off":
            self._open_cold(config.directory)
        self.log.write(BlockEvent(event="open", bytes=config.hot_bytes, tier="hot"))

    def _open_cold(self, directory: Path) -> None:
        floor = self.config.floor_bytes
        cold = ColdTier(
            directory,
            self.config.cold_bytes,
            floor_bytes=default_floor_bytes(directory) if floor is None else floor,
            daily_write_bytes=self.config.daily_write_bytes,
            log=self.log,
        )
        cold.open()
        self.cold = cold
        self._mover = Mover(cold, self.config.queue_bytes)
        self.log.write(BlockEvent(event="open", bytes=self.config.cold_bytes, tier="cold", reason=cold.offline))

    # matching

    def plan(self, root: BlockName, packed: bytes) -> Plan:
        """Match `packed` tokens and pin what was found. Cost: see `prefix.match`; opens no block file.

        Where the root's layout has states, the match ends at the deepest checkpoint in it.
        """
        self._collect()
        found = match(root, packed, self.hot, _OnDisk(self._queued, self._withdrawn, self.cold))
        plan = Plan(found, self._reason(root, packed, found))
        if self._roots[root][0].states:
            self._end_at_checkpoint(plan)
        self._pin(plan, plan.match.parts, plan.checkpoint)
        return plan

    def shorten(self, plan: Plan, parts: int, reason: str) -> None:
        """Use only the first `parts` parts of a plan, or fewer where it has to end at a checkpoint."""
        self.release(plan)
        needs_checkpoint = plan.checkpoint is not None
        plan.match, plan.reason, plan.checkpoint = plan.match.first(parts), reason, None
        if needs_checkpoint:
            self._end_at_checkpoint(plan)
            plan.reason = reason
        self._pin(plan, plan.match.parts, plan.checkpoint)

    def release(self, plan: Plan) -> None:
        """Give back the pins of a plan; a second call does nothing."""
        for tier, name in plan.pins:
            if tier == "hot":
                self.hot.unpin(name)
            elif self.cold is not None:
                self.cold.unpin(name)
        plan.pins = []

    def unpin_tail(self, plan: Plan) -> None:
        """Once copied, the tail and the checkpoint of a plan may go: later ones take their place. The rest stays.

        A checkpoint that stayed pinned would keep its successor out of a tier with room for one.
        """
        parts = plan.match.parts
        tail = bool(parts) and parts[-1].is_tail
        if tail or plan.checkpoint is not None:
            self.release(plan)
            self._pin(plan, parts[:-1] if tail else parts, None)

    def why_gone(self, name: BlockName) -> str | None:
        """Why a block that was held is not any more; None when it was never seen to go."""
        return self._gone.get(name)

    def payload(self, part: Part) -> Payload | None:
        """The arrays of a part that is in memory; None when it has to be read."""
        if part.name in self.hot:
            return self.hot.payload(part.name)
        queued = self._queued.get(part.name)
        return queued.payload if queued else None

    def read(
        self,
        root: BlockName,
        parts: Sequence[Part],
        layout: Layout,
        views: MakeViews,
        deadline_s: float,
        *,
        request: str | None = None,
    ) -> Reading:
        """Begin to read cold parts into place, several at a time; `Reading.finish` says which may be used.

        Args:
            deadline_s: after this long, what has arrived is used and the rest is computed.
        """
        futures = [self._mover.read(_identity(root, part), layout, *views(part.index)) for part in parts if self._mover]
        return Reading(self, root, list(parts), futures, deadline_s, request)

    def _take(self, reading: Reading) -> Read:
        """The parts before the first that failed, counted and logged."""
        seconds = time.perf_counter() - reading.started
        good = nbytes = 0
        while good < len(reading.futures) and self._arrived(reading.root, reading.parts[good], reading.futures[good]):
            nbytes += reading.futures[good].result()
            good += 1
        if good < len(reading.futures) and reading.futures[good].done():
            self._doubt([part.name for part in reading.parts[good:]])  # with a block goes what continues it
        overran = any([not future.done() and not future.cancel() for future in reading.futures])
        if good:
            self.cold_rate.add(nbytes, seconds)
            deepest = reading.parts[good - 1].name
            self.log.write(BlockEvent(event="restore", root=reading.root, request=reading.request, block=deepest,
                                      tier="cold", bytes=nbytes, ms=round(seconds * 1e3, 3)))  # fmt: skip
            names = [part.name for part in reading.parts[:good]]
            self._submit(lambda cold: cold.hit(names))
        return Read(good, overran)

    def used(self, parts: Sequence[Part]) -> None:
        """Count a hit of each hot part; what the SSD does not hold yet is offered to it again."""
        hot = [part for part in parts if part.tier == "hot" and part.name in self.hot]
        self.hot.hit([part.name for part in hot])
        full = [part for part in hot if not part.is_tail]
        if full:
            self._offload(full[-1].name)

    # committing

    def register(self, root: BlockName, layout: Layout, fields: Mapping[str, str], *, model: str) -> None:
        """Make a root known: its layout for offloads, its fields to say later how two roots differ."""
        self._roots[root] = (layout, fields)
        self.log.name_root(root, model)
        if self.cold is not None:
            self.cold.describe(root, {**fields, "model": model})

    def root_fields(self, root: BlockName) -> Mapping[str, str] | None:
        """The fields of a root that this process uses or that the directory describes."""
        if root in self._roots:
            return self._roots[root][1]
        return self.cold.root_fields(root) if self.cold else None

    def model_of(self, root: BlockName) -> str | None:
        """The name of the model that a root belongs to; None when neither this process nor the directory says."""
        fields = self.cold.root_fields(root) if self.cold else None
        return self.log.model_of(root) or (fields or {}).get("model")

    def holds(self, name: BlockName, parent: BlockName, *, first: bool) -> bool:
        """Whether committing this block would change nothing: it is hot, or it cannot be and is on the SSD."""
        if name in self.hot:
            return True
        if self.hot.budget_bytes and (first or parent in self.hot):
            return False
        return self._on_disk(name)

    def is_held(self, name: BlockName) -> bool:
        """Whether a tier holds this block, or will once it is written."""
        return name in self.hot or self._on_disk(name)

    def commit(self, block: BlockIdentity, payload: Payload, *, request: str | None = None) -> None:
        """Publish a full block or a checkpoint under its name: hot when there is room, and queued for the SSD.

        Its root must be registered. A block whose parent neither tier holds is not kept: there would be a hole.
        """
        self._collect()
        nbytes = sum(array.nbytes for array in payload)
        held = self._put(block, payload)
        if self._mover is not None and self._may_offload(block.name):
            self._offload(block.name, block=block, payload=payload)
        self._gone.pop(block.name, None)
        self._unreadable.discard(block.name)
        self.log.write(
            BlockEvent(event="commit", root=block.root, request=request, block=block.name, parent=block.parent,
                       index=block.index, tokens=len(block.tokens) // TOKEN_BYTES, bytes=nbytes,
                       tier="hot" if held else None)
        )  # fmt: skip

    def commit_tail(self, block: BlockIdentity, payload: Payload, *, request: str | None = None) -> None:
        """Keep the partial block at the end of a chain, hot only, unless something held already continues it."""
        tokens = len(block.tokens) // TOKEN_BYTES
        if any(common_tokens(s.tokens, block.tokens) == tokens for s in self.hot.children(block.parent)):
            return
        if self._put(block, payload):
            nbytes = sum(array.nbytes for array in payload)
            self.log.write(BlockEvent(event="commit", root=block.root, request=request, block=block.name,
                                      parent=block.parent, index=block.index, tokens=tokens, bytes=nbytes,
                                      tier="hot"))  # fmt: skip

    def withdraw(self, names: Sequence[BlockName], *, request: str | None = None) -> None:
        """Take back what was committed and should not have been, with all that continues it, from both tiers.

        Nothing of it is matched from now on, though a pin may hold it; the SSD loses it once the mover gets there.
        """
        self._collect()
        for entry in (entry for name in names for entry in self.hot.withdraw(name)):
            self._remember(entry.name, "withdrawn")
            self.log.write(BlockEvent(event="evict", request=request, block=entry.name, parent=entry.parent,
                                      bytes=entry.nbytes, tier="hot", reason="withdrawn"))  # fmt: skip
        gone = set(names)
        for queued in list(self._queued.values()):  # parents first
            if queued.name in gone or queued.parent in gone:
                gone.add(queued.name)
                self._replaced.append(self._queued.pop(queued.name))
        if self.cold is not None and names:
            self._withdrawn.update(names)
            self._submit(lambda cold: self._erase(cold, tuple(names)))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every hot block that belongs on the SSD is there; False when the time was up or it cannot be."""
        end = time.monotonic() + (CLOSE_S if timeout_s is None else timeout_s)
        while self._mover is not None:
            complete = self._offload_all()
            if not self._mover.flush(max(end - time.monotonic(), 0)):
                return False
            if self._collect():
                return False
            if complete:
                return True
        return True

    def close(self, timeout_s: float = CLOSE_S) -> int:
        """Write what waits, within the time, and stop the threads; returns how many hot blocks the SSD lacks."""
        if self._closed:
            return 0
        self._closed = True
        lost = 0
        if self._mover is not None and self.cold is not None:
            started = time.monotonic()
            self._submit(lambda cold: cold.retry(now=True))
            self.flush(timeout_s)
            lost = len(self._missing())
            if self._mover.close(max(timeout_s - (time.monotonic() - started), 1.0)):
                self.cold.close()
            self._collect()
        self.log.write(BlockEvent(event="close", reason=f"{lost} blocks not on the SSD" if lost else None))
        self.log.close()
        return lost

    def pins(self) -> int:
        return self.hot.pins() + (self.cold.pins() if self.cold else 0)

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant of a tier does not hold."""
        self._collect()
        self.hot.check_integrity()
        if self.cold is not None and self._mover is not None:
            self.cold.check_integrity()
            queued = sum(array.nbytes for block in (*self._queued.values(), *self._replaced) for array in block.payload)
            assert queued == self._mover.queued_bytes, f"{queued} B queued, the mover says {self._mover.queued_bytes} B"

    # within

    def _end_at_checkpoint(self, plan: Plan) -> None:
        """Cut a plan back to the deepest checkpoint within it."""
        found = plan.match
        whole = [part for part in found.parts if part.tokens == BLOCK_TOKENS and not part.is_tail]
        count, plan.checkpoint = self._deepest_checkpoint(whole)
        if count < len(found.parts):
            plan.match, plan.reason = found.first(count), "no checkpoint"

    def _deepest_checkpoint(self, parts: Sequence[Part]) -> tuple[int, Part | None]:
        """How many of `parts` (whole blocks, in order) end at a checkpoint, and the checkpoint."""
        for stop in range(len(parts), 0, -CHECKPOINT_BATCH):
            batch = [(i, checkpoint_name(parts[i].name)) for i in range(max(stop - CHECKPOINT_BATCH, 0), stop)]
            cold = self.cold.held([name for _, name in batch]) if self.cold else {}
            for i, name in reversed(batch):
                if name in self.hot or name in self._queued:
                    return i + 1, Part(name, parts[i].name, i + 1, b"", 0, "hot" if name in self.hot else "cold")
                if name in cold and name not in self._unreadable and not self._withdrawn[name]:
                    return i + 1, Part(name, parts[i].name, i + 1, b"", 0, "cold")
        return 0, None

    def _pin(self, plan: Plan, parts: Sequence[Part], checkpoint: Part | None) -> None:
        pinned = [*parts, *([checkpoint] if checkpoint else [])]
        for tier, name in {part.tier: part.name for part in pinned}.items():  # the deepest of each tier
            if tier == "hot":
                self.hot.pin(name)
            elif self.cold is not None:
                self.cold.pin(name)
            plan.pins.append((tier, name))

    def _reason(self, root: BlockName, packed: bytes, found: Match) -> str | None:
        if found.tokens >= found.limit:
            return None
        if found.next_name is not None and found.next_name in self._gone:
            return self._gone[found.next_name]
        if found.tokens:
            return f"diverged at token {found.tokens}" if found.diverged else "never seen"
        if len(packed) < BLOCK_TOKEN_BYTES:
            return "shorter than a block"
        other = self._same_start(root, packed[:BLOCK_TOKEN_BYTES])
        if other is not None:
            return self._difference(root, other)
        return "diverged at token 0" if found.diverged else "never seen"

    def _same_start(self, root: BlockName, tokens: bytes) -> BlockName | None:
        for other in self._roots:
            if other != root and block_name(other, tokens) in self.hot:
                return other
        return self.cold.same_start(tokens, root) if self.cold else None

    def _difference(self, root: BlockName, other: BlockName) -> str:
        mine, theirs = self.root_fields(root), self.root_fields(other)
        if mine is None or theirs is None:
            return "other root"
        keys = {*mine, *theirs} - {"model"}  # a name beside the fields, for people
        differing = sorted(key for key in keys if mine.get(key) != theirs.get(key))
        return "other salt" if differing == ["salt"] else f"other root ({', '.join(differing)})"

    def _arrived(self, root: BlockName, part: Part, future: Future[int]) -> bool:
        if not future.done():
            return False
        block = _identity(root, part)
        try:
            future.result()
        except DamagedBlockError as error:
            reason = error.reason
            self._unreadable.add(part.name)
            self._remember(part.name, "damaged")
            self._submit(lambda cold: cold.quarantine(block, reason))
            return False
        except OSError as error:
            failure = error
            self._unreadable.add(part.name)
            self._remember(part.name, "evicted" if isinstance(error, FileNotFoundError) else "unreadable")
            self._submit(lambda cold: cold.forget(block, failure))
            return False
        return True

    def _erase(self, cold: ColdTier, names: Sequence[BlockName]) -> None:
        """On the mover's thread, after what was queued before."""
        cold.withdraw(names)
        self._erased.put(names)

    def _put(self, block: BlockIdentity, payload: Payload) -> bool:
        """Hold a block or tail hot, in place of the tails it continues."""
        shorter = [
            entry.name
            for entry in self.hot.children(block.parent)
            if 0 < len(entry.tokens) < len(block.tokens) and block.tokens.startswith(entry.tokens) and not entry.pins
        ]
        held, gone = self.hot.put(block.name, block.parent, block.tokens, payload, first=block.index == 0)
        for entry in gone:
            self._remember(entry.name, "evicted")
            tokens = len(entry.tokens) // TOKEN_BYTES
            self.log.write(BlockEvent(event="evict", block=entry.name, parent=entry.parent, bytes=entry.nbytes,
                                      tokens=tokens, tier="hot", reason="budget"))  # fmt: skip
        for name in shorter:
            if held and name in self.hot:
                self.hot.remove(name)
        return held

    def _may_offload(self, name: BlockName) -> bool:
        """Whether the mode lets this block be written; in `second-use`, when it was committed before."""
        if self.config.cold_mode == "through":
            return True
        seen = name in self._seen
        self._seen[name] = None
        self._seen.move_to_end(name)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return seen

    def _offload(self, name: BlockName, *, block: BlockIdentity | None = None, payload: Payload | None = None) -> bool:
        """Queue a block for the SSD, after those of its ancestors that are not there; False when it has to wait."""
        if self._mover is None or time.monotonic() < self._no_offload_before:
            return False
        if self._on_disk(name if block is None else block.name):
            return True
        waiting: list[tuple[BlockIdentity, Payload]] = []
        if block is not None and payload is not None:
            waiting.append((block, payload))
            name = block.parent
        for ancestor in self._hot_chain(name):
            if self._on_disk(ancestor.name):
                break
            waiting.append((ancestor, self.hot.payload(ancestor.name)))
        top = waiting[-1][0] if waiting else None
        if top is not None and top.index > 0 and not self._on_disk(top.parent):
            return False  # a hole above: it could never be found
        for ancestor, arrays in reversed(waiting):
            layout = self._roots[ancestor.root][0]
            if not self._mover.offload(ancestor, layout, [memoryview(array).cast("B") for array in arrays]):
                return False
            self._doubted.discard(ancestor.name)
            self._queued[ancestor.name] = _Queued(ancestor, arrays)
        return True

    def _hot_chain(self, name: BlockName) -> list[BlockIdentity]:
        """The hot block `name` and its ancestors, deepest first; empty when it is not hot."""
        entries = []
        entry = self.hot.get(name)
        while entry is not None:
            entries.append(entry)
            entry = self.hot.get(entry.parent)
        root = entries[-1].parent if entries else b""
        return [BlockIdentity(root, e.name, e.parent, len(entries) - 1 - i, e.tokens) for i, e in enumerate(entries)]

    def _on_disk(self, name: BlockName) -> bool:
        """Whether the cold tier holds a block, or soon will, as far as is known here."""
        if name in self._queued:
            return True
        unsure = name in self._doubted or self._withdrawn[name]
        return not unsure and self.cold is not None and self.cold.find(name) is not None

    def _doubt(self, names: Sequence[BlockName]) -> None:
        if len(self._doubted) > REMEMBERED:
            self._doubted.clear()
        self._doubted.update(names)

    def _missing(self) -> list[BlockName]:
        """Hot blocks that belong on the SSD and are not there, nor on their way."""
        mode = self.config.cold_mode
        return [
            entry.name
            for entry in self.hot.entries()
            if len(entry.tokens) in (BLOCK_TOKEN_BYTES, 0)  # a block, or a checkpoint; tails stay hot
            and (mode == "through" or entry.hits)
            and not self._on_disk(entry.name)
        ]

    def _offload_all(self) -> bool:
        return all([self._offload(name) for name in self._missing()])

    def _collect(self) -> int:
        """Take note of what the mover finished; returns how many blocks the cold tier refused."""
        refused = 0
        for item in self._mover.done() if self._mover is not None else ():
            queued = self._queued.get(item.block.name)
            if queued is not None and queued.block is item.block:
                del self._queued[item.block.name]
            else:
                self._replaced = [other for other in self._replaced if other.block is not item.block]
            if item.reason is not None:
                refused += 1
                self._no_offload_before = time.monotonic() + REFUSED_PAUSE_S
        while not self._erased.empty():
            self._withdrawn.subtract(self._erased.get())
        return refused

    def _remember(self, name: BlockName, reason: str) -> None:
        self._gone[name] = reason
        self._gone.move_to_end(name)
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def _submit(self, work: Callable[[ColdTier], object]) -> None:
        cold = self.cold
        if self._mover is not None and cold is not None:
            self._mover.submit(lambda: work(cold))


class _OnDisk:
    """The cold tier and what is on its way there, as matching sees them."""

    def __init__(
        self, queued: Mapping[BlockName, _Queued], withdrawn: Mapping[BlockName, int], cold: ColdTier | None
    ) -> None:
        self._queued = queued
        self._withdrawn = withdrawn
        self._cold = cold

    def walk(self, names: Sequence[BlockName]) -> Iterator[Held]:
        at = 0
        while at < len(names):
            if names[at] in self._queued:
                yield self._queued[names[at]]
                at += 1
                continue
            before = at
            for row in self._cold.walk(names[at:]) if self._cold else ():
                if self._withdrawn.get(row.name):
                    return
                yield row
                at += 1
            if at == before or (at < len(names) and names[at] not in self._queued):
                return

    def children(self, parent: BlockName) -> Iterable[Held]:
        yield from (block for block in self._queued.values() if block.parent == parent)
        rows = self._cold.children(parent) if self._cold else ()
        yield from (row for row in rows if not self._withdrawn.get(row.name))


def _identity(root: BlockName, part: Part) -> BlockIdentity:
    return BlockIdentity(root, part.name, part.parent, part.index, part.packed)
