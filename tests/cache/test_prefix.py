"""Matching: what may be reused is the longest common prefix with anything held, to the token, and never one more."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from blocks import OTHER_ROOT, ROOT, SMALL, blocks_of, payload_of, views_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.cache import names as names_module
from mlxkv.cache.block_log import BlockLog
from mlxkv.cache.codec import BlockIdentity
from mlxkv.cache.cold import ColdTier
from mlxkv.cache.hot import HotTier
from mlxkv.cache.names import BLOCK_TOKENS, block_name, pack, unpack
from mlxkv.cache.prefix import Match, match


@dataclass(frozen=True)
class Stub:
    name: bytes
    tokens: bytes


class Fake:
    """A tier that holds what it is told, right or wrong, and counts what it is asked."""

    def __init__(self, *blocks: BlockIdentity) -> None:
        self.held: dict[bytes, Stub] = {}
        self.below: dict[bytes, list[Stub]] = {}
        self.asked: list[bytes] = []
        for block in blocks:
            self.plant(block.name, block.parent, block.tokens)

    def plant(self, name: bytes, parent: bytes, tokens: bytes) -> None:
        """Hold `tokens` under any name one likes."""
        if name not in self.held:
            self.held[name] = Stub(name, tokens)
            self.below.setdefault(parent, []).append(self.held[name])

    def walk(self, names: Sequence[bytes]) -> Iterator[Stub]:
        for name in names:
            self.asked.append(name)
            if name not in self.held:
                return
            yield self.held[name]

    def children(self, parent: bytes) -> list[Stub]:
        return self.below.get(parent, [])


def hot_tier(blocks: Sequence[BlockIdentity]) -> HotTier:
    """A real hot tier that holds these, one byte each."""
    tier = HotTier(len(blocks) + 1)
    for block in blocks:
        held, _ = tier.put(block.name, block.parent, block.tokens, (np.zeros(1, np.uint8),), first=block.index == 0)
        assert held
    return tier


def found(ids: Sequence[int], hot: object, cold: object, root: bytes = ROOT) -> Match:
    return match(root, pack(ids), hot, cold)


def shape(match: Match) -> list[tuple[str, int]]:
    """Tier and tokens of each part."""
    return [(part.tier, part.tokens) for part in match.parts]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


# --- a world of shared prefixes --------------------------------------------------------------------------------------


@dataclass
class World:
    """Sequences that share prefixes, and a prompt that shares one with them; tokens are 0 and 1 only."""

    stored: list[list[int]]
    prompt: list[int]


@st.composite
def worlds(draw: st.DrawFn, longest: int = 400) -> World:
    """Up to six stored sequences and a prompt, each grown from a prefix of any length of an earlier one."""
    source = random.Random(draw(st.binary(min_size=8, max_size=8)))
    most = draw(st.sampled_from([5, 70, 140, longest, longest, longest]))
    boundaries = [n for n in (0, 1, 63, 64, 65, 127, 128, 129, 192, 256, most) if n <= most]

    def up_to_most() -> int:
        return source.choice(boundaries) if source.random() < 0.3 else source.randint(0, most)

    grown: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 6)) + 1):
        shared = source.choice(grown[1:] or grown)[: up_to_most()]
        grown.append(shared + [source.randrange(2) for _ in range(min(up_to_most(), most + 64 - len(shared)))])
    return World(grown[1:-1], grown[-1])


def nodes_of(stored: Sequence[Sequence[int]]) -> list[BlockIdentity]:
    """Every block and tail of these sequences, each once, parents first."""
    return list({block.name: block for ids in stored for block in blocks_of(ids)}.values())


def prefix_closed(draw: st.DrawFn, nodes: Sequence[BlockIdentity], *, tails: bool) -> list[BlockIdentity]:
    """Some of the nodes, none without its parent: what is left after any evictions."""
    kept: dict[bytes, BlockIdentity] = {}
    share = draw(st.sampled_from([0.0, 0.7, 0.9, 0.9, 1.0, 1.0]))
    source = random.Random(draw(st.binary(min_size=8, max_size=8)))
    for node in nodes:
        is_tail = len(node.tokens) < 4 * BLOCK_TOKENS
        if (tails or not is_tail) and (node.index == 0 or node.parent in kept) and source.random() < share:
            kept[node.name] = node
    return list(kept.values())


def held_sequences(nodes: Sequence[BlockIdentity]) -> list[list[int]]:
    """The tokens from the start to the end of each node: all prefixes somebody could ask for."""
    full: dict[bytes, list[int]] = {ROOT: []}
    for node in nodes:
        full[node.name] = full[node.parent] + unpack(node.tokens)
    return list(full.values())


def check_match(prompt: list[int], got: Match, hot: Sequence[BlockIdentity], cold: Sequence[BlockIdentity]) -> None:
    """`got` is the longest match there is, made of parts that are held, each from the tier that should give it."""
    longest = max(common(prompt, ids) for ids in held_sequences([*hot, *cold]))
    assert got.tokens == min(longest, max(len(prompt) - 1, 0))
    assert got.limit == max(len(prompt) - 1, 0)
    assert sum(part.tokens for part in got.parts) == got.tokens == got.tokens_of("hot") + got.tokens_of("cold")
    hot_names, cold_names = {node.name for node in hot}, {node.name for node in cold}
    parent = ROOT
    for index, part in enumerate(got.parts):
        start = index * BLOCK_TOKENS
        assert (part.index, part.parent) == (index, parent)
        assert part.name == block_name(parent, part.packed)
        assert 0 < part.tokens <= len(part.packed) // 4
        assert unpack(part.packed)[: part.tokens] == prompt[start : start + part.tokens]
        assert part.name in (hot_names if part.tier == "hot" else cold_names)
        if index < len(got.parts) - 1:
            assert part.tokens == BLOCK_TOKENS
            assert part.tier == ("hot" if part.name in hot_names else "cold")
        parent = part.name
    if got.parts and got.parts[-1].tier == "cold":  # the hot tier has nothing as good
        assert max(common(prompt, ids) for ids in held_sequences(hot)) < got.tokens
    assert got.tail_tokens == sum(part.tokens for part in got.parts if len(part.packed) < 4 * BLOCK_TOKENS)
    assert got.diverged == (
        got.tokens < got.limit
        and any(
            len(ids) > got.tokens and common(prompt, ids) == got.tokens and ids[got.tokens] != prompt[got.tokens]
            for ids in held_sequences([*hot, *cold])
        )
    )
    names = [block.name for block in blocks_of(prompt) if len(block.tokens) == 4 * BLOCK_TOKENS]
    at = got.tokens // BLOCK_TOKENS
    assert got.next_name == (names[at] if at < len(names) else None)


@settings(max_examples=1000)
@given(worlds(), st.data())
def test_reuse_is_the_longest_common_prefix_to_the_token(world, data):
    """Both tiers lost what they liked, leaves first; the hot one is real."""
    nodes = nodes_of(world.stored)
    hot = prefix_closed(data.draw, nodes, tails=True)
    cold = prefix_closed(data.draw, nodes, tails=False)
    check_match(world.prompt, found(world.prompt, hot_tier(hot), Fake(*cold)), hot, cold)


@settings(max_examples=100)
@given(worlds())
def test_everything_held_twice_is_taken_from_memory(world):
    nodes = nodes_of(world.stored)
    full = [node for node in nodes if len(node.tokens) == 4 * BLOCK_TOKENS]
    got = found(world.prompt, hot_tier(nodes), Fake(*full))
    check_match(world.prompt, got, nodes, full)
    assert got.tokens_of("cold") == 0


@settings(max_examples=60)
@given(worlds(longest=200), st.data())
def test_the_real_tiers_give_the_same_match(world, data):
    nodes = nodes_of(world.stored)
    hot = prefix_closed(data.draw, nodes, tails=True)
    cold = prefix_closed(data.draw, nodes, tails=False)
    with TemporaryDirectory() as folder:
        tier = ColdTier(Path(folder) / "cache", 2**30, floor_bytes=0, daily_write_bytes=None, log=BlockLog())
        tier.open()
        for block in cold:
            assert tier.write(block, SMALL, views_of(payload_of(block, SMALL))) is None
        check_match(world.prompt, found(world.prompt, hot_tier(hot), tier), hot, cold)
        tier.close()


@pytest.mark.parametrize("shared", range(0, 401, 7))
def test_a_prompt_that_leaves_a_stored_one_at_any_token_reuses_up_to_there(shared):
    stored = [5] * 400
    prompt = [5] * shared + [6] * (450 - shared)
    hot, full = hot_tier(blocks_of(stored)), blocks_of(stored)[:6]
    assert found(prompt, hot, Fake()).tokens == shared
    assert found(prompt, HotTier(0), Fake(*full)).tokens == min(shared, 384)


# --- boundaries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 127, 128, 129, 192, 193])
def test_a_resend_reuses_all_but_one_token_of_what_is_held(count):
    ids = list(range(count))
    nodes = blocks_of(ids)
    full = [node for node in nodes if len(node.tokens) == 4 * BLOCK_TOKENS]
    with_tail = found(ids, hot_tier(nodes), Fake(*full))
    assert with_tail.tokens == max(count - 1, 0)
    from_disk = found(ids, HotTier(0), Fake(*full))
    assert from_disk.tokens == min(64 * (count // 64), max(count - 1, 0))
    assert sum(part.tokens == BLOCK_TOKENS for part in from_disk.parts) == max(count - 1, 0) // 64


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 129, 192])
def test_64_more_tokens_continue_whatever_was_held(count):
    nodes = blocks_of(range(count))
    got = found(range(count + 64), hot_tier(nodes), Fake())
    assert got.tokens == count
    assert not got.diverged
    if count < 64:
        assert got.next_name == blocks_of(range(64))[0].name


def test_a_last_block_that_is_exactly_full_counts_64_tokens():
    got = found(range(193), hot_tier(blocks_of(range(192))), Fake())
    assert shape(got) == [("hot", 64)] * 3


def test_the_second_of_two_chats_overwrites_nothing_of_the_first():
    """Case C28: 128 tokens in common, 640 of their own each."""
    system = list(range(128))
    chats = [system + [1000 + i for i in range(640)], system + [2000 + i for i in range(640)]]
    hot = hot_tier(nodes_of(chats))
    assert [found(chat, hot, Fake()).tokens for chat in chats] == [767, 767]


def test_one_missing_block_costs_what_comes_after_it_and_nothing_before():
    """Case C24."""
    ids = list(range(330))
    nodes = blocks_of(ids)[:5]
    assert shape(found(ids, Fake(), Fake(*nodes[:3], nodes[4]))) == [("cold", 64)] * 3
    assert shape(found(ids, Fake(), Fake(*nodes[1:]))) == []


def test_nothing_is_reused_across_roots():
    nodes = blocks_of(range(200), OTHER_ROOT)
    got = found(range(200), hot_tier(nodes), Fake(*nodes[:3]))
    assert (got.tokens, got.parts, got.diverged) == (0, (), False)


def test_an_empty_prompt_matches_nothing():
    got = found([], hot_tier(blocks_of(range(200))), Fake())
    assert (got.tokens, got.limit, got.parts, got.next_name) == (0, 0, (), None)


# --- which tier ------------------------------------------------------------------------------------------------------


def test_the_front_comes_from_memory_and_the_rest_from_the_disk():
    nodes = blocks_of(range(300))
    assert shape(found(range(300), hot_tier(nodes[:2]), Fake(*nodes[:4]))) == [("hot", 64)] * 2 + [("cold", 64)] * 2


@pytest.mark.parametrize("in_memory", range(6))
@pytest.mark.parametrize("on_disk", range(6))
def test_wherever_the_chain_is_cut_between_the_tiers_every_token_of_it_is_reused(in_memory, on_disk):
    nodes = blocks_of(range(320))
    for shared in (0, 1, 64, 100, 128, 191, 192, 300, 320):
        prompt = [*range(shared), *range(1000, 1400 - shared)]
        got = found(prompt, hot_tier(nodes[:in_memory]), Fake(*nodes[:on_disk]))
        check_match(prompt, got, nodes[:in_memory], nodes[:on_disk])
        assert got.tokens_of("hot") == min(shared, 64 * in_memory)
        assert got.tokens_of("cold") == max(min(shared, 64 * on_disk) - got.tokens_of("hot"), 0)


def test_the_inside_of_a_block_may_come_from_either_tier_and_the_longer_wins():
    base, prompt = [1] * 64, [1] * 64 + [2] * 64
    shorter, longer = blocks_of(base + [2] * 10 + [3] * 54), blocks_of(base + [2] * 20 + [3] * 54)[:2]
    assert shape(found(prompt, hot_tier(shorter), Fake(*longer))) == [("hot", 64), ("cold", 20)]
    assert shape(found(prompt, hot_tier(longer), Fake(*shorter))) == [("hot", 64), ("hot", 20)]


def test_memory_wins_a_tie_inside_a_block():
    base, prompt = [1] * 64, [1] * 64 + [2] * 64
    one, other = blocks_of(base + [2] * 10 + [3] * 54), blocks_of(base + [2] * 10 + [4] * 54)
    assert shape(found(prompt, hot_tier(one), Fake(*other))) == [("hot", 64), ("hot", 10)]


def test_a_tail_is_counted_as_one():
    ids = list(range(100))
    got = found([*ids, 1, 2], hot_tier(blocks_of(ids)), Fake())
    assert (shape(got), got.tail_tokens) == ([("hot", 64), ("hot", 36)], 36)
    inside = found([*ids[:90], 1, 2], hot_tier(blocks_of(ids)), Fake())
    assert (shape(inside), inside.tail_tokens) == ([("hot", 64), ("hot", 26)], 26)


# --- a name is never trusted alone -----------------------------------------------------------------------------------

PROMPT = [7] * 200
RIGHT = blocks_of(PROMPT)[:3]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("tier", ["hot", "cold"])
def test_other_tokens_under_the_right_name_are_not_the_block(tier, place):
    wrong = Fake()
    for block in RIGHT:
        tokens = pack([7] * 40 + [8] * 24) if block.index == place else block.tokens
        wrong.plant(block.name, block.parent, tokens)
    got = found(PROMPT, *((wrong, Fake()) if tier == "hot" else (Fake(), wrong)))
    assert got.tokens == 64 * place + 40
    assert got.parts[-1].tokens == 40


def test_a_wrong_block_in_memory_does_not_hide_the_right_one_on_the_disk():
    wrong = Fake(RIGHT[0])
    wrong.plant(RIGHT[1].name, RIGHT[0].name, pack([8] * 64))
    assert shape(found(PROMPT, wrong, Fake(*RIGHT))) == [("hot", 64), ("cold", 64), ("cold", 64)]


def test_a_tail_under_the_name_of_a_full_block_is_not_the_block():
    wrong = Fake()
    wrong.plant(RIGHT[0].name, ROOT, pack([7] * 10))
    assert shape(found(PROMPT, wrong, Fake())) == [("hot", 10)]


# --- divergence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "prompt", "diverged"),
    [
        ([1] * 100, [1] * 90 + [2] * 30, True),
        ([1] * 100, [1] * 100 + [2] * 30, False),
        ([1] * 128, [1] * 128 + [2] * 80, False),
        ([1] * 128, [1] * 64 + [2] * 80, True),
        ([1] * 128, [2] * 80, True),
        ([1] * 128, [1] * 100, False),
        ([], [1] * 100, False),
    ],
    ids=["inside a tail", "after a tail", "after the last block", "after a block", "at once", "not", "nothing held"],
)
def test_a_match_diverged_only_when_something_else_is_held_where_it_ends(stored, prompt, diverged):
    assert found(prompt, hot_tier(blocks_of(stored)), Fake()).diverged == diverged


# --- cost ------------------------------------------------------------------------------------------------------------


def test_looking_up_stops_at_the_first_unknown_block(monkeypatch):
    """Case C29, in operations: a prompt of 150,000 tokens of which two blocks are held."""
    hashed: list[int] = []
    sha256 = names_module.sha256

    def counting(data: bytes):
        hashed.append(len(data))
        return sha256(data)

    ids = range(150_000)
    hot, cold = Fake(blocks_of(ids[:128])[0]), Fake(*blocks_of(ids[:128]))
    monkeypatch.setattr(names_module, "sha256", counting)
    assert found(ids, hot, cold).tokens == 128
    assert len(hashed) == 150_000 // 64
    assert (len(hot.asked), len(cold.asked)) == (2, 2)


def test_the_front_of_a_match_is_a_match_of_its_first_parts():
    got = found(PROMPT, hot_tier(RIGHT), Fake())
    first = got.first(2)
    assert (first.tokens, first.parts, first.limit) == (128, got.parts[:2], got.limit)
    assert got.first(0).tokens == 0
