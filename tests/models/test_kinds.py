"""Every kind of cache: windows and states resume where they can, and go on as a run without a cache does."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from driving import some_tokens
from tiny import ALL_TINY, build_tiny, tiny_qwen3_next

from mlxkv.cache.checkpoint import SHARE, cadence_tokens
from mlxkv.engine.generate import Generation, generate
from mlxkv.models.block_cache import BlockCache

A = some_tokens(300, seed=3)
STATES = {"qwen3_next", "mamba2", "lfm2"}


def run(
    cache: BlockCache, prompt: list[int], count: int = 40, **options: object
) -> tuple[list[int], mx.array, Generation]:
    """Greedy tokens, the log-probabilities they were chosen from, and the generation; the invariants hold after it."""
    seen: list[mx.array] = []

    def sampler(logprobs: mx.array) -> mx.array:
        seen.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    generation = generate(cache._module, cache, prompt, max_tokens=count, sampler=sampler, chunk_tokens=64, **options)
    tokens = list(generation)
    mx.eval(seen)
    cache.check_integrity()
    assert cache.store.pins() == 0
    return tokens, mx.concatenate(seen[:count]), generation


@pytest.fixture(scope="module", params=sorted(ALL_TINY))
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A tiny model, its caches on one directory, and a cache that holds nothing."""
    module = build_tiny(ALL_TINY[request.param]())
    directory = tmp_path_factory.mktemp(request.param)

    def open_cache(place: str = "c", hot: str = "64MiB") -> BlockCache:
        return BlockCache.open(module, cache_dir=directory / place, hot=hot, fields={"model": request.param})

    empty = BlockCache.open(module, cache_dir=directory / "off", hot=0, cold=0, fields={})
    yield request.param, open_cache, empty
    empty.close()


def same(cache: BlockCache, empty: BlockCache, prompt: list[int]) -> tuple[list[int], Generation]:
    """Run `prompt` through the cache and without it; tokens are equal and so are the probabilities, to rounding."""
    tokens, logprobs, generation = run(cache, prompt)
    fresh_tokens, fresh_logprobs, _ = run(empty, prompt)
    assert tokens == fresh_tokens
    assert float(mx.abs(logprobs - fresh_logprobs).max()) < 5e-5
    return tokens, generation


def reused(generation: Generation) -> int:
    event = generation.close()
    return event.hot_tokens + event.cold_tokens


def test_resend_extend_and_branch_equal_a_run_without_a_cache(opened) -> None:
    name, open_cache, empty = opened
    with open_cache("ladder") as cache:
        assert cache.uncached is None
        reply, _ = same(cache, empty, A)
        _, again = same(cache, empty, A)
        assert reused(again) == (256 if name in STATES else 299)
        _, longer = same(cache, empty, A + reply + [5] * 5)
        assert reused(longer) >= 256
        _, longest = same(cache, empty, A + reply + some_tokens(70, seed=9))
        assert reused(longest) >= 256
        for shared in (20, 40, 100):
            _, branch = same(cache, empty, A[:shared] + [7] * 40)
            assert reused(branch) <= shared
            if name not in STATES:
                assert reused(branch) >= shared
    with open_cache("ladder") as cache:  # nothing in memory: all of it comes from the SSD
        _, cold = same(cache, empty, A[:200] + [9] * 30)
        assert reused(cold) >= (0 if name in STATES else 200)
        _, cold = same(cache, empty, A)
        assert reused(cold) >= 256


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 113, 129])
def test_a_prompt_of_any_length_resent_gives_the_same_reply(opened, tokens: int) -> None:
    name, open_cache, empty = opened
    prompt = some_tokens(tokens, seed=tokens)
    with open_cache(f"l{tokens}") as cache:
        same(cache, empty, prompt)
        _, again = same(cache, empty, prompt)
        assert reused(again) == ((tokens - 1) // 64 * 64 if name in STATES else tokens - 1)


def test_checkpoints_stay_within_their_share_of_the_blocks_bytes(tmp_path: Path) -> None:
    cache = BlockCache.open(build_tiny(tiny_qwen3_next()), cache_dir=tmp_path, hot="64MiB", fields={})
    with cache:
        prompt = some_tokens(5000, seed=1)
        run(cache, prompt, count=1)
        entries = list(cache.store.hot.entries())
        checkpoints = sum(entry.nbytes for entry in entries if not entry.tokens)
        blocks = sum(entry.nbytes for entry in entries if entry.tokens)
        assert checkpoints >= 2 * cache.layout.checkpoint_bytes
        assert checkpoints <= SHARE * blocks
        assert cadence_tokens(cache.layout) % 64 == 0


def test_a_ten_turn_conversation_computes_at_most_the_new_tokens_and_a_block(tmp_path: Path) -> None:
    cache = BlockCache.open(build_tiny(tiny_qwen3_next()), cache_dir=tmp_path, hot="64MiB", fields={})
    with cache:
        said = some_tokens(90, seed=0)
        known = 0
        for turn in range(10):
            tokens, _, generation = run(cache, said, count=30)
            assert len(said) - reused(generation) <= len(said) - known + 64
            known = len(said) + len(tokens)
            said = said + tokens + some_tokens(25, seed=turn + 1)


def test_another_conversation_resumes_at_the_end_of_the_system_prompt(tmp_path: Path) -> None:
    cache = BlockCache.open(build_tiny(tiny_qwen3_next()), cache_dir=tmp_path, hot="64MiB", fields={})
    system = some_tokens(150, seed=5)
    with cache:
        run(cache, system + some_tokens(90, seed=6), marks=(150,))
        _, _, other = run(cache, system + some_tokens(80, seed=7), marks=(150,))
        assert reused(other) == 128


def test_a_damaged_checkpoint_is_a_miss_and_a_shallower_one_is_used(tmp_path: Path) -> None:
    module = build_tiny(tiny_qwen3_next())
    prompt = some_tokens(150, seed=5) + some_tokens(90, seed=6)
    with BlockCache.open(module, cache_dir=tmp_path, hot=0, fields={}) as cache:
        run(cache, prompt, count=1, marks=(150,))
        cache.store.flush()
        rows = [row for row in cache.store.cold.rows() if not row.tokens]
        assert sorted(row.index for row in rows) == [2, 3]
        deepest = cache.store.cold.path(max(rows, key=lambda row: row.index))
        data = bytearray(deepest.read_bytes())
        data[-1] ^= 1
        deepest.write_bytes(data)
        _, _, again = run(cache, prompt, count=1, marks=(150,))
        assert reused(again) == 128
        assert cache.store.cold.counters.damaged_blocks == 1


def test_a_state_is_kept_with_its_own_bytes_only(tmp_path: Path) -> None:
    with BlockCache.open(build_tiny(ALL_TINY["lfm2"]()), cache_dir=tmp_path, hot="64MiB", fields={}) as cache:
        run(cache, A, count=1)
        checkpoints = [entry for entry in cache.store.hot.entries() if not entry.tokens]
        assert checkpoints
        for entry in checkpoints:
            payload = cache.store.hot.payload(entry.name)
            assert mx.get_array_buffer_size(list(payload)) <= 2 * entry.nbytes + 4096


def test_a_window_layer_restores_its_last_window_only(tmp_path: Path) -> None:
    with BlockCache.open(build_tiny(ALL_TINY["gemma3"]()), cache_dir=tmp_path, hot="64MiB", fields={}) as cache:
        run(cache, A, count=1)
        _, _, again = run(cache, A, count=1)
        full, window = 2 * 2 * 2 * 16 * 4, 2 * 2 * 2 * 16 * 4  # layers, sides, heads, dim, bytes
        assert again.close().restored_bytes == 299 * full + 32 * window
