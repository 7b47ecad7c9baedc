"""Checkpoints and windows through the block cache: how much is kept, where a conversation resumes, what damage does."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from functools import cache as remember
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from driving import block_files, compute, run_fresh, run_warm, some_tokens, stops
from kinds import CONFIGS, EXACT, ask, build, check_answer, check_restored, look, run_plain
from tiny import ALL_TINY, build_tiny

from mlxkv.cache.block_log import RequestEvent
from mlxkv.cache.checkpoint import SHARE, cadence_tokens
from mlxkv.cache.codec import inspect
from mlxkv.cache.cold import ColdTier
from mlxkv.engine.generate import generate
from mlxkv.prompt_cache.adapter import Adapter
from mlxkv.prompt_cache.block_cache import BlockCache
from mlxkv.prompt_cache.windows import RECORDED, RecordedRotatingKVCache

SOON_S = 20.0
STATEFUL = ("qwen3_next", "lfm2", "mamba2", "recurrent_gemma")


@remember
def model(name: str) -> nn.Module:
    return build_tiny(ALL_TINY[name]()) if name in ALL_TINY else build(CONFIGS[name])


def open_cache(
    name: str, directory: Path, *, hot: str | int = "64MiB", cold: str | int = "1GiB", **more: Any
) -> BlockCache:
    return BlockCache.open(model(name), cache_dir=directory, hot=hot, cold=cold, **more)


@pytest.fixture
def qnext(tmp_path: Path) -> Iterator[BlockCache]:
    """A cache for the tiny hybrid; checked after the test."""
    with open_cache("qwen3_next", tmp_path / "blocks") as cache:
        yield cache
        cache.check_integrity()
        assert cache.store.pins() == 0


def request(
    name: str, cache: BlockCache, prompt: list[int], *, reply: int = 2, marks: tuple[int, ...] = ()
) -> tuple[list[int], RequestEvent]:
    """One greedy request."""
    run = generate(model(name), cache, prompt, max_tokens=reply, sampler=greedy, chunk_tokens=64, marks=marks)
    tokens = list(run)
    assert run.event is not None
    return tokens, run.event


def greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def held(event: RequestEvent) -> int:
    return event.hot_tokens + event.cold_tokens


def checkpoints(cache: BlockCache) -> dict[int, list[mx.array]]:
    """Those in memory, by their place in blocks. Only for a cache that holds one chain."""
    hot, depth = cache.store.hot, {}
    for entry in hot.entries():
        parent = hot.get(entry.parent)
        depth[entry.name] = depth[parent.name] + 1 if parent else 0
    return {depth[e.name]: list(hot.payload(e.name)) for e in hot.entries() if not e.tokens}  # type: ignore[arg-type]


# how much


def test_checkpoints_of_5000_tokens_stay_within_their_share(qnext: BlockCache, tmp_path: Path) -> None:
    prompt = some_tokens(5000, seed=5)
    _, event = request("qwen3_next", qnext, prompt, marks=(700,))
    assert held(event) == 0
    assert qnext.store.flush()
    taken, layout = checkpoints(qnext), qnext.layout
    cadence = cadence_tokens(layout)
    assert cadence == 1856, "58,368 B a state, 256 B a token, an eighth"
    assert [64 * place for place in sorted(taken)] == [640, cadence, 2 * cadence, 4992]
    nbytes = sum(array.nbytes for arrays in taken.values() for array in arrays)
    assert nbytes == len(taken) * layout.checkpoint_bytes <= SHARE * 5000 * layout.bytes_per_token
    files = [
        path.stat().st_size
        for path in block_files(tmp_path / "blocks")
        if inspect(path, payload=False)[0].is_checkpoint
    ]
    assert len(files) == len(taken)
    assert sum(files) <= SHARE * 5000 * layout.bytes_per_token


@pytest.mark.parametrize("name", STATEFUL)
def test_a_checkpoint_holds_its_own_bytes_only(name: str, tmp_path: Path) -> None:
    with open_cache(name, tmp_path) as cache:
        request(name, cache, some_tokens(300, seed=3))
        taken = checkpoints(cache)
        assert taken
        for arrays in taken.values():
            for array, spec in zip(arrays, cache.layout.states, strict=True):
                assert (array.shape, array.nbytes) == (spec.shape, spec.nbytes)
                assert has_its_own_buffer(array)
                assert memoryview(array).c_contiguous


def has_its_own_buffer(array: mx.array) -> bool:
    """MLX hands out a freed buffer again when it is less than twice as large; a slice of a chunk holds far more."""
    return int(mx.get_array_buffer_size(array)) < 2 * array.nbytes


def test_a_copied_state_has_the_same_bits_and_not_the_chunk_it_was_cut_from() -> None:
    chunk = mx.concatenate([mx.full((1, 2000, 16), -0.0), mx.full((1, 3, 16), -0.0)], axis=1)
    state = chunk[:, -3:]
    mx.eval(chunk, state)
    assert not has_its_own_buffer(state)
    (copy,) = Adapter(model("qwen3_next")).checkpoint((state,))
    assert has_its_own_buffer(copy)
    assert bytes(memoryview(copy).cast("B")) == bytes(memoryview(mx.contiguous(state)).cast("B"))


# where a conversation resumes


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("name", STATEFUL)
def test_each_of_ten_turns_computes_what_is_new_and_at_most_a_block(name: str, restarts: bool, tmp_path: Path) -> None:
    cache = open_cache(name, tmp_path)
    told: list[int] = []
    for turn in range(10):
        said = some_tokens(30 + 11 * turn, seed=turn)
        prompt = told + said
        reply, event = request(name, cache, prompt, reply=10 + 9 * turn)
        assert event.computed_tokens <= len(said) + 64
        again, event = request(name, cache, prompt, reply=1)
        assert again == reply[:1]
        assert event.computed_tokens <= max(len(said), 1) + 64
        assert event.computed_tokens <= 65 or held(event) > 0
        told = prompt + reply
        if restarts:
            cache.close()
            cache = open_cache(name, tmp_path)
    cache.close()


def test_a_conversation_goes_on_in_a_hot_tier_with_room_for_one_checkpoint(tmp_path: Path) -> None:
    with open_cache("qwen3_next", tmp_path) as cache:
        room = cache.layout.checkpoint_bytes + 9 * cache.layout.block_bytes
    told: list[int] = []
    with open_cache("qwen3_next", tmp_path, hot=room, cold=0) as cache:
        for turn in range(6):
            prompt = told + some_tokens(60, seed=turn)
            reply, event = request("qwen3_next", cache, prompt, reply=30)
            assert held(event) >= (len(told) - 1) // 64 * 64
            told = prompt + reply
            cache.check_integrity()


def test_another_conversation_resumes_at_the_end_of_the_system_prompt(tmp_path: Path) -> None:
    system = some_tokens(150, seed=150)
    for marks, resumed in (((), 0), ((150,), 128)):
        with open_cache("qwen3_next", tmp_path / str(len(marks))) as cache:
            request("qwen3_next", cache, system + some_tokens(200, seed=1), marks=marks)
            other = system + some_tokens(120, seed=2)
            answer = ask(model("qwen3_next"), cache, other, 3)
            assert answer.held == resumed
            assert check_answer(answer, run_plain(model("qwen3_next"), other, 3)) == 0.0


@pytest.mark.parametrize("chunk_tokens", [100, 4096])
def test_a_chunk_ends_where_a_checkpoint_is_due(chunk_tokens: int, qnext: BlockCache) -> None:
    prompt, module = some_tokens(400, seed=4), model("qwen3_next")
    run = generate(module, qnext, prompt, max_tokens=1, sampler=greedy, chunk_tokens=chunk_tokens, marks=(64, 200))
    assert len(list(run)) == 1
    assert sorted(checkpoints(qnext)) == [1, 3, 6]
    ends = sorted({64, 192, 384, 399, 400, *range(chunk_tokens, 399, chunk_tokens)})
    fresh = run_plain(module, prompt, 1, ends)
    for length, resumed in ((65, 64), (200, 192), (400, 384)):
        restored = qnext.restore(prompt[:length])
        assert restored.tokens == resumed
        check_restored(look(restored.prompt_cache, resumed), fresh)


@pytest.mark.parametrize("chunk_tokens", [20, 100, 4096])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "llama4"])
def test_blocks_of_windows_are_whole_however_long_a_chunk_is(name: str, chunk_tokens: int, tmp_path: Path) -> None:
    prompt, module = some_tokens(300, seed=4, vocabulary=100), model(name)
    with open_cache(name, tmp_path) as cache:
        run = generate(module, cache, prompt, max_tokens=1, sampler=greedy, chunk_tokens=chunk_tokens)
        assert len(list(run)) == 1
        fresh = run_plain(module, prompt, 1, sorted({*range(chunk_tokens, 299, chunk_tokens), 299, 300}))
        for length in (10, 65, 129, 250, 300):
            restored = cache.restore(prompt[:length])
            assert restored.tokens == length - 1
            check_restored(look(restored.prompt_cache, length - 1), fresh)


def test_the_deepest_checkpoint_of_a_match_is_used(qnext: BlockCache) -> None:
    prompt = some_tokens(400, seed=4)
    request("qwen3_next", qnext, prompt, marks=(64, 200))
    assert sorted(checkpoints(qnext)) == [1, 3, 6]
    for length, resumed in ((400, 384), (384, 192), (385, 384), (300, 192), (193, 192), (192, 64), (65, 64), (64, 0)):
        restored = qnext.restore(prompt[:length])
        assert restored.tokens == resumed, length
        check_restored(look(restored.prompt_cache, resumed), run_plain(model("qwen3_next"), prompt, 1))


@pytest.mark.parametrize("marks", [(), (64,)])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_branch_never_has_the_state_of_another_token_than_its_keys(
    name: str, marks: tuple[int, ...], tmp_path: Path
) -> None:
    stored = some_tokens(150, seed=150)
    run = run_plain(model(name), stored, 1)
    with open_cache(name, tmp_path) as cache:
        request(name, cache, stored, marks=marks)
        prompt = [*stored[:100], (stored[100] + 1) % 128, *some_tokens(30, seed=1)]
        prompt_cache, tokens = cache.restore(prompt)
        assert tokens in (0, 64)
        if marks:
            assert tokens == 64
        check_restored(look(prompt_cache, tokens), run)
        answer = ask(model(name), cache, prompt, 3)
        check_answer(answer, run_plain(model(name), prompt, 3))


def test_a_reply_cut_short_keeps_the_state_it_reached(qnext: BlockCache) -> None:
    prompt = some_tokens(100, seed=1)
    run = generate(model("qwen3_next"), qnext, prompt, max_tokens=200, sampler=greedy, chunk_tokens=64)
    tokens = iter(run)
    reply = [next(tokens) for _ in range(100)]
    tokens.close()
    assert sorted(checkpoints(qnext)) == [1, 3], "the end of the prompt, and the last boundary of 199 tokens"
    longer = prompt + reply + some_tokens(9, seed=2)
    answer = ask(model("qwen3_next"), qnext, longer, 3)
    assert answer.held == 192
    assert check_answer(answer, run_plain(model("qwen3_next"), longer, 3)) <= EXACT


def test_a_library_user_who_stops_at_a_block_boundary_leaves_a_checkpoint(tmp_path: Path) -> None:
    prompt = some_tokens(200, seed=2)
    with open_cache("qwen3_next", tmp_path) as cache:
        module, restored = model("qwen3_next"), cache.restore(prompt)
        compute(module, restored.prompt_cache, prompt, 0, [64, 128])
        assert cache.commit(prompt, restored.prompt_cache) == 128
        assert cache.restore(prompt).tokens == 128


# damage


def files_by_place(directory: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    """The files of the only chain: blocks by index, and checkpoints by the blocks before them."""
    found = {path: inspect(path, payload=False)[0] for path in block_files(directory)}
    blocks = {block.index: path for path, block in found.items() if not block.is_checkpoint}
    return blocks, {block.index: path for path, block in found.items() if block.is_checkpoint}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def payload_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("harm", ["cut", "flipped", "gone", "another prompt's", "an earlier one"])
def test_a_damaged_checkpoint_is_a_miss_and_a_shallower_one_is_used(harm: str, tmp_path: Path) -> None:
    prompt = some_tokens(300, seed=3)
    with open_cache("qwen3_next", tmp_path) as cache:
        request("qwen3_next", cache, prompt, marks=(128,))
    _, taken = files_by_place(tmp_path)
    assert sorted(taken) == [2, 4]
    if harm == "cut":
        taken[4].write_bytes(taken[4].read_bytes()[:-1])
    elif harm == "flipped":
        flip(taken[4], -1)
    elif harm == "gone":
        taken[4].unlink()
    elif harm == "an earlier one":
        shutil.copy(taken[2], taken[4])
    else:
        with open_cache("qwen3_next", tmp_path / "other") as other:
            request("qwen3_next", other, some_tokens(300, seed=30))
        shutil.copy(files_by_place(tmp_path / "other")[1][4], taken[4])
        shutil.rmtree(tmp_path / "other")
    expected = run_plain(model("qwen3_next"), prompt, 3)
    with open_cache("qwen3_next", tmp_path) as cache:
        sequence = cache.start(prompt)
        assert (sequence.held, sequence.plan.reason) == (128, "evicted" if harm == "gone" else "damaged")
        check_restored(look(sequence.prompt_cache, 128), expected)
        sequence.finish()
        answer = ask(model("qwen3_next"), cache, prompt, 3)
        assert answer.held == 128
        assert check_answer(answer, expected, exact=True) == 0.0
        assert ask(model("qwen3_next"), cache, prompt, 3).held == 256, "taken again"
        assert cache.store.cold is not None
        assert cache.store.cold.counters.damaged_blocks == (0 if harm == "gone" else 1)
        cache.check_integrity()
    assert sorted(files_by_place(tmp_path)[1]) == [2, 4], "written again"
    with open_cache("qwen3_next", tmp_path) as cache:
        assert ask(model("qwen3_next"), cache, prompt, 3).held == 256


def test_every_checkpoint_damaged_is_a_cold_start_with_the_right_answer(tmp_path: Path) -> None:
    prompt = some_tokens(300, seed=3)
    with open_cache("lfm2", tmp_path) as cache:
        request("lfm2", cache, prompt)
    _, taken = files_by_place(tmp_path)
    assert sorted(taken) == [1, 2, 3, 4], "its state is small enough for every block"
    for path in taken.values():
        flip(path, -1)
    with open_cache("lfm2", tmp_path) as cache:
        answer = ask(model("lfm2"), cache, prompt, 3)
        assert answer.held == 0
        assert check_answer(answer, run_plain(model("lfm2"), prompt, 3), exact=True) == 0.0
        cache.check_integrity()


def test_a_damaged_block_before_a_checkpoint_ends_the_match_at_one_before_it(tmp_path: Path) -> None:
    prompt = some_tokens(300, seed=3)
    with open_cache("lfm2", tmp_path) as cache:
        request("lfm2", cache, prompt)
    flip(files_by_place(tmp_path)[0][2], -1)
    with open_cache("lfm2", tmp_path) as cache:
        answer = ask(model("lfm2"), cache, prompt, 3)
        assert answer.held == 128
        assert check_answer(answer, run_plain(model("lfm2"), prompt, 3), exact=True) == 0.0
        cache.check_integrity()


def test_a_checkpoint_that_does_not_arrive_in_time_is_given_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = some_tokens(300, seed=3)
    with open_cache("qwen3_next", tmp_path) as cache:
        request("qwen3_next", cache, prompt, marks=(128,))
    go, real_read = threading.Event(), ColdTier.read
    asked: list[int] = []

    def read(self: ColdTier, block: Any, *arguments: Any) -> int:
        if block.is_checkpoint:
            asked.append(block.index)
            assert go.wait(SOON_S)
        return real_read(self, block, *arguments)

    with open_cache("qwen3_next", tmp_path) as cache, monkeypatch.context() as patch:
        patch.setattr(ColdTier, "read", read)
        cache.prefill_rate.value = 1e6  # so that the deadline is near
        sequence = cache.start(prompt)
        go.set()
        assert (sequence.held, sequence.plan.reason) == (0, "slower than computing")
        assert asked == [4, 2], "the deepest, then the one before it"
        sequence.finish()
        assert cache.store.pins() == 0


# windows


def restore_events(log: Path) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "restore"]


def test_of_a_window_layer_only_the_last_window_is_read(tmp_path: Path) -> None:
    prompt = some_tokens(321, seed=1)
    with open_cache("gemma3", tmp_path / "blocks") as cache:
        request("gemma3", cache, prompt)
    log = tmp_path / "log"
    with open_cache("gemma3", tmp_path / "blocks", log=log) as cache:
        assert cache.restore(prompt).tokens == 320
        window, full = (t.nbytes() for t in cache.layout.tensors)
        assert [t.window for t in cache.layout.tensors] == [32, 0]
        assert cache.restore(prompt[:65]).tokens == 64
    whole, short = restore_events(log)
    assert whole["bytes"] == 5 * full + window
    assert short["bytes"] == full + window


def test_a_window_that_begins_in_the_block_before_takes_that_one_too(tmp_path: Path) -> None:
    prompt = some_tokens(400, seed=1)
    with open_cache("gemma3", tmp_path / "blocks") as cache:
        request("gemma3", cache, prompt)
    log = tmp_path / "log"
    with open_cache("gemma3", tmp_path / "blocks", log=log) as cache:
        window, full = (t.nbytes() for t in cache.layout.tensors)
        assert cache.restore([*prompt[:330], 1, 2]).tokens == 330
    assert [event["bytes"] for event in restore_events(log)] == [6 * full + 2 * window]


def test_a_damaged_window_nobody_looks_back_to_is_not_even_read(tmp_path: Path) -> None:
    prompt = some_tokens(321, seed=1)
    with open_cache("gemma3", tmp_path) as cache:
        request("gemma3", cache, prompt)
        window = cache.layout.tensors[0].nbytes()
    first = files_by_place(tmp_path)[0][0]
    flip(first, payload_start(first) + 7)  # in its window tensor, the first of the payload
    expected = run_plain(model("gemma3"), prompt, 3)
    with open_cache("gemma3", tmp_path) as cache:
        answer = ask(model("gemma3"), cache, prompt, 3)
        assert answer.held == 320
        assert check_answer(answer, expected, exact=True) == 0.0
        assert cache.store.cold is not None
        assert cache.store.cold.counters.damaged_blocks == 0
    flip(first, payload_start(first) + window + 7)  # in the tensor of the full layers
    with open_cache("gemma3", tmp_path) as cache:
        answer = ask(model("gemma3"), cache, prompt, 3)
        assert answer.held == 0
        assert check_answer(answer, expected, exact=True) == 0.0
        assert cache.store.cold is not None
        assert cache.store.cold.counters.damaged_blocks == 1


@pytest.mark.parametrize("tier", ["hot", "cold"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "llama4", "recurrent_gemma"])
def test_a_prompt_that_left_a_turned_ring_long_ago_is_answered_as_on_an_empty_cache(
    name: str, tier: str, tmp_path: Path
) -> None:
    stored = some_tokens(150, seed=150)
    with open_cache(name, tmp_path) as cache:
        request(name, cache, stored, reply=60)
        if tier == "hot":
            _check_branches(name, cache, stored)
    if tier == "cold":
        with open_cache(name, tmp_path) as cache:
            _check_branches(name, cache, stored)


def _check_branches(name: str, cache: BlockCache, stored: list[int]) -> None:
    for shared in (20, 33, 100):
        prompt = [*stored[:shared], (stored[shared] + 1) % 100, *some_tokens(30, seed=shared, vocabulary=100)]
        answer = ask(model(name), cache, prompt, 3)
        assert answer.held == (0 if cache.layout.states else shared)
        check_answer(answer, run_plain(model(name), prompt, 3))


@pytest.mark.parametrize("tokens", [33, 113, 150])
def test_a_ring_goes_on_turning_after_a_restore_as_a_fresh_one(tokens: int, tmp_path: Path) -> None:
    prompt = some_tokens(tokens, seed=tokens)
    with open_cache("gemma3", tmp_path) as cache:
        request("gemma3", cache, prompt)
        fresh = run_plain(model("gemma3"), prompt, 80)  # two windows and a half
        answer = ask(model("gemma3"), cache, prompt, 80)
        assert answer.held == tokens - 1
        assert check_answer(answer, fresh, exact=True) == 0.0
        prompt_cache, at = cache.restore(prompt)
        compute(model("gemma3"), prompt_cache, prompt + fresh.reply, at, [*range(tokens, tokens + 71)])
        check_restored(look(prompt_cache, tokens + 70), fresh)


@pytest.mark.parametrize("name", ["gemma3", "recurrent_gemma", "llama4"])
def test_a_conversation_with_windows_goes_on_being_stored_after_a_restart(name: str, tmp_path: Path) -> None:
    told = some_tokens(200, seed=1, vocabulary=100)
    for turn in range(4):
        with open_cache(name, tmp_path) as cache:
            reply, event = request(name, cache, told, reply=30)
            if turn:
                assert event.computed_tokens <= 40 + 64
                assert event.cold_tokens >= (len(told) - 40 - 1) // 64 * 64
            told = told + reply + some_tokens(40, seed=turn, vocabulary=100)
            cache.check_integrity()


def test_the_rows_of_a_block_being_filled_are_noted_before_the_ring_writes_over_them() -> None:
    ring = RecordedRotatingKVCache(32)
    given = mx.random.normal((1, 2, 72, 4), key=mx.random.key(1))
    for start, stop in ((0, 32), *((at, at + 1) for at in range(32, 72))):
        ring.update_and_fetch(given[:, :, start:stop], given[:, :, start:stop] + 1)
    assert mx.array_equal(ring.record.rows("keys", 0, 72), given[0])
    assert mx.array_equal(ring.record.rows("values", 5, 70), given[0, :, 5:70] + 1)
    ring.record.forget(64)
    assert mx.array_equal(ring.record.rows("keys", 64, 72), given[0, :, 64:72])


def test_a_window_notes_no_more_than_the_block_being_filled(tmp_path: Path) -> None:
    prompt = some_tokens(200, seed=1)
    with open_cache("gemma3", tmp_path) as cache:
        sequence = cache.start(prompt)
        at = 0
        for end in (*stops(0, 200), *range(201, 300)):
            compute(model("gemma3"), sequence.prompt_cache, prompt + [1] * 100, at, [end])
            sequence.advance(end - at)
            if end > 200:
                sequence.extend(1)
            sequence.commit()
            at = end
            for leaf in sequence.prompt_cache:
                if isinstance(leaf, RECORDED):
                    assert leaf.record.start == end // 64 * 64
        sequence.finish()


def test_what_a_window_has_forgotten_is_not_stored_and_not_claimed(tmp_path: Path) -> None:
    prompt = some_tokens(200, seed=1)
    with open_cache("gemma3", tmp_path) as cache:
        run = run_fresh(model("gemma3"), prompt)  # mlx-lm's own rings note nothing
        assert cache.commit(prompt, run.prompt_cache) == 0
        assert len(cache.store.hot) == 0
        run_warm(cache, model("gemma3"), prompt[:130])
        assert cache.commit(prompt, run.prompt_cache) == 128, "as much as was held before"


def test_positions_agree_in_every_layer_after_any_restore(tmp_path: Path) -> None:
    prompt = some_tokens(300, seed=9)
    with open_cache("gemma3", tmp_path) as cache:
        request("gemma3", cache, prompt)
        run = run_plain(model("gemma3"), prompt, 1)
        for length in (2, 20, 32, 33, 63, 64, 65, 96, 97, 128, 150, 299, 300):
            restored = cache.restore(prompt[:length])
            assert restored.tokens == length - 1
            check_restored(look(restored.prompt_cache, length - 1), run)
            positions = {leaf.offset for leaf in restored.prompt_cache}
            assert positions == {length - 1}
            assert np.all([leaf.keys.shape[2] >= min(length - 1, 32) for leaf in restored.prompt_cache])
