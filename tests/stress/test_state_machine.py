"""Any sequence of operations, crashes included: what is held is prefix-closed, sums are right, bytes stay the same.

Prompts are paths in a small tree, one letter a block, so that chains share prefixes and part. The machine waits for the
mover after every step: what happens while it writes is for `test_faults` and `test_processes`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from blocks import ROOT, block_layout, blocks_of, empty_payload, payload_of, views_of
from driving import block_files
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from mlxkv.cache.codec import BlockIdentity, file_name, inspect, relative_path, write_block
from mlxkv.cache.names import BLOCK_TOKENS, common_tokens, pack
from mlxkv.cache.prefix import Part
from mlxkv.cache.store import BlockStore, Plan
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import KIB, MIB

LAYOUT = block_layout(4 * KIB)
HOT_BLOCKS = 6
COLD_BYTES = 3 * MIB // 4  # after the index and the directories there is room for about a dozen blocks
NOBODY = 2**22 + 1  # above the largest process id of Linux
WAIT_S = 20.0

letters = st.integers(0, 1)
paths = st.lists(letters, min_size=1, max_size=4)
rests = st.integers(0, BLOCK_TOKENS - 1)


def tokens_of(path: list[int], rest: int, last: int) -> list[int]:
    """64 tokens a letter, and `rest` tokens of one more block."""
    return [1000 * (i + 1) + letter for i, letter in enumerate(path) for _ in range(BLOCK_TOKENS)] + [
        1000 * (len(path) + 1) + last
    ] * rest


class StoreMachine(RuleBasedStateMachine):
    plans = Bundle("plans")

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="mlxkv-machine-"))
        self.directory = self.home / "blocks"
        self.live: list[Plan] = []
        self.committed: list[list[int]] = []
        self.open(HOT_BLOCKS)

    def open(self, hot_blocks: int) -> None:
        config = CacheConfig(
            directory=self.directory,
            hot_bytes=hot_blocks * LAYOUT.block_bytes,
            cold_bytes=COLD_BYTES,
            floor_bytes=0,
            queue_bytes=2 * LAYOUT.block_bytes,
        )
        self.store = BlockStore(config)
        self.store.register(ROOT, LAYOUT, {}, model="tiny")
        assert self.store.cold is not None
        assert self.store._mover is not None
        self.cold, self.mover = self.store.cold, self.store._mover
        assert self.cold.offline is None

    def settle(self) -> None:
        assert self.mover.flush(WAIT_S)
        self.store._collect()

    # what requests do

    @initialize(path=paths, rest=rests, last=letters)
    def commit_first(self, path: list[int], rest: int, last: int) -> None:
        self.commit(path, rest, last)

    @rule(path=paths, rest=rests, last=letters)
    def commit(self, path: list[int], rest: int, last: int) -> None:
        self.committed.append(tokens_of(path, rest, last))
        blocks = blocks_of(self.committed[-1])
        new = False
        for block in blocks[: len(path)]:
            if new or not self.store.holds(block.name, block.parent, first=block.index == 0):
                new = True
                self.store.commit(block, arrays_of(block))
                self.settle()
        if rest:
            self.store.commit_tail(blocks[-1], tail_arrays_of(blocks[-1], rest))
        self.settle()

    @rule(target=plans, path=paths, rest=rests, last=letters)
    def match(self, path: list[int], rest: int, last: int) -> Plan:
        return self.plan(tokens_of(path, rest, last))

    @rule(target=plans, which=st.integers(0, 9), cut=st.integers(0, 70))
    def match_again(self, which: int, cut: int) -> Plan:
        """A prompt that was committed, without its last few tokens, and one more."""
        tokens = self.committed[which % len(self.committed)]
        return self.plan([*tokens[: max(len(tokens) - cut, 0)], 1])

    def plan(self, tokens: list[int]) -> Plan:
        held = [*self.store.hot.entries(), *self.cold.rows()]
        plan = self.store.plan(ROOT, pack(tokens))
        assert plan.match.tokens == longest_held(tokens, held)
        self.check_bytes(plan)
        self.settle()
        self.live.append(plan)
        return plan

    def check_bytes(self, plan: Plan) -> None:
        """What the plan would restore is what was committed; a file that is damaged or gone ends it early."""
        parts = plan.match.parts
        good = 0
        while good < len(parts) and (payload := self.store.payload(parts[good])) is not None:
            part = parts[good]
            assert first_tokens(payload, part.tokens) == expected_bytes(part)
            good += 1
        room: dict[int, list[np.ndarray]] = {part.index: empty_payload(LAYOUT) for part in parts[good:]}
        everything = list(range(len(LAYOUT.tensors)))
        reading = self.store.read(ROOT, parts[good:], LAYOUT, lambda index: (views_of(room[index]), everything), WAIT_S)
        read = reading.finish()
        assert not read.overran
        for part in parts[good : good + read.parts]:
            assert first_tokens(room[part.index], part.tokens) == expected_bytes(part)
        if good + read.parts < len(parts):
            lost = self.cold.path(identity(parts[good + read.parts]))
            assert not is_sound(lost), "a good file was not believed"
            self.store.shorten(plan, good + read.parts, "damaged")

    @rule(plan=plans)
    def use(self, plan: Plan) -> None:
        if self.is_live(plan):
            self.store.used(plan.match.parts)
            self.store.unpin_tail(plan)
            self.settle()

    @rule(plan=consumes(plans))
    def release(self, plan: Plan) -> None:
        if self.is_live(plan):
            self.live = [other for other in self.live if other is not plan]
            self.store.release(plan)
            self.store.release(plan)  # a second time does nothing

    def is_live(self, plan: Plan) -> bool:
        """Whether the plan is of the store that is open now, and not released."""
        return any(other is plan for other in self.live)

    # what happens to the tiers

    @rule(hot=st.integers(0, 2), cold=st.integers(0, 3), everything=st.integers(0, 4))
    def evict(self, hot: int, cold: int, everything: int) -> None:
        """So many blocks of each tier, or now and then all that may go."""
        hot, cold = (hot, cold) if everything else (99, 99)
        held = {"hot": self.store.hot, "cold": self.cold}
        pinned = {(tier, name) for plan in self.live for tier, name in plan.pins if is_held(held[tier], name)}
        for _ in range(hot):
            self.store.hot.evict()
        self.mover.submit(lambda: self.cold.shrink(self.cold.used_bytes - cold * 8 * KIB))
        self.settle()
        assert all(is_held(held[tier], name) for tier, name in pinned)

    @rule(data=st.data(), how=st.sampled_from(["cut", "flip", "gone"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        files = block_files(self.directory)
        if not files:
            return
        path = data.draw(st.sampled_from(files))
        if how == "gone":
            path.unlink()
        elif how == "cut":
            os.truncate(path, path.stat().st_size // 2)
        else:
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([byte ^ 1]))
        while self.store.hot.evict() is not None:
            pass  # so that what is damaged is asked for

    @rule(hot_blocks=st.sampled_from([0, 2, HOT_BLOCKS]))
    def restart(self, hot_blocks: int) -> None:
        for plan in self.live:
            self.store.release(plan)
        self.live.clear()
        self.store.close(WAIT_S)
        assert not list(self.directory.glob("index.sqlite-*")), "closed in order, the index needs no log"
        self.open(hot_blocks)

    @rule(path=paths, at=st.sampled_from(["row", "half a file", "whole file"]))
    def crash(self, path: list[int], at: str) -> None:
        """The process dies while it writes a block: the disk is left as it was at that moment."""
        block = blocks_of(tokens_of(path, 0, 0))[-1]
        index = self.cold._index
        assert index is not None
        if not index.is_held(block.name, writing=True):
            with index.transaction():
                index.insert(block, 8 * KIB, writer=NOBODY)
            leave_file(self.directory, block, at)
        index.close()
        self.cold._index = None
        self.mover.close(WAIT_S)
        self.live.clear()
        self.open(HOT_BLOCKS)
        assert not list(self.directory.rglob("*.tmp"))

    # what always holds

    @invariant()
    def sums_and_pins_are_right(self) -> None:
        self.store.check_integrity()
        assert self.store.pins() == sum(len(plan.pins) for plan in self.live)
        assert self.cold.used_bytes <= COLD_BYTES

    @invariant()
    def what_is_held_is_prefix_closed_in_each_tier(self) -> None:
        for held in (list(self.store.hot.entries()), self.cold.rows()):
            names = {ROOT} | {entry.name for entry in held}
            assert all(entry.parent in names for entry in held)

    @invariant()
    def used_bytes_are_those_of_the_files(self) -> None:
        rows = self.cold.rows()
        here = {self.cold.path(row): row.nbytes for row in rows}
        assert self.cold.totals() == (len(rows), sum(here.values()))
        files = block_files(self.directory)
        assert set(files) <= set(here), "a file that nobody counts"
        for path in files:
            if is_sound(path):
                assert path.stat().st_blocks * 512 == here[path]

    def teardown(self) -> None:
        for plan in self.live:
            self.store.release(plan)
        assert self.store.pins() == 0
        self.store.close(WAIT_S)
        shutil.rmtree(self.home)


def is_held(tier: Any, name: bytes) -> bool:
    return name in tier if tier.name == "hot" else tier.find(name) is not None


def arrays_of(block: BlockIdentity) -> tuple[mx.array, ...]:
    return tuple(mx.array(array) for array in payload_of(block, LAYOUT))


def tail_arrays_of(block: BlockIdentity, tokens: int) -> tuple[mx.array, ...]:
    """A tail's payload: so many tokens of a block's worth, drawn from the tail's name."""
    return tuple(mx.array(array.reshape(BLOCK_TOKENS, -1)[:tokens]) for array in payload_of(block, LAYOUT))


def first_tokens(payload: Any, tokens: int) -> bytes:
    width = LAYOUT.bytes_per_token
    return b"".join(bytes(memoryview(array).cast("B"))[: tokens * width] for array in payload)


def expected_bytes(part: Part) -> bytes:
    return first_tokens(payload_of(identity(part), LAYOUT), part.tokens)


def identity(part: Part) -> BlockIdentity:
    return BlockIdentity(ROOT, part.name, part.parent, part.index, part.packed)


def longest_held(tokens: list[int], held: list[Any]) -> int:
    """Brute force: the longest common prefix with any held block or tail whose ancestors are held, one token left."""
    by_name = {entry.name: entry for entry in held}
    best = 0
    for entry in held:
        whole, parent = entry.tokens, entry.parent
        while parent != ROOT and parent in by_name:
            whole, parent = by_name[parent].tokens + whole, by_name[parent].parent
        if parent == ROOT:
            best = max(best, common_tokens(whole, pack(tokens)))
    return min(best, len(tokens) - 1)


def is_sound(path: Path) -> bool:
    try:
        return file_name(inspect(path, payload=True)[0].name) == path.name
    except Exception:  # noqa: BLE001 - whatever is wrong with it
        return False


def leave_file(directory: Path, block: BlockIdentity, at: str) -> None:
    """What a dead writer leaves: nothing, half of its temporary file, or the file without its row."""
    path = directory / relative_path(ROOT, block.name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if at == "row":
        return
    name = path.name if at == "whole file" else f".{path.name}.{NOBODY}.0.tmp"
    fd = os.open(path.parent / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    written = write_block(fd, block, LAYOUT, views_of(payload_of(block, LAYOUT)))
    if at != "whole file":
        os.truncate(fd, written // 2)
    os.close(fd)


StoreMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=40)
TestStore = StoreMachine.TestCase
