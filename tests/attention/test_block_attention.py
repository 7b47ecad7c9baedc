"""Attention over blocks, against float64 NumPy over each sequence's tokens put together."""

import mlx.core as mx
import numpy as np
import pytest
from attention_oracle import assert_is_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.attention.block_attention import block_attention, block_partial, plan_blocks
from mlxkv.attention.partial import finish, merge, partial
from mlxkv.attention.reference import attention
from mlxkv.core.errors import UsageError


def pool_of(blocks, kv_heads, dim, value_dim, dtype, seed):
    rng = np.random.default_rng(seed)
    shapes = ((blocks, kv_heads, 64, dim), (blocks, kv_heads, 64, value_dim))
    return [mx.array(rng.standard_normal(s).astype(np.float32)).astype(dtype) for s in shapes]


def joined(pool, table, length):
    """One sequence's rows [1, heads, length, dim], block after block."""
    rows = [np.array(pool.astype(mx.float32))[block] for block in table]
    whole = np.concatenate(rows, axis=1) if rows else np.zeros((pool.shape[1], 0, pool.shape[3]), np.float32)
    return mx.array(whole[None, :, :length]).astype(pool.dtype)


@st.composite
def batches(draw):
    """Sequences of ragged lengths; some begin with blocks of another one, and blocks lie in any order."""
    queries = draw(st.sampled_from([1, 1, 1, 2, 9, 70]))
    lengths = draw(st.lists(st.integers(0, 700), min_size=1, max_size=9))
    lengths = [0 if n < queries else n for n in lengths]
    common = draw(st.integers(0, 6))
    owned = [max(0, -(-n // 64) - common) for n in lengths]
    places = draw(st.permutations(range(common + sum(owned) + draw(st.integers(0, 2)))))
    shared, rest = list(places[:common]), iter(places[common:])
    tables = [(shared + [next(rest) for _ in range(own)])[: -(-n // 64)] for n, own in zip(lengths, owned, strict=True)]
    return queries, lengths, tables, len(places)


@given(
    batch=batches(),
    kv_heads=st.integers(1, 3),
    ratio=st.sampled_from([1, 2, 3, 8]),
    dims=st.sampled_from([(16, 16), (64, 64), (80, 16), (128, 128)]),
    dtype=st.sampled_from([mx.float32, mx.float32, mx.float16, mx.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80)
def test_each_sequence_attends_to_its_own_tokens(batch, kv_heads, ratio, dims, dtype, seed):
    queries, lengths, tables, blocks = batch
    if queries > 2:
        kv_heads, ratio = 1, 2
    keys, values = pool_of(max(blocks, 1), kv_heads, *dims, dtype, seed)
    rng = np.random.default_rng(seed + 1)
    q = rng.standard_normal((len(tables), kv_heads * ratio, queries, dims[0])).astype(np.float32)
    q = mx.array(q).astype(dtype)
    found = block_attention(q, keys, values, plan_blocks(tables, lengths, queries=queries))
    assert found.dtype == dtype
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        k, v = joined(keys, table, length), joined(values, table, length)
        mask = mx.array(np.tril(np.ones((queries, length), bool), length - queries))
        assert_is_attention(
            found[row : row + 1], q[row : row + 1], k, v, mask, spread=1.0 if dtype == mx.float32 else 4.0
        )


def test_the_part_merges_with_keys_that_are_elsewhere():
    keys, values = pool_of(3, 2, 16, 16, mx.float32, 0)
    first_keys, first_values = (a[:1] for a in pool_of(1, 2, 16, 16, mx.float32, 1))
    q = mx.array(np.random.default_rng(2).standard_normal((1, 4, 1, 16)).astype(np.float32))
    behind = block_partial(q, keys, values, plan_blocks([[2, 0]], [100]))
    found = finish(merge(partial(q, first_keys, first_values), behind))
    k, v = (
        mx.concatenate([a, joined(pool, [2, 0], 100)], axis=2)
        for a, pool in ((first_keys, keys), (first_values, values))
    )
    assert np.abs(np.array(found - attention(q, k, v))).max() < 1e-6


def test_blocks_that_are_neighbours_are_not_copied():
    keys, values = pool_of(64, 1, 64, 64, mx.float32, 0)
    q = mx.ones((2, 1, 1, 64))
    plan = plan_blocks([list(range(32)), list(range(32, 64))], [2048, 2040])
    mx.eval(keys, values, q, block_partial(q, keys, values, plan))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(block_partial(q, keys, values, plan))
    assert mx.get_peak_memory() - before < keys.nbytes / 4


def test_what_does_not_fit_is_said():
    with pytest.raises(UsageError, match="sequence 1 has 2 blocks for 64 tokens"):
        plan_blocks([[0], [1, 2]], [64, 64])
    with pytest.raises(UsageError, match="2 block tables and 1 lengths"):
        plan_blocks([[0], [1]], [64])
    keys, values = pool_of(1, 2, 16, 16, mx.float32, 0)
    plan = plan_blocks([[0]], [5])
    with pytest.raises(UsageError, match="1 sequences of 1 queries, not 2 of 1"):
        block_attention(mx.zeros((2, 4, 1, 16)), keys, values, plan)
    with pytest.raises(UsageError, match="do not fit blocks"):
        block_attention(mx.zeros((1, 3, 1, 16)), keys, values, plan)
    with pytest.raises(UsageError, match="sequence 0 names block -1"):
        plan_blocks([[-1]], [5])
    with pytest.raises(UsageError, match="the plan names block 1, and the pool has 1 of keys"):
        block_attention(mx.zeros((1, 4, 1, 16)), keys, values, plan_blocks([[1]], [5]))
