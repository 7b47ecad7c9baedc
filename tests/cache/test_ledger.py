"""The ledger and the hot tier against a model that does everything the slow and obvious way."""

import random

import numpy as np
import pytest
from blocks import OTHER_ROOT, ROOT, blocks_of, random_blocks
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxkv.cache.codec import BlockIdentity
from mlxkv.cache.hot import HotTier
from mlxkv.cache.ledger import Ledger
from mlxkv.cache.names import BLOCK_TOKEN_BYTES

A, B, C = random_blocks(3, 0)
OTHER = random_blocks(1, 1)[0]


def add(ledger: Ledger, block: BlockIdentity, nbytes: int = 1) -> None:
    ledger.add(block.name, block.parent, block.tokens, nbytes, first=block.index == 0)


@pytest.fixture
def ledger():
    """A ledger of the chain A, B, C and one other block, in this order of use; checked after the test."""
    ledger = Ledger()
    for block in (A, B, C, OTHER):
        add(ledger, block)
    yield ledger
    ledger.check_integrity()


def evicted(ledger: Ledger) -> list[bytes]:
    """Every name in the order in which it goes."""
    gone = []
    while (victim := ledger.victim()) is not None:
        ledger.remove(victim.name)
        gone.append(victim.name)
    return gone


def test_a_chain_goes_from_its_end(ledger):
    assert evicted(ledger) == [C.name, B.name, A.name, OTHER.name]
    assert (len(ledger), ledger.used_bytes, list(ledger)) == (0, 0, [])


def test_a_used_block_goes_last_and_its_ancestors_after_it(ledger):
    ledger.touch(C.name)
    assert evicted(ledger) == [OTHER.name, C.name, B.name, A.name]


def test_using_a_block_does_not_use_what_continues_it(ledger):
    ledger.touch(B.name)
    assert evicted(ledger) == [C.name, OTHER.name, B.name, A.name]


def test_a_pin_keeps_a_block_and_its_ancestors_but_not_what_continues_it(ledger):
    ledger.pin(B.name)
    assert evicted(ledger) == [C.name, OTHER.name]
    assert ledger.victim() is None
    ledger.unpin(B.name)
    assert evicted(ledger) == [B.name, A.name]


def test_pins_are_counted(ledger):
    ledger.pin(OTHER.name)
    ledger.pin(OTHER.name)
    ledger.unpin(OTHER.name)
    assert ledger.pins() == 1
    assert OTHER.name not in evicted(ledger)
    ledger.unpin(OTHER.name)
    assert ledger.pins() == 0
    with pytest.raises(ValueError, match="is not pinned"):
        ledger.unpin(OTHER.name)


def test_the_block_to_keep_is_passed_over_once(ledger):
    assert ledger.victim(keep=C.name).name == OTHER.name
    assert ledger.victim().name == C.name


def test_the_only_leaf_is_kept_when_asked(ledger):
    ledger.remove(OTHER.name)
    assert ledger.victim(keep=C.name) is None
    assert ledger.victim().name == C.name


def test_nothing_is_added_without_its_parent_or_twice(ledger):
    ledger.remove(C.name)
    ledger.remove(B.name)
    with pytest.raises(KeyError):
        add(ledger, C)
    with pytest.raises(ValueError, match="already in the ledger"):
        add(ledger, A)


def test_what_is_continued_or_pinned_cannot_be_removed(ledger):
    with pytest.raises(ValueError, match="1 children and 0 pins"):
        ledger.remove(B.name)
    ledger.pin(C.name)
    with pytest.raises(ValueError, match="0 children and 1 pins"):
        ledger.remove(C.name)


def test_children_of_a_block_and_of_a_root_are_known(ledger):
    names = {e.name for e in ledger.children(ROOT)}
    assert names == {A.name, OTHER.name}
    assert [e.name for e in ledger.children(A.name)] == [B.name]
    assert ledger.children(C.name) == ledger.children(OTHER_ROOT) == []


def test_bytes_are_added_up(ledger):
    add(ledger, random_blocks(1, 2)[0], nbytes=1000)
    assert ledger.used_bytes == 1004


def test_20_000_uses_take_no_more_memory_than_a_few(ledger):
    """What orders the leaves is swept as it is used: its length follows the blocks, not the uses."""
    for i in range(20_000):
        ledger.touch((C if i % 2 else OTHER).name)
        ledger.pin(C.name)
        ledger.unpin(C.name)
    assert len(ledger._leaves) < 200
    assert evicted(ledger) == [OTHER.name, C.name, B.name, A.name]


@pytest.mark.parametrize("fault", ["bytes", "child", "parent", "pins", "root"])
def test_check_integrity_finds_what_is_wrong(ledger, fault):
    entry = ledger.get(B.name)
    undo = {"bytes": entry.nbytes, "children": set(entry.children), "parent": entry.parent}
    match fault:
        case "bytes":
            entry.nbytes += 1
        case "child":
            entry.children.add(bytes(32))
        case "parent":
            entry.parent = OTHER.name
        case "pins":
            entry.pins = -1
        case "root":
            ledger._first_blocks[OTHER_ROOT] = set()
    with pytest.raises(AssertionError):
        ledger.check_integrity()
    entry.nbytes, entry.children, entry.parent, entry.pins = undo["bytes"], undo["children"], undo["parent"], 0
    ledger._first_blocks.pop(OTHER_ROOT, None)


# --- the hot tier against a model ------------------------------------------------------------------------------------

UNIT = 10
BUDGET = 6 * UNIT
CHAINS = [blocks_of([0] * 64 * 3 + [0] * 5), blocks_of([0] * 64 + [1] * 64 * 2 + [1] * 7), blocks_of([2] * 64 * 2)]
CHAINS.append(blocks_of([0] * 64 * 2 + [3] * 5))
CHAINS.append(blocks_of([0] * 70, OTHER_ROOT))
BLOCKS = list({block.name: block for chain in CHAINS for block in chain}.values())
block = st.sampled_from(BLOCKS)


class Eager:
    """The hot tier as one would first write it: every use walks up the chain, every victim is searched for."""

    def __init__(self) -> None:
        self.held: dict[bytes, BlockIdentity] = {}
        self.size: dict[bytes, int] = {}
        self.used: dict[bytes, int] = {}
        self.pins: dict[bytes, int] = {}
        self.clock = 0

    @property
    def used_bytes(self) -> int:
        return sum(self.size[name] for name in self.held)

    def chain(self, name: bytes) -> list[bytes]:
        """The held block `name` and its ancestors, first block first; empty when it is not held."""
        return [*self.chain(self.held[name].parent), name] if name in self.held else []

    def use(self, name: bytes) -> None:
        self.clock += 1
        self.used |= dict.fromkeys(self.chain(name), self.clock)

    def leaves(self) -> list[bytes]:
        parents = {block.parent for block in self.held.values()}
        return [name for name in self.held if name not in parents and not self.pins.get(name)]

    def victim(self, keep: bytes | None) -> bytes | None:
        return min((n for n in self.leaves() if n != keep), key=self.used.__getitem__, default=None)

    def drop(self, name: bytes) -> None:
        del self.held[name]

    def put(self, block: BlockIdentity, nbytes: int) -> tuple[bool, list[bytes]]:
        if block.name in self.held:
            self.use(block.name)
            return True, []
        if (block.index and block.parent not in self.held) or nbytes > BUDGET:
            return False, []
        gone: list[bytes] = []
        while self.used_bytes + nbytes > BUDGET:
            name = self.victim(block.parent)
            if name is None:
                return False, gone
            self.drop(name)
            gone.append(name)
        self.held[block.name] = block
        self.size[block.name] = nbytes
        self.use(block.name)
        return True, gone


class HotTierAgainstModel(RuleBasedStateMachine):
    """Whatever is done to the tier, it holds, drops and refuses what the model does."""

    @initialize()
    def start(self) -> None:
        self.tier, self.model = HotTier(BUDGET), Eager()

    @rule(block=block, units=st.sampled_from([1, 1, 1, 2, 3, 7]))
    def put(self, block: BlockIdentity, units: int) -> None:
        payload = (np.zeros(units * UNIT - 3, np.uint8), np.zeros(3, np.uint8))
        held, gone = self.tier.put(block.name, block.parent, block.tokens, payload, first=block.index == 0)
        assert (held, [entry.name for entry in gone]) == self.model.put(block, units * UNIT)
        if held:
            assert block.name in self.tier

    @rule(chain=st.sampled_from(CHAINS))
    def put_a_chain(self, chain: list[BlockIdentity]) -> None:
        for block in chain:
            self.put(block, 1)

    @rule(block=block)
    def hit(self, block: BlockIdentity) -> None:
        names = self.model.chain(block.name)
        before = [self.tier.get(name).hits for name in names]
        self.tier.hit(names)
        self.model.use(block.name)
        assert [self.tier.get(name).hits for name in names] == [count + 1 for count in before]

    @rule(block=block)
    def pin(self, block: BlockIdentity) -> None:
        if block.name in self.model.held:
            self.tier.pin(block.name)
            self.model.pins[block.name] = self.model.pins.get(block.name, 0) + 1

    @precondition(lambda self: any(self.model.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, count in self.model.pins.items() if count)))
        self.tier.unpin(name)
        self.model.pins[name] -= 1

    @rule()
    def evict(self) -> None:
        entry = self.tier.evict()
        expected = self.model.victim(None)
        assert (entry.name if entry else None) == expected
        if expected is not None:
            self.model.drop(expected)

    @rule(block=block)
    def remove(self, block: BlockIdentity) -> None:
        if block.name in self.model.leaves():
            self.tier.remove(block.name)
            self.model.drop(block.name)
        elif block.name in self.model.held:
            with pytest.raises(ValueError, match="children"):
                self.tier.remove(block.name)

    @invariant()
    def it_is_what_the_model_is(self) -> None:
        self.tier.check_integrity()
        held = self.model.held
        assert {entry.name for entry in self.tier.entries()} == held.keys()
        assert self.tier.used_bytes == self.model.used_bytes <= BUDGET
        assert self.tier.pins() == sum(self.model.pins.values())
        for parent in [*held, ROOT, OTHER_ROOT]:
            expected = {name for name, block in held.items() if block.parent == parent}
            assert {entry.name for entry in self.tier.children(parent)} == expected

    @invariant()
    def every_chain_is_found_up_to_its_first_missing_block(self) -> None:
        for chain in CHAINS:
            found = [entry.name for entry in self.tier.walk([block.name for block in chain])]
            present = [block.name in self.model.held for block in chain]
            count = present.index(False) if False in present else len(chain)
            assert found == [block.name for block in chain[:count]]
            assert not any(present[count:])


TestHotTierAgainstModel = HotTierAgainstModel.TestCase
TestHotTierAgainstModel.settings = settings(max_examples=60, stateful_step_count=50)


def test_ten_thousand_random_operations_keep_the_model_and_the_tier_alike():
    """The same comparison over one long life: what is stale in the order of leaves must not come back."""
    source = random.Random(7)
    tier, model = HotTier(BUDGET), Eager()
    pinned: list[bytes] = []
    for _ in range(10_000):
        block = source.choice(BLOCKS)
        match source.randrange(6):
            case 0 | 1 | 2:
                payload = (np.zeros(UNIT, np.uint8),)
                held, gone = tier.put(block.name, block.parent, block.tokens, payload, first=block.index == 0)
                assert (held, [entry.name for entry in gone]) == model.put(block, UNIT)
            case 3 if block.name in model.held:
                tier.hit(model.chain(block.name))
                model.use(block.name)
            case 4 if block.name in model.held and len(pinned) < 3:
                tier.pin(block.name)
                model.pins[block.name] = model.pins.get(block.name, 0) + 1
                pinned.append(block.name)
            case 5 if pinned:
                name = pinned.pop(source.randrange(len(pinned)))
                tier.unpin(name)
                model.pins[name] -= 1
    tier.check_integrity()
    assert {entry.name for entry in tier.entries()} == model.held.keys()


def test_a_payload_is_given_back_as_it_was_put():
    tier = HotTier(BUDGET)
    payload = (np.arange(UNIT, dtype=np.uint8),)
    tier.put(A.name, A.parent, A.tokens, payload, first=True)
    assert tier.payload(A.name) is payload
    assert tier.get(A.name).tokens == A.tokens
    assert len(A.tokens) == BLOCK_TOKEN_BYTES
