"""What both tiers promise: budget, leaves first, order of use, pins, no holes. Checked behind every test's back too."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from blocks import OTHER_ROOT, ROOT, block_layout, blocks_of, payload_of, random_blocks, views_of

from mlxkv.cache.block_log import BlockLog
from mlxkv.cache.codec import BlockIdentity
from mlxkv.cache.cold import ColdTier
from mlxkv.cache.hot import HotTier
from mlxkv.cache.layout import Layout
from mlxkv.core.errors import DamagedBlockError

ROOM = 4
LAYOUT = block_layout(256 * 1024)
HUGE = block_layout(8 * 256 * 1024)


class Hot:
    """The hot tier with room for four blocks."""

    def __init__(self, _: Path) -> None:
        self.tier = HotTier(ROOM * LAYOUT.block_bytes)

    def put(self, block: BlockIdentity, layout: Layout = LAYOUT) -> bool:
        payload = tuple(payload_of(block, layout))
        return self.tier.put(block.name, block.parent, block.tokens, payload, first=block.index == 0)[0]

    def use(self, block: BlockIdentity) -> None:
        self.tier.hit([block.name])

    def holds(self, block: BlockIdentity) -> bool:
        return block.name in self.tier

    def hits(self, block: BlockIdentity) -> int:
        return self.tier.get(block.name).hits

    def read(self, block: BlockIdentity) -> bytes:
        return self.tier.payload(block.name)[0].tobytes()

    def close(self) -> None:
        pass


class Cold:
    """The cold tier with room for four blocks, and half a block for directories and the index, which count too."""

    def __init__(self, directory: Path) -> None:
        self.tier = ColdTier(directory, 2**40, floor_bytes=0, daily_write_bytes=None, log=BlockLog())
        self.tier.open()
        self.tier.describe(ROOT, {"model": "tiny"})
        self.tier.describe(OTHER_ROOT, {"model": "another"})
        self.tier.budget_bytes = self.tier.used_bytes + (2 * ROOM + 1) * LAYOUT.block_bytes // 2

    def put(self, block: BlockIdentity, layout: Layout = LAYOUT) -> bool:
        return self.tier.write(block, layout, views_of(payload_of(block, layout))) is None

    def use(self, block: BlockIdentity) -> None:
        self.tier.hit([block.name])

    def holds(self, block: BlockIdentity) -> bool:
        return self.tier.find(block.name) is not None

    def hits(self, block: BlockIdentity) -> int:
        return self.tier.find(block.name).hits

    def read(self, block: BlockIdentity) -> bytes:
        found = np.zeros(LAYOUT.block_bytes, np.uint8)
        self.tier.read(block, LAYOUT, [memoryview(found)])
        return found.tobytes()

    def close(self) -> None:
        self.tier.close()


TIERS: dict[str, Callable[[Path], Hot | Cold]] = {"hot": Hot, "cold": Cold}

CHAIN = random_blocks(5, 0)
SINGLES = [random_blocks(1, seed)[0] for seed in range(1, 10)]


@pytest.fixture(params=TIERS)
def tier(request, tmp_path):
    """A tier with room for four blocks, empty; checked after the test."""
    made = TIERS[request.param](tmp_path / "cache")
    yield made
    assert made.tier.used_bytes <= made.tier.budget_bytes
    made.tier.check_integrity()
    assert made.tier.pins() == 0
    made.close()


def held(tier: Hot | Cold, blocks: list[BlockIdentity]) -> list[int]:
    """Which of `blocks` are held, by place in the list."""
    return [i for i, block in enumerate(blocks) if tier.holds(block)]


def fill(tier: Hot | Cold, *blocks: BlockIdentity) -> None:
    for block in blocks:
        assert tier.put(block)


def test_a_held_block_is_the_one_that_was_put(tier):
    fill(tier, *CHAIN[:2], SINGLES[0])
    for block in (*CHAIN[:2], SINGLES[0]):
        assert tier.read(block) == payload_of(block, LAYOUT)[0].tobytes()


def test_it_holds_as_many_blocks_as_fit_and_never_more(tier):
    for block in SINGLES:
        fill(tier, block)
        assert tier.tier.used_bytes <= tier.tier.budget_bytes
    assert held(tier, SINGLES) == [5, 6, 7, 8]


def test_the_least_recently_used_block_goes(tier):
    fill(tier, *SINGLES[:4])
    tier.use(SINGLES[0])
    tier.use(SINGLES[2])
    fill(tier, SINGLES[4], SINGLES[5])
    assert held(tier, SINGLES) == [0, 2, 4, 5]


def test_a_leaf_goes_before_what_it_continues(tier):
    fill(tier, *CHAIN[:4])
    fill(tier, SINGLES[0])
    assert held(tier, CHAIN) == [0, 1, 2]
    fill(tier, SINGLES[1])
    assert held(tier, CHAIN) == [0, 1]


def test_a_used_leaf_of_an_old_chain_still_goes_before_the_chain_does(tier):
    """Case C27: only the end of the chain was used, and room is needed."""
    fill(tier, *CHAIN[:4])
    tier.use(CHAIN[3])
    fill(tier, SINGLES[0])
    assert held(tier, CHAIN) == [0, 1, 2]


def test_using_a_block_uses_its_ancestors(tier):
    """After the used leaf went, what it continued is still newer than blocks nobody used."""
    fill(tier, *CHAIN[:2], *SINGLES[:2])
    tier.use(CHAIN[1])
    for block in SINGLES[:2]:
        tier.tier.pin(block.name)
    fill(tier, SINGLES[2])
    assert held(tier, CHAIN) == [0]
    for block in SINGLES[:2]:
        tier.tier.unpin(block.name)
    fill(tier, SINGLES[3])
    assert held(tier, CHAIN) == [0]
    assert held(tier, SINGLES) == [1, 2, 3]


def test_adding_a_block_uses_what_it_continues(tier):
    fill(tier, CHAIN[0], SINGLES[0], SINGLES[1], CHAIN[1])
    fill(tier, SINGLES[2], SINGLES[3])
    assert held(tier, CHAIN) == [0, 1]
    fill(tier, SINGLES[4])
    assert held(tier, CHAIN) == [0]
    fill(tier, SINGLES[5])
    assert held(tier, CHAIN) == []


def test_a_pinned_block_stays_and_so_does_what_it_continues(tier):
    fill(tier, *CHAIN[:2])
    tier.tier.pin(CHAIN[1].name)
    for block in SINGLES:
        fill(tier, block)
    assert held(tier, CHAIN) == [0, 1]
    tier.tier.unpin(CHAIN[1].name)
    fill(tier, *SINGLES[:4])
    assert held(tier, CHAIN) == []


def test_two_pins_need_two_unpins(tier):
    fill(tier, SINGLES[0])
    tier.tier.pin(SINGLES[0].name)
    tier.tier.pin(SINGLES[0].name)
    assert tier.tier.pins() == 2
    tier.tier.unpin(SINGLES[0].name)
    fill(tier, *SINGLES[1:6])
    assert tier.holds(SINGLES[0])
    tier.tier.unpin(SINGLES[0].name)
    assert tier.tier.pins() == 0


def test_when_everything_is_pinned_a_new_block_is_refused(tier):
    fill(tier, *SINGLES[:4])
    for block in SINGLES[:4]:
        tier.tier.pin(block.name)
    assert not tier.put(SINGLES[4])
    assert held(tier, SINGLES) == [0, 1, 2, 3]
    for block in SINGLES[:4]:
        tier.tier.unpin(block.name)
    assert tier.put(SINGLES[4])


def test_a_chain_longer_than_the_tier_keeps_its_front(tier):
    """A block never pushes out the one it continues."""
    assert [tier.put(block) for block in CHAIN] == [True, True, True, True, False]
    assert held(tier, CHAIN) == [0, 1, 2, 3]


def test_a_block_whose_parent_is_not_held_is_refused(tier):
    assert not tier.put(CHAIN[1])
    fill(tier, CHAIN[0])
    assert not tier.put(CHAIN[2])
    assert held(tier, CHAIN) == [0]


def test_a_block_larger_than_the_tier_is_refused(tier):
    assert not tier.put(SINGLES[3], HUGE)
    assert not tier.holds(SINGLES[3])


def test_putting_a_held_block_changes_nothing_but_its_use(tier):
    fill(tier, *CHAIN[:2])
    before = tier.tier.used_bytes
    fill(tier, CHAIN[0], CHAIN[1])
    assert tier.tier.used_bytes == before


def test_children_are_what_continues_a_block_or_a_root(tier):
    left, right = blocks_of([1] * 64 + [2] * 64), blocks_of([1] * 64 + [3] * 64)
    other = blocks_of([1] * 64, OTHER_ROOT)[0]
    fill(tier, *left, right[1], other)

    def names(parent: bytes) -> set[bytes]:
        return {child.name for child in tier.tier.children(parent)}

    assert names(ROOT) == {left[0].name}
    assert names(OTHER_ROOT) == {other.name}
    assert names(left[0].name) == {left[1].name, right[1].name}
    assert names(left[1].name) == set()
    assert {child.tokens for child in tier.tier.children(left[0].name)} == {left[1].tokens, right[1].tokens}


def test_a_walk_ends_at_the_first_block_that_is_not_held(tier):
    fill(tier, *CHAIN[:2])
    walked = list(tier.tier.walk([block.name for block in CHAIN]))
    assert [block.name for block in walked] == [block.name for block in CHAIN[:2]]
    assert list(tier.tier.walk([CHAIN[2].name, CHAIN[0].name])) == []
    assert list(tier.tier.walk([])) == []


def test_hits_are_counted_for_each_block(tier):
    fill(tier, *CHAIN[:3])
    tier.tier.hit([block.name for block in CHAIN[:2]])
    tier.tier.hit([CHAIN[0].name])
    tier.tier.hit([])
    assert [tier.hits(block) for block in CHAIN[:3]] == [2, 1, 0]


def test_a_payload_is_never_changed_by_what_happens_to_other_blocks(tier):
    fill(tier, CHAIN[0])
    before = tier.read(CHAIN[0])
    tier.tier.pin(CHAIN[0].name)
    fill(tier, *SINGLES)
    tier.tier.unpin(CHAIN[0].name)
    assert tier.read(CHAIN[0]) == before == payload_of(CHAIN[0], LAYOUT)[0].tobytes()


FAMILY = [
    *random_blocks(4, 20),
    *blocks_of([1] * 64 + [2] * 64),
    blocks_of([1] * 64 + [3] * 64)[1],
    *random_blocks(2, 21, OTHER_ROOT),
]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_held_has_no_holes_after_any_sequence_of_operations(tier, seed):
    source = random.Random(seed)
    pinned: list[bytes] = []
    for _ in range(80):
        block = source.choice(FAMILY)
        match source.randrange(4):
            case 0 | 1:
                tier.put(block)
            case 2 if tier.holds(block):
                tier.use(block)
            case 3 if tier.holds(block) and len(pinned) < 2:
                pinned.append(block.name)
                tier.tier.pin(block.name)
            case 3 if pinned:
                tier.tier.unpin(pinned.pop())
        assert tier.tier.used_bytes <= tier.tier.budget_bytes
        names = {block.name for block in FAMILY if tier.holds(block)}
        assert all(block.index == 0 or block.parent in names for block in FAMILY if block.name in names)
        assert set(pinned) <= names
    while pinned:
        tier.tier.unpin(pinned.pop())


def test_a_file_that_went_behind_the_tiers_back_is_no_wrong_block(tmp_path):
    cold = Cold(tmp_path / "cache")
    fill(cold, *CHAIN[:2])
    cold.tier.path(CHAIN[1]).write_bytes(cold.tier.path(CHAIN[0]).read_bytes())
    with pytest.raises(DamagedBlockError, match="name"):
        cold.read(CHAIN[1])
    cold.tier.path(CHAIN[0]).unlink()
    with pytest.raises(FileNotFoundError):
        cold.read(CHAIN[0])
    cold.close()
