"""Attention in parts in half precision is finite, and as exact as a fused kernel: float32 inside and rounded once.

The measure is float64 NumPy over the same halves; what rounding alone does to it is the yardstick.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from attention_oracle import numpy_attention
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxkv.attention import partial as partial_module
from mlxkv.attention.block_attention import block_partial, plan_blocks
from mlxkv.attention.partial import finish, merge, partial, partial_shared, sink_partial

HALVES = (mx.float16, mx.bfloat16)


def draw(seed: int, shape: tuple[int, ...], dtype: mx.Dtype, *, times: float = 1.0, plus: float = 0.0) -> mx.array:
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return mx.array(times * numbers + plus).astype(dtype)


def as_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def assert_as_exact_as_fused(found: mx.array, expected: np.ndarray) -> None:
    assert np.isfinite(as_numpy(found)).all()
    size = np.sqrt(np.mean(expected**2))
    rounded = as_numpy(mx.array(expected.astype(np.float32)).astype(found.dtype))
    error, least = (np.sqrt(np.mean((each - expected) ** 2)) / size for each in (as_numpy(found), rounded))
    assert error <= 2 * least, f"{error:.2e}, and rounding alone is {least:.2e}"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("tokens", "times", "plus"),
    [
        (2_048, 1.0, 0.0),
        (2_048, 8.0, 0.0),
        (16_384, 0.01, 6.0),
        (32_768, 0.0, 30.0),
        (70_000, 0.01, 1.0),
        (100_000, 0.0, 30.0),
        (100_000, 2.0, -30.0),
    ],
)
def test_a_long_prefix_with_flat_or_peaked_scores_and_large_values(dtype, tokens, times, plus):
    q = draw(1, (2, 2, 1, 32), dtype, times=times)
    k, v = draw(2, (1, 1, tokens, 32), dtype), draw(3, (1, 1, tokens, 32), dtype, plus=plus)
    expected = numpy_attention(q, mx.repeat(k, 2, 0), mx.repeat(v, 2, 0))
    assert_as_exact_as_fused(finish(partial_shared(q, k, v), dtype), expected)


@given(
    dtype=st.sampled_from(HALVES),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)),
    prefix=st.integers(1, 700),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    times=st.sampled_from([0.0, 0.1, 1.0, 8.0, 300.0]),
    plus=st.sampled_from([0.0, 6.0, 30.0, 900.0]),
    copied=st.sampled_from([1, 20_000, 2**25]),
    seed=st.integers(0, 2**31),
)
@example(dtype=mx.float16, shape=(2, 2, 1), prefix=700, lengths=[64, 65, 1], times=8.0, plus=30.0, copied=2**25, seed=0)
@settings(max_examples=40)
def test_a_shared_prefix_merged_with_blocks_of_each_rows_own(dtype, shape, prefix, lengths, times, plus, copied, seed):
    groups, kv_heads, users = shape
    rows, dim = len(lengths), 16
    q = draw(seed, (rows, groups * kv_heads, 1, dim), dtype, times=times)
    k, v = (
        draw(seed + 1, (1, kv_heads, prefix, dim), dtype),
        draw(seed + 2, (1, kv_heads, prefix, dim), dtype, plus=plus),
    )
    shared_block = 0  # the first `users` rows that are long enough begin with one block in common
    tables, free = [], 1
    for row, tokens in enumerate(lengths):
        count = -(-tokens // 64)
        own = list(range(free, free + count))
        free += count
        tables.append([shared_block, *own[1:]] if row < users and tokens >= 64 else own)
    pool_k = draw(seed + 3, (free, kv_heads, 64, dim), dtype)
    pool_v = draw(seed + 4, (free, kv_heads, 64, dim), dtype, plus=plus)
    before, partial_module._COPY_BYTES = partial_module._COPY_BYTES, copied
    try:
        own_part = block_partial(q, pool_k, pool_v, plan_blocks(tables, lengths))
        found = finish(merge(own_part, partial_shared(q, k, v)), dtype)
    finally:
        partial_module._COPY_BYTES = before
    expected = np.concatenate(
        [
            numpy_attention(
                q[row : row + 1],
                *(
                    mx.concatenate([one, *(pool[b : b + 1] for b in table)], axis=2)[:, :, : prefix + tokens]
                    for one, pool in ((k, pool_k), (v, pool_v))
                ),
            )
            for row, (table, tokens) in enumerate(zip(tables, lengths, strict=True))
        ]
    )
    assert_as_exact_as_fused(found, expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mask", [None, "causal"])
def test_parts_with_a_mask_and_sinks(dtype, mask):
    q = draw(1, (2, 4, 9, 64), dtype, times=5.0)
    k, v = draw(2, (2, 2, 300, 64), dtype), draw(3, (2, 2, 300, 64), dtype, plus=20.0)
    sinks = draw(4, (4,), mx.float32)
    seen = None if mask is None else mx.array(np.tril(np.ones((9, 300), bool), 291))
    parts = [partial(q, k[:, :, a:b], v[:, :, a:b], mask=None if seen is None else seen[:, a:b])
             for a, b in ((0, 100), (100, 295), (295, 300))]  # fmt: skip
    found = finish(merge(*parts, sink_partial(sinks, 2, 9, 64)), dtype)
    assert_as_exact_as_fused(found, numpy_attention(q, k, v, seen, sinks))


def test_scores_beyond_what_float16_can_hold_are_told_apart():
    q, k = mx.full((1, 1, 1, 64), 200, mx.float16), mx.full((1, 1, 3, 64), 200, mx.float16)
    k[:, :, 1] = 201  # 321,600 against 320,000
    v = mx.array([1.0, 2.0, 3.0], mx.float16)[None, None, :, None]
    assert finish(partial_shared(q, k, v, scale=1.0), mx.float16).item() == 2.0
    assert finish(partial(q, k, v, scale=1.0), mx.float16).item() == 2.0


def test_a_part_that_is_hidden_altogether_adds_nothing():
    q, k, v = (draw(seed, (1, 1, 70, 16), mx.float16, plus=30.0) for seed in (1, 2, 3))
    hidden = mx.zeros((70, 70), mx.bool_)
    found = finish(merge(partial(q, k, v, mask=hidden), partial(q, k, v)), mx.float16)
    assert_as_exact_as_fused(found, numpy_attention(q, k, v))
