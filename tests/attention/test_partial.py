"""Parts of attention merged, against float64 NumPy over all the keys at once."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from attention_oracle import Case, assert_is_attention, cases
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxkv.attention.partial import finish, merge, nothing, partial, partial_shared, sink_partial
from mlxkv.core.errors import UsageError

LARGEST = Case(9, 8, 4, 70, 700, 16, 16, mx.float32, "causal", True, 1.0, 0)


def split(mask, start, stop):
    return None if mask is None else mask[..., start:stop]


@given(case=cases(), cuts=st.lists(st.integers(0, 700), max_size=5))
@example(case=LARGEST, cuts=[0, 64, 64, 699])
@settings(max_examples=100)
def test_any_parts_merge_to_the_whole(case, cuts):
    q, k, v = case.arrays()
    mask, sinks = case.mask_array(), case.sink_array()
    edges = sorted({0, case.keys, *(min(cut, case.keys) for cut in cuts)}) or [0, 0]
    edges = [0, *edges, case.keys]  # an empty part at either end
    parts = [partial(q, k[:, :, a:b], v[:, :, a:b], mask=split(mask, a, b)) for a, b in pairwise(edges)]
    if sinks is not None:
        parts.append(sink_partial(sinks, case.batch, case.length, case.value_dim))
    whole = merge(*parts)
    assert {array.dtype for array in whole} == {mx.float32}
    assert_is_attention(finish(whole, case.dtype), q, k, v, mask, sinks, spread=case.spread)


@given(case=cases(masks=(None,)))
@settings(max_examples=40)
def test_keys_that_all_rows_share_are_attended_from_one_copy(case):
    q, k, v = case.arrays()
    k, v = k[:1], v[:1]
    found = finish(partial_shared(q, k, v), case.dtype)
    copies = [mx.broadcast_to(a, (case.batch, *a.shape[1:])) for a in (k, v)]
    assert_is_attention(found, q, *copies, spread=case.spread)


@given(case=cases(dtypes=(mx.float32,)), order=st.permutations(range(4)))
@settings(max_examples=30)
def test_the_order_of_parts_does_not_matter(case, order):
    q, k, v = case.arrays()
    mask, quarter = case.mask_array(), case.keys // 4
    edges = [0, quarter, 2 * quarter, 3 * quarter, case.keys]
    parts = [partial(q, k[:, :, a:b], v[:, :, a:b], mask=split(mask, a, b)) for a, b in pairwise(edges)]
    one, other = finish(merge(*parts)), finish(merge(*(parts[i] for i in order)))
    for found in (one, other):
        assert_is_attention(found, q, k, v, mask, spread=case.spread)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_large_scores_do_not_overflow(dtype):
    q = mx.full((1, 2, 3, 64), 200, dtype)
    k = mx.stack([mx.full((1, 1, 64), 200, dtype), mx.full((1, 1, 64), -200, dtype)], axis=2)
    v = mx.stack([mx.full((1, 1, 64), 1, dtype), mx.full((1, 1, 64), 2, dtype)], axis=2)
    parts = [partial(q, k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(2)]
    assert finish(merge(*parts), dtype).tolist() == mx.ones((1, 2, 3, 64)).tolist()


def test_a_row_that_sees_nothing_gets_zeros_and_spoils_no_other():
    q, k, v = Case(1, 2, 1, 2, 6, 16, 16, mx.float32, None, False, 1.0, 1).arrays()
    seen = mx.array([[False] * 6, [True] * 6])
    found = finish(merge(partial(q, k, v, mask=seen), nothing(1, 2, 2, 16)))
    assert not np.array(found)[:, :, 0].any()
    assert_is_attention(found, q, k, v, seen)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_mask_of_the_least_number_is_attended_as_mlx_attends_it(dtype):
    q, k, v = Case(1, 2, 1, 3, 7, 16, 16, mx.float32, None, False, 1.0, 0).arrays()
    rows = [[True] * 4 + [False] * 3, [False] * 7, [True] * 7]
    mask = mx.where(mx.array(rows), 0.0, mx.finfo(dtype).min).astype(dtype)
    theirs = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask.astype(mx.float32))
    parts = [partial(q, k[:, :, a:b], v[:, :, a:b], mask=mask[:, a:b]) for a, b in ((0, 7), (0, 3), (3, 7))]
    for ours in (finish(parts[0]), finish(merge(*parts[1:]))):
        assert mx.abs(ours - theirs).max().item() < (2e-6 if dtype != mx.float16 else 2e-2)  # scores beside 65,504


def test_parts_of_other_queries_are_refused():
    with pytest.raises(UsageError, match="not of the same queries"):
        merge(nothing(1, 2, 3, 4), nothing(1, 2, 4, 4))
    with pytest.raises(UsageError, match="at least one part"):
        merge()
