"""Restored equals fresh: the state, bit for bit, and the next logits, whichever tier the tokens came from."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache as remember
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from driving import (
    CHUNK_TOKENS,
    Fresh,
    assert_equals_fresh,
    assert_same_state,
    block_files,
    compute,
    run_fresh,
    run_warm,
    some_tokens,
    state_of,
    stops,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import CONFIGS
from kinds import build as build_any
from tiny import ALL_TINY, Config, build_tiny, tiny_deepseek_v3, tiny_llama

from mlxkv.cache.codec import inspect
from mlxkv.core.errors import ModelError, UsageError
from mlxkv.engine.generate import generate
from mlxkv.prompt_cache.adapter import Adapter
from mlxkv.prompt_cache.block_cache import BlockCache

ARCHITECTURES = ("llama", "qwen3", "deepseek_v3")
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 192, 193)
SHARED = ((193, 0), (193, 1), (193, 63), (193, 64), (193, 65), (193, 100), (129, 128), (128, 127), (65, 64), (2, 1))
TESTS = Path(__file__).parents[1]

every_length = pytest.mark.parametrize("tokens", LENGTHS)


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@remember
def model(architecture: str) -> nn.Module:
    return build_tiny(ALL_TINY[architecture]())


@remember
def fresh(architecture: str, tokens: int) -> Fresh:
    """The prompt of so many tokens, computed without a block cache, once a session."""
    return run_fresh(model(architecture), some_tokens(tokens, seed=tokens))


def open_cache(
    module: nn.Module, cache_dir: Path, *, hot: str = "64MiB", cold: str = "1GiB", **more: Any
) -> BlockCache:
    return BlockCache.open(module, cache_dir=cache_dir, hot=hot, cold=cold, **more)


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[BlockCache]:
    """A cache for the tiny llama with both tiers; checked after the test."""
    with open_cache(model("llama"), tmp_path / "blocks") as cache:
        yield cache
        cache.check_integrity()
        assert cache.store.pins() == 0


def from_cold(tokens: int) -> int:
    """Tokens that a resend takes from full blocks: all but one when the last block is full."""
    return min(64 * (tokens // 64), tokens - 1)


def evict_hot(cache: BlockCache, keep: int) -> None:
    """Evict the deepest blocks of the hot tier until `keep` are left."""
    while len(cache.store.hot) > keep:
        assert cache.store.hot.evict() is not None


# one restore, every length


@every_length
def test_a_resend_reuses_all_but_one_token_hot_and_equals_fresh(architecture: str, tokens: int, tmp_path: Path) -> None:
    expected = fresh(architecture, tokens)
    with open_cache(model(architecture), tmp_path / "blocks", cold="0") as cache:
        first = run_warm(cache, model(architecture), expected.prompt)
        assert first.held == 0
        assert_equals_fresh(first, expected)
        again = run_warm(cache, model(architecture), expected.prompt)
        assert again.held == tokens - 1
        assert (again.event.hot_tokens, again.event.cold_tokens, again.event.computed_tokens) == (tokens - 1, 0, 1)
        assert_equals_fresh(again, expected)
        cache.check_integrity()


@every_length
def test_a_resend_reuses_every_full_block_from_cold_and_equals_fresh(
    architecture: str, tokens: int, tmp_path: Path
) -> None:
    expected = fresh(architecture, tokens)
    with open_cache(model(architecture), tmp_path / "blocks") as cache:
        cache.commit(expected.prompt, expected.prompt_cache)
    assert len(block_files(tmp_path / "blocks")) == tokens // 64
    with open_cache(model(architecture), tmp_path / "blocks") as cache:
        again = run_warm(cache, model(architecture), expected.prompt)
        assert again.held == from_cold(tokens) >= 64 * ((tokens - 1) // 64)
        assert (again.event.hot_tokens, again.event.cold_tokens) == (0, from_cold(tokens))
        assert_equals_fresh(again, expected)
        cache.check_integrity()


@every_length
@pytest.mark.parametrize("cold", ["0", "1GiB"])
def test_a_chain_evicted_in_the_middle_restores_what_is_left_and_equals_fresh(
    architecture: str, tokens: int, cold: str, tmp_path: Path
) -> None:
    expected = fresh(architecture, tokens)
    left = tokens // 64 // 2
    with open_cache(model(architecture), tmp_path / "blocks", cold=cold) as cache:
        cache.commit(expected.prompt, expected.prompt_cache)
        assert cache.store.flush()
        evict_hot(cache, keep=left)
        again = run_warm(cache, model(architecture), expected.prompt)
        assert again.held == (64 * left if cold == "0" else from_cold(tokens))
        assert again.event.hot_tokens == 64 * left
        assert_equals_fresh(again, expected)
        assert run_warm(cache, model(architecture), expected.prompt).held == tokens - 1
        cache.check_integrity()


@pytest.mark.parametrize(("tokens", "shared"), SHARED)
@pytest.mark.parametrize("tier", ["hot", "cold"])
def test_a_partly_shared_prefix_is_restored_to_the_token_and_equals_fresh(
    architecture: str, tokens: int, shared: int, tier: str, tmp_path: Path
) -> None:
    stored = fresh(architecture, tokens)
    prompt = stored.prompt[:shared] + [(token + 1) % 128 for token in stored.prompt[shared:]] + [5] * 70
    held = shared if tier == "hot" else min(shared, 64 * (tokens // 64))
    expected = run_branch(model(architecture), stored.prompt, held, prompt)
    with open_cache(model(architecture), tmp_path / "blocks") as cache:
        cache.commit(stored.prompt, stored.prompt_cache)
        if tier == "cold":
            assert cache.store.flush()
            evict_hot(cache, keep=0)
        warm = run_warm(cache, model(architecture), prompt)
        assert warm.held == held
        assert_equals_fresh(warm, expected)
        assert_equals_fresh(run_warm(cache, model(architecture), stored.prompt), stored)
        cache.check_integrity()


def run_branch(module: nn.Module, stored: list[int], held: int, prompt: list[int]) -> Fresh:
    """Without a block cache: compute `stored`, go back to token `held` as mlx-lm does, and on with `prompt`."""
    run = run_fresh(module, stored)
    for leaf in run.prompt_cache:
        leaf.trim(len(stored) - held)
    logits = compute(module, run.prompt_cache, prompt, held, stops(held, len(prompt)))
    return Fresh(prompt, run.prompt_cache, state_of(run.prompt_cache), logits)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every architecture and length committed here and asked for again in a process of its own; where it wrote."""
    directory, out = tmp_path_factory.mktemp("restart") / "blocks", tmp_path_factory.mktemp("out")
    for architecture in ARCHITECTURES:
        with open_cache(model(architecture), directory) as cache:
            for tokens in LENGTHS:
                run = fresh(architecture, tokens)
                cache.commit(run.prompt, run.prompt_cache)
    asked = [f"{architecture}:{tokens}" for architecture in ARCHITECTURES for tokens in LENGTHS]
    subprocess.run(
        [sys.executable, TESTS / "prompt_cache" / "restart.py", "float32", directory, out, *asked],
        env={
            **os.environ,
            "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}",
            "MLXKV_BLAS": "none",
            "PYTHONHASHSEED": "7",
        },
        check=True,
        timeout=120,
    )
    return out


@every_length
def test_a_new_process_restores_every_full_block_and_equals_fresh(
    architecture: str, tokens: int, restarted: Path
) -> None:
    expected = fresh(architecture, tokens)
    found = np.load(restarted / f"{architecture}-{tokens}.npz")
    held = int(found["held"])
    assert held == from_cold(tokens)
    restored = {path.removeprefix("restored/"): found[path] for path in found if path.startswith("restored/")}
    assert_same_state(restored, expected.first(held) if held else {})
    state = {path.removeprefix("state/"): found[path] for path in found if path.startswith("state/")}
    assert_same_state(state, expected.state)
    assert np.abs(found["logits"] - expected.logits).max() == 0.0


@given(data=st.data())
@settings(max_examples=15)
def test_any_pile_of_stored_prompts_gives_its_longest_common_prefix(data: st.DataObject) -> None:
    source = some_tokens(400, seed=9)
    stored: list[list[int]] = []
    with open_cache(model("llama"), Path("unused"), cold="0") as cache:
        for _ in range(data.draw(st.integers(1, 3))):
            shared, own = data.draw(st.integers(0, 260)), data.draw(st.integers(1, 70))
            stored.append(source[:shared] + [(source[shared] + 1 + len(stored)) % 128] * own)
            run_warm(cache, model("llama"), stored[-1])
        prompt = source[: data.draw(st.integers(1, 280))] + data.draw(st.sampled_from([[], stored[0][-1:] * 3]))
        warm = run_warm(cache, model("llama"), prompt)
        assert warm.held == min(max(common(prompt, other) for other in stored), len(prompt) - 1)
        assert_equals_fresh(warm, run_fresh(model("llama"), prompt))
        cache.check_integrity()


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# prompts that cannot be, and the ladder around a block


def test_an_empty_prompt_is_a_usage_error_that_says_so(llama: BlockCache) -> None:
    for ask in (llama.start, llama.restore):
        with pytest.raises(UsageError, match="no tokens"):
            ask([])
    with pytest.raises(UsageError, match="no tokens"):
        generate(model("llama"), llama, [], max_tokens=1, sampler=greedy)
    assert llama.commit([], llama.restore([1]).prompt_cache) == 0


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["1"]])
def test_what_is_no_token_id_is_a_usage_error(llama: BlockCache, bad: list[Any]) -> None:
    with pytest.raises(UsageError, match="token ids are whole numbers"):
        llama.start(bad)


@every_length
def test_two_identical_requests_give_equal_replies(architecture: str, tokens: int, tmp_path: Path) -> None:
    prompt = some_tokens(tokens, seed=tokens)
    with open_cache(model(architecture), tmp_path / "blocks") as cache:
        replies = []
        for reused in (0, tokens - 1):
            cache.prefill_rate.value = None  # a tiny model can compute faster than a busy machine restores
            run = generate(model(architecture), cache, prompt, max_tokens=5, sampler=greedy, chunk_tokens=CHUNK_TOKENS)
            replies.append(list(run))
            assert run.event is not None
            assert (run.event.hot_tokens, run.event.computed_tokens) == (reused, tokens - reused)
        assert replies[0] == replies[1]
        assert len(replies[0]) == 5
        cache.check_integrity()


@every_length
def test_a_prompt_extended_by_a_block_reuses_all_of_it_and_stores_one_more(
    architecture: str, tokens: int, tmp_path: Path
) -> None:
    stored = fresh(architecture, tokens)
    longer = stored.prompt + some_tokens(64, seed=1)
    ends = sorted({*stops(0, tokens), *stops(tokens, tokens + 64)})
    with open_cache(model(architecture), tmp_path / "blocks") as cache:
        cache.commit(stored.prompt, stored.prompt_cache)
        warm = run_warm(cache, model(architecture), longer)
        assert warm.held == tokens
        assert_equals_fresh(warm, run_fresh(model(architecture), longer, ends))
    assert len(block_files(tmp_path / "blocks")) == (tokens + 64) // 64
    with open_cache(model(architecture), tmp_path / "blocks") as cache:
        assert cache.start([*longer, 1]).held == 64 * ((tokens + 64) // 64)


def test_a_prompt_under_a_block_says_so_and_a_tail_serves_it_to_the_token(llama: BlockCache) -> None:
    system = some_tokens(40, seed=40)
    first = run_warm(llama, model("llama"), [*system, 1, 2])
    assert (first.held, first.event.reason) == (0, "shorter than a block")
    second = run_warm(llama, model("llama"), [*system, 7, 8])
    assert (second.held, second.event.tail_tokens) == (40, 40)
    assert_equals_fresh(second, run_fresh(model("llama"), [*system, 7, 8]))


def test_a_tail_is_shared_to_the_token_and_replaced_by_a_longer_one(llama: BlockCache) -> None:
    prompt = some_tokens(100, seed=100)
    run_warm(llama, model("llama"), prompt)
    sharing = prompt[:90] + [(token + 1) % 128 for token in prompt[90:]]
    warm = run_warm(llama, model("llama"), sharing)
    assert (warm.held, warm.event.tail_tokens) == (90, 26)
    assert_equals_fresh(warm, run_fresh(model("llama"), sharing))
    longer = prompt + some_tokens(10, seed=1)
    warm = run_warm(llama, model("llama"), longer)
    assert (warm.held, warm.event.tail_tokens) == (100, 36)
    assert_equals_fresh(warm, run_fresh(model("llama"), longer))
    tails = tails_of(llama)
    assert run_warm(llama, model("llama"), prompt).held == 99, "all but one, out of the longer tail"
    assert tails == tails_of(llama) == [36, 46], "the one of 46 took the place of what it continued"


def tails_of(cache: BlockCache) -> list[int]:
    """The tokens of every tail in the hot tier."""
    return sorted(len(entry.tokens) // 4 for entry in cache.store.hot.entries() if len(entry.tokens) < 256)


def test_a_block_is_published_as_soon_as_it_is_full(llama: BlockCache) -> None:
    prompt = some_tokens(193, seed=193)
    sequence = llama.start(prompt)
    for at, end in ((0, 63), (63, 64), (64, 128), (128, 192)):
        compute(model("llama"), sequence.prompt_cache, prompt, at, [end])
        sequence.commit()
        assert len(llama.store.hot) == end // 64
    sequence.finish()


# chains with something missing, and sequences side by side


def test_a_missing_late_block_costs_only_what_follows_and_is_written_again(tmp_path: Path) -> None:
    expected = fresh("llama", 330)
    directory = tmp_path / "blocks"
    with open_cache(model("llama"), directory) as cache:
        cache.commit(expected.prompt, expected.prompt_cache)
    names = chain_files(directory)
    names[3].unlink()
    with open_cache(model("llama"), directory) as cache:
        warm = run_warm(cache, model("llama"), expected.prompt)
        assert (warm.held, warm.event.cold_tokens, warm.event.reason) == (192, 192, "evicted")
        assert_equals_fresh(warm, expected)
        cache.check_integrity()
    assert all(path.is_file() for path in names)
    with open_cache(model("llama"), directory) as cache:
        assert cache.start(expected.prompt).held == 320
    names[0].unlink()
    with open_cache(model("llama"), directory) as cache:
        warm = run_warm(cache, model("llama"), expected.prompt)
        assert (warm.held, warm.event.cold_tokens) == (0, 0)
        assert_equals_fresh(warm, expected)
    assert all(path.is_file() for path in names)


def chain_files(directory: Path) -> list[Path]:
    """The block files of the only chain in `directory`, in order."""
    return sorted(block_files(directory), key=lambda path: inspect(path, payload=False)[0].index)


@pytest.mark.parametrize("hot", ["0", "64MiB"])
def test_a_damaged_block_is_computed_and_written_again_in_the_same_request(hot: str, tmp_path: Path) -> None:
    expected = fresh("llama", 330)
    with open_cache(model("llama"), tmp_path / "blocks") as cache:
        cache.commit(expected.prompt, expected.prompt_cache)
    names = chain_files(tmp_path / "blocks")
    os.truncate(names[2], 5000)
    go = threading.Event()
    with open_cache(model("llama"), tmp_path / "blocks", hot=hot) as cache:
        assert cache.store._mover is not None
        cache.store._mover.submit(lambda: go.wait(20))  # it sets the block aside only when the request has ended
        warm = run_warm(cache, model("llama"), expected.prompt)
        assert (warm.held, warm.event.cold_tokens, warm.event.reason) == (128, 128, "damaged")
        assert_equals_fresh(warm, expected)
        go.set()
        cache.store._mover.flush(20)
        assert chain_files(tmp_path / "blocks") == names
        assert cache.store.cold is not None
        assert cache.store.cold.counters.offloaded_blocks == 3, "what was good is not written again"
        cache.check_integrity()


def test_stored_blocks_never_change_while_others_decode_and_evict(tmp_path: Path) -> None:
    prompts = [some_tokens(64, seed=pair) for pair in range(12)]
    module = model("llama")
    with open_cache(module, tmp_path / "blocks", hot="2MiB", cold="0") as cache:
        for prompt in prompts:
            run_warm(cache, module, prompt)
        before = stored_bytes(cache)
        assert len(before) == 12
        pairs = []
        for pair, prompt in enumerate(prompts):
            a, b = [*prompt, 1, pair], [*prompt, 2, pair]
            pairs.append([(side, cache.start(side)) for side in (a, b)])
        for pair in pairs:
            (a, first), (b, second) = pair
            assert first.held == second.held == 64
            compute(module, first.prompt_cache, a, 64, [65, 66])
            got = compute(module, second.prompt_cache, b, 64, [65])
            first.finish()
            for leaf in first.prompt_cache:
                leaf.trim(40)
            compute(module, first.prompt_cache, [0] * 60, 26, [60])  # what A held is written over
            got = compute(module, second.prompt_cache, b, 65, [66])
            expected = run_fresh(module, b, [64, 65, 66])
            assert_same_state(state_of(second.prompt_cache), expected.state)
            assert np.abs(got - expected.logits).max() == 0.0
            second.finish()
        after = stored_bytes(cache)
        assert {name: after[name] for name in before} == before
        while (victim := cache.store.hot.evict()) is not None:
            del after[victim.name]
            assert stored_bytes(cache) == after
        assert cache.store.pins() == 0
        cache.check_integrity()


def stored_bytes(cache: BlockCache) -> dict[bytes, str]:
    """The sum of every payload in the hot tier, tails included."""
    hot = cache.store.hot
    return {
        entry.name: sha256(b"".join(bytes(memoryview(a).cast("B")) for a in hot.payload(entry.name))).hexdigest()
        for entry in hot.entries()
    }


def test_a_block_stays_while_a_sequence_uses_it(tmp_path: Path) -> None:
    prompt = some_tokens(128, seed=1)
    with open_cache(model("llama"), tmp_path / "blocks", hot="192KiB", cold="0") as cache:
        run_warm(cache, model("llama"), prompt)
        sequence = cache.start([*prompt, 1])
        for seed in range(2, 6):
            run_warm(cache, model("llama"), some_tokens(192, seed=seed))
        assert cache.start([*prompt, 1]).held == 128
        sequence.finish()
        cache.check_integrity()


def test_an_answer_does_not_depend_on_what_was_asked_before(architecture: str, tmp_path: Path) -> None:
    a, b, c = (fresh(architecture, tokens) for tokens in (129, 127, 193))
    with open_cache(model(architecture), tmp_path / "blocks") as cache:
        for run in (a, b, c, a, c, b):
            assert_equals_fresh(run_warm(cache, model(architecture), run.prompt), run)
        cache.check_integrity()


def test_two_blocks_restored_from_cold_continue_by_65_tokens_as_fresh(architecture: str, tmp_path: Path) -> None:
    stored = fresh(architecture, 128)
    prompt = stored.prompt + some_tokens(65, seed=65)
    with open_cache(model(architecture), tmp_path / "blocks") as cache:
        cache.commit(stored.prompt, stored.prompt_cache)
    with open_cache(model(architecture), tmp_path / "blocks") as cache:
        warm = run_warm(cache, model(architecture), prompt)
        assert (warm.held, warm.event.cold_tokens) == (128, 128)
        assert_equals_fresh(warm, run_fresh(model(architecture), prompt, [64, 127, 128, 192, 193]))


def test_two_chats_with_one_system_prompt_keep_both_their_own_blocks(tmp_path: Path) -> None:
    system = some_tokens(128, seed=128)
    chats = [system + some_tokens(640, seed=seed) for seed in (1, 2)]
    with open_cache(model("llama"), tmp_path / "blocks") as cache:
        held = [run_warm(cache, model("llama"), chats[turn % 2]).held for turn in range(4)]
        assert held == [0, 128, 767, 767]
    with open_cache(model("llama"), tmp_path / "blocks") as cache:
        restarted = [run_warm(cache, model("llama"), chat) for chat in chats]
        assert [(warm.held, warm.event.cold_tokens) for warm in restarted] == [(767, 767), (767, 767 - 128)]


class GaveUpError(Exception):
    """The client went away."""


def test_a_run_given_up_in_its_prefill_leaves_its_full_blocks_behind(llama: BlockCache) -> None:
    def leave(done: int, total: int) -> None:
        if done >= 150 < total:
            raise GaveUpError

    prompt = some_tokens(193, seed=193)
    run = generate(model("llama"), llama, prompt, max_tokens=9, sampler=greedy, chunk_tokens=50, on_progress=leave)
    with pytest.raises(GaveUpError):
        list(run)
    assert run.event is not None
    assert llama.store.pins() == 0
    warm = run_warm(llama, model("llama"), prompt)
    assert (warm.held, warm.event.tail_tokens) == (150, 22)
    assert_equals_fresh(warm, fresh("llama", 193))


def test_a_reply_stopped_half_way_keeps_what_was_computed_and_every_pin_is_given_back(llama: BlockCache) -> None:
    prompt = some_tokens(60, seed=60)
    run = generate(model("llama"), llama, prompt, max_tokens=50, sampler=greedy)
    tokens = iter(run)
    reply = [next(tokens) for _ in range(10)]
    tokens.close()
    assert run.close() is run.event
    assert llama.store.pins() == 0
    assert llama.start([*prompt, *reply, 1]).finish().hot_tokens >= 69


def test_decoded_tokens_are_reused_by_the_next_turn(architecture: str, tmp_path: Path) -> None:
    prompt = some_tokens(60, seed=60)
    with open_cache(model(architecture), tmp_path / "blocks") as cache:
        reply = list(generate(model(architecture), cache, prompt, max_tokens=80, sampler=greedy))
        turn = prompt + reply + some_tokens(20, seed=20)
        warm = run_warm(cache, model(architecture), turn)
        assert warm.held == 139, "the last token of a reply was never fed to the model"
        ends = [59, *range(60, 140), *stops(139, len(turn))]
        assert_equals_fresh(warm, run_fresh(model(architecture), turn, sorted({*ends})))


# memory


def test_the_first_append_after_a_restore_does_not_copy(tmp_path: Path) -> None:
    prompt = some_tokens(193, seed=193)
    run = fresh("llama", 193)
    with open_cache(model("llama"), tmp_path / "blocks") as cache:
        cache.commit(run.prompt, run.prompt_cache)
        for tier in ("hot", "cold"):
            sequence = cache.start(prompt)
            held = sequence.held
            assert sequence.plan.match.tokens_of(tier) == held
            before = addresses(sequence.prompt_cache)
            compute(model("llama"), sequence.prompt_cache, prompt, held, [193])
            assert addresses(sequence.prompt_cache) == before
            aliases = [leaf.keys[..., :1, :] for leaf in sequence.prompt_cache]  # what forces a copy, to show it shows
            mx.eval(aliases)
            compute(model("llama"), sequence.prompt_cache, [*prompt, 1], 193, [194])
            assert addresses(sequence.prompt_cache) != before
            sequence.finish()
            assert cache.store.flush()
            evict_hot(cache, keep=0)


def addresses(prompt_cache: list[Any]) -> list[int]:
    """Where the buffers of a prompt cache lie."""
    arrays = [array for leaf in prompt_cache for array in (leaf.keys, leaf.values)]
    return [np.frombuffer(memoryview(array).cast("B"), np.uint8).ctypes.data for array in arrays]


def test_a_restored_sequence_has_room_for_its_whole_prompt(llama: BlockCache) -> None:
    run = fresh("llama", 193)
    llama.commit(run.prompt, run.prompt_cache)
    sequence = llama.start(run.prompt + some_tokens(400, seed=1))
    assert {leaf.keys.shape[2] for leaf in sequence.prompt_cache} == {768}
    sequence.finish()


# other kinds of cache


def quantisable() -> Config:
    return tiny_llama() | {"head_dim": 64}


def with_indexer() -> Config:
    """MLA with an indexer: a `CacheList` of two `KVCache` in every layer; it picks 32 tokens a query."""
    indexer = {"model_type": "deepseek_v32", "index_head_dim": 32, "index_n_heads": 2, "index_topk": 32}
    return tiny_deepseek_v3() | indexer


@pytest.mark.parametrize("tokens", [63, 64, 129, 193])
@pytest.mark.parametrize(("config", "kv_bits"), [(quantisable(), 8), (quantisable(), 4), (with_indexer(), None)])
def test_quantised_and_nested_caches_are_restored_equal_to_fresh(
    config: Config, kv_bits: int | None, tokens: int, tmp_path: Path
) -> None:
    module, prompt = build_tiny(config), some_tokens(tokens, seed=tokens)
    expected = run_fresh(module, prompt, prompt_cache=Adapter(module, kv_bits=kv_bits).new_prompt_cache())
    with open_cache(module, tmp_path / "blocks", kv_bits=kv_bits) as cache:
        assert_equals_fresh(run_warm(cache, module, prompt), expected)
        again = run_warm(cache, module, prompt)
        assert again.held == tokens - 1
        assert_equals_fresh(again, expected)
    with open_cache(module, tmp_path / "blocks", kv_bits=kv_bits) as cache:
        again = run_warm(cache, module, prompt)
        assert again.held == from_cold(tokens)
        assert_equals_fresh(again, expected)
        cache.check_integrity()


def test_a_model_whose_kv_mlx_lm_cannot_quantise_is_a_usage_error(tmp_path: Path) -> None:
    for architecture in ("llama", "gemma3", "qwen3_next"):  # head_dim 16; a rotating cache; recurrent state
        with pytest.raises(UsageError, match="leave KV bits out"):
            open_cache(model(architecture), tmp_path / "blocks", kv_bits=8)


def test_a_model_that_cannot_be_cut_runs_uncached_and_says_which_cache_it_has(tmp_path: Path) -> None:
    module, prompt = build_any(CONFIGS["deepseek_v41"]), some_tokens(150, seed=150)
    expected = run_fresh(module, prompt)
    with open_cache(module, tmp_path / "blocks") as cache:
        assert cache.uncached is not None
        assert "LayerCache" in cache.uncached
        for _ in range(2):
            warm = run_warm(cache, module, prompt)
            assert (warm.held, warm.event.computed_tokens, warm.event.reason) == (0, 150, cache.uncached)
            assert_equals_fresh(warm, expected)
        assert cache.commit(prompt, expected.prompt_cache) == 0
        assert len(cache.store.hot) == 0
    assert block_files(tmp_path / "blocks") == []


def test_a_prompt_cache_whose_layers_disagree_is_refused(llama: BlockCache) -> None:
    run = run_fresh(model("llama"), some_tokens(70, seed=70))
    run.prompt_cache[2].trim(1)
    with pytest.raises(ModelError, match=r"different tokens \(\[69, 70\]\)"):
        llama.commit(run.prompt, run.prompt_cache)
    assert len(llama.store.hot) == 0


def greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def test_an_interrupt_inside_a_forward_pass_gives_back_every_pin_and_tells_how_it_ended(
    llama: BlockCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = some_tokens(200, seed=44)
    run_warm(llama, model("llama"), prompt)
    sequence = llama.start(prompt + some_tokens(40, seed=45))
    attention = llama._module.layers[2].self_attn

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(attention), "__call__", stop)
        with pytest.raises(KeyboardInterrupt):
            llama._module(mx.array([[1, 2]]), cache=sequence.prompt_cache)
    for cache in sequence.prompt_cache[:2]:
        cache.offset += 1  # the first layers had gone on when the interrupt came
    event = sequence.finish()
    assert event is sequence.finish()
    assert event.hot_tokens == sequence.held
    assert llama.store.pins() == 0
    llama.check_integrity()
