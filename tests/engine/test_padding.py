"""What a batch holds is what was counted: rows x longest, sampled at every turn of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from driving import some_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import CacheList, KVCache
from serving import Asked, ask, ask_all, running, tiny_model
from tiny import ALL_TINY, build_tiny

from mlxkv.attention.dispatch import Dispatch
from mlxkv.cache.layout import ArraySpec, Layout
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import GIB, MIB
from mlxkv.engine.chunks import Chunks
from mlxkv.engine.engine import Engine, Opened
from mlxkv.engine.request import Piece, Request
from mlxkv.engine.scheduler import Limits
from mlxkv.prompt_cache import batch as batch_module
from mlxkv.prompt_cache.batch import DecodeBatch
from mlxkv.prompt_cache.block_cache import BlockCache

LLAMA_8B = Layout(tuple(ArraySpec(f"{i}.{side}", 8, 128, "bfloat16") for i in range(32) for side in ("keys", "values")))


def arrays_of(held: Any) -> dict[int, mx.array]:
    """Every array of keys, values or state that can be reached from caches, by identity; no offsets, no indices."""
    if isinstance(held, mx.array):
        return {id(held): held} if held.ndim >= 3 else {}
    found: dict[int, mx.array] = {}
    if isinstance(held, dict):
        parts: Any = held.values()
    elif isinstance(held, (list, tuple)):
        parts = held
    elif hasattr(held, "__dict__") and type(held).__module__.startswith(("mlx_lm.models.cache", "mlxkv.")):
        parts = [part for name, part in vars(held).items() if name not in ("_table", "_step")]
    else:
        return found
    for part in parts:
        found |= arrays_of(part)
    return found


class Watched(Engine):
    """An engine that compares at the end of every turn."""

    turns = most_groups = 0
    wrong = ""

    def _tell_status(self) -> None:
        super()._tell_status()
        try:
            self._compare(self._batch)
        except AssertionError as error:  # an engine begins anew after one
            self.wrong = self.wrong or str(error)

    def _compare(self, batch: DecodeBatch) -> None:
        held = [batch._shared, batch._apart, [group.caches for group in batch._groups]]
        held += [live.sequence._target or live.sequence.prompt_cache for live in self._prefilling]
        assert self.status.live_bytes == sum(array.nbytes for array in arrays_of(held).values())
        assert self.status.live_bytes <= self._scheduler.live_bytes + batch.extra_bytes
        if self.limits.memory_bytes is not None:
            assert self.status.live_bytes <= self.limits.memory_bytes
        self.turns += 1
        self.most_groups = max(self.most_groups, len(batch._groups))


@contextmanager
def watched(
    name: str,
    directory: Path,
    *,
    chunk_tokens: int = 64,
    limits: Limits | None = None,
    config: Any = None,
    **cache: Any,
) -> Iterator[Watched]:
    def open_model() -> Opened:
        model = tiny_model(name, None if config is None else build_tiny(ALL_TINY[name]() | config))
        store = BlockStore(CacheConfig(directory=directory, hot_bytes=64 * MIB, cold_bytes=GIB, floor_bytes=0))
        return Opened(model, BlockCache(model.module, model.fields, store, name=name, **cache), limits or Limits(),
                      Chunks.of(chunk_tokens))  # fmt: skip

    engine = Watched(open_model)
    engine.start(60)
    try:
        yield engine
        assert engine.error is None
    finally:
        engine.close(drain_s=60)
    assert not engine.wrong
    assert engine.turns


KINDS = ["llama", "gemma3", "lfm2", "mamba2", "qwen3_next", "gpt_oss", "deepseek_v2"]


@pytest.mark.parametrize("name", KINDS)
def test_live_bytes_are_those_of_the_arrays_at_every_turn(name: str, tmp_path: Path) -> None:
    lengths = [(900, 30), (65, 40), (64, 9), (300, 50), (310, 5), (3, 60), (700, 12), (130, 20), (66, 30), (800, 3)]
    requests = [Request(prompt=tuple(some_tokens(n, seed=n)), max_tokens=reply) for n, reply in lengths]
    with watched(name, tmp_path) as engine:
        for _ in range(2):  # the second time all is restored
            replies = ask_all(engine, requests)
            assert [len(reply.tokens) for reply in replies] == [reply for _, reply in lengths]
        assert engine.turns > 50
        assert (engine.most_groups > 1) == (name != "mamba2"), "states are not padded"


def test_live_bytes_with_quantised_keys_and_values(tmp_path: Path) -> None:
    requests = [Request(prompt=tuple(some_tokens(n, seed=n)), max_tokens=20) for n in (400, 65, 130)]
    with watched("llama", tmp_path, kv_bits=8, config={"head_dim": 64}) as engine:
        ask_all(engine, requests)


def test_live_bytes_while_a_prefix_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "SHARE_FROM_BYTES", 64 * 1024)
    common = some_tokens(512, seed=1)
    prompts = [*([*common, *some_tokens(n, seed=n)] for n in (9, 70, 200)), some_tokens(40, seed=3)]
    with watched("llama", tmp_path) as engine:
        ask_all(engine, [Request(prompt=tuple(p), max_tokens=80) for p in prompts])


def test_a_limit_holds_with_padding_and_everything_is_served(tmp_path: Path) -> None:
    lengths = [400, 300, 500, 260, 450, 65, 70, 350]
    requests = [Request(prompt=tuple(some_tokens(n, seed=n)), max_tokens=60) for n in lengths]
    with running(tiny_model, tmp_path / "alone", hot=0, cold=0) as engine:
        alone = [ask(engine, request.prompt, 60).tokens for request in requests]
    with watched("llama", tmp_path / "all", limits=Limits(memory_bytes=2_600 * 1024)) as engine:
        assert [reply.tokens for reply in ask_all(engine, requests)] == alone


def test_rows_of_several_groups_say_what_each_says_alone(tmp_path: Path) -> None:
    lengths = [900, 65, 950, 66, 1000, 64, 300]
    requests = [Request(prompt=tuple(some_tokens(n, seed=n)), max_tokens=40) for n in lengths]
    with running(tiny_model, tmp_path / "alone", hot=0, cold=0) as engine:
        alone = [ask(engine, request.prompt, 40).tokens for request in requests]
    with watched("llama", tmp_path / "all", chunk_tokens=1024) as engine:
        assert [reply.tokens for reply in ask_all(engine, requests)] == alone
        assert engine.most_groups > 1


def test_a_long_conversation_beside_short_ones_takes_little_more_than_each_alone(tmp_path: Path) -> None:
    with watched("llama", tmp_path, chunk_tokens=512) as engine:
        lengths = [3000, *[65] * 7]
        asked = [Asked(engine, Request(prompt=tuple(some_tokens(n, seed=i)), max_tokens=300))
                 for i, n in enumerate(lengths)]  # fmt: skip
        for item in asked:
            while not isinstance(item.events.get(timeout=60), Piece):
                pass

        def look() -> tuple[int, int]:
            return engine._batch.size, engine._batch.held_bytes

        rows, held = engine.call(look)
        assert rows == 8
        assert held <= 1.3 * (3300 + 7 * (65 + 300 + 256)) * engine.cache.layout.bytes_per_token
        for item in asked:
            engine.cancel(item.request.id)
            item.wait()


def until_idle(engine: Engine) -> None:
    engine.call(lambda: None)
    engine.call(lambda: None)
    assert engine.status.live_bytes == 0


def joined(lengths: Sequence[int], *, room_bytes: float = float("inf"), layout: Layout = LLAMA_8B) -> DecodeBatch:
    """A batch of rows that say they have so many tokens of a large model; their arrays are tiny."""
    module = build_tiny(ALL_TINY["llama"]())
    hook = Dispatch(module)
    batch = DecodeBatch(hook, layout)
    for tokens in lengths:
        cache = KVCache()
        cache.update_and_fetch(mx.zeros((1, 1, 1, 8)), mx.zeros((1, 1, 1, 8)))
        batch.join([cache], tokens, room_bytes=room_bytes - batch.extra_bytes)
    hook.close()
    return batch


def test_a_hundred_thousand_tokens_of_an_8b_model_are_not_padded_to() -> None:
    batch = joined([100_000, *[500] * 7])
    assert [len(group.rows) for group in batch._groups] == [1, 7]
    assert batch.extra_bytes == 7 * 256 * LLAMA_8B.bytes_per_token, "a step of 256 rows for each of the seven"
    late = joined([*[500] * 7, 100_000, 90_000, 700])
    assert [sorted(group.tokens) for group in late._groups] == [[500] * 7 + [700], [90_000, 100_000]]


@given(lengths=st.lists(st.integers(1, 200_000), min_size=1, max_size=8), room=st.sampled_from([0, 10**8, 10**10]))
@settings(max_examples=40)
def test_no_row_is_padded_by_more_than_it_holds_and_padding_stays_within_its_room(
    lengths: list[int], room: int
) -> None:
    batch = joined(lengths, room_bytes=room)
    assert sorted(row for group in batch._groups for row in group.rows) == list(range(len(lengths)))
    assert batch.extra_bytes <= room
    for group in batch._groups:
        assert all(max(group.tokens) - tokens <= max(tokens, 256) for tokens in group.tokens)


def test_padding_shrinks_when_the_longest_row_leaves(tmp_path: Path) -> None:
    requests = [(some_tokens(500, seed=1), 5), (some_tokens(300, seed=2), 40), (some_tokens(290, seed=3), 40)]
    with watched("llama", tmp_path) as engine:
        asked = [Asked(engine, Request(prompt=tuple(p), max_tokens=n)) for p, n in requests]
        for item in asked:
            item.wait()
        until_idle(engine)


def test_memory_of_padding_is_given_back_when_the_longest_row_leaves() -> None:
    batch = joined([])
    before = mx.get_active_memory()
    for tokens in (4000, 2500, 2500):
        cache = KVCache()
        cache.update_and_fetch(mx.ones((1, 8, tokens, 64)), mx.ones((1, 8, tokens, 64)))
        batch.join([cache], tokens)
        mx.eval(batch._groups[0].caches[0].keys, batch._groups[0].caches[0].values)
    assert len(batch._groups) == 1
    batch.leave({0})
    mx.eval(batch._groups[0].caches[0].keys, batch._groups[0].caches[0].values)
    del cache
    assert mx.get_active_memory() - before <= 1.1 * batch.held_bytes


def test_caches_in_a_list_are_counted_too() -> None:
    inner = KVCache()
    inner.update_and_fetch(mx.zeros((1, 1, 1, 8)), mx.zeros((1, 1, 1, 8)))
    assert len(arrays_of([CacheList(inner, KVCache())])) == 2
