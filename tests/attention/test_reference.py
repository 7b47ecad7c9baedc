"""The reference against float64 NumPy and against MLX's own attention."""

import mlx.core as mx
import numpy as np
import pytest
from attention_oracle import Case, assert_is_attention, cases
from hypothesis import example, given, settings

from mlxkv.attention.reference import attention, attention_scores, attention_steps
from mlxkv.core.errors import UsageError

LARGEST = Case(9, 8, 4, 70, 700, 16, 16, mx.float32, "causal", True, 1.0, 0)


@given(case=cases())
@example(case=LARGEST)
@settings(max_examples=100)
def test_it_is_float64_numpy_to_rounding(case):
    q, k, v = case.arrays()
    mask, sinks = case.mask_array(), case.sink_array()
    found = attention(q, k, v, mask=mask, sinks=sinks)
    assert found.dtype == case.dtype
    assert_is_attention(found, q, k, v, mask, sinks, spread=case.spread)


@given(case=cases(dtypes=(mx.float32,), masks=(None, "causal", "boolean", "additive")))
@settings(max_examples=40)
def test_it_is_mlx_own_attention(case):
    if case.keys == 0 or case.dim != case.value_dim:
        return
    q, k, v = case.arrays()
    mask, sinks = case.mask_array(), case.sink_array()
    if case.mask == "boolean":  # MLX gives the mean of all values to a row that sees nothing; let each see one
        mask = mask | (mx.arange(case.keys) == 0)
    theirs = mx.fast.scaled_dot_product_attention(q, k, v, scale=case.dim**-0.5, mask=mask, sinks=sinks)
    for found in (attention(q, k, v, mask=mask, sinks=sinks), theirs):
        assert_is_attention(found, q, k, v, mask, sinks, spread=case.spread)


@pytest.mark.parametrize(("length", "keys"), [(5, 5), (3, 9), (1, 4)])
def test_the_word_causal_means_the_last_queries(length, keys):
    case = Case(2, 4, 2, length, keys, 16, 16, mx.float32, "causal", False, 1.0, 3)
    q, k, v = case.arrays()
    assert_is_attention(attention(q, k, v, mask="causal"), q, k, v, case.mask_array())


def test_weights_sum_to_one_and_the_steps_fit_together():
    q, k, v = Case(2, 6, 2, 7, 11, 16, 16, mx.float32, None, False, 1.0, 4).arrays()
    steps = attention_steps(q, k, v, mask="causal")
    assert np.allclose(np.array(steps.weights.sum(axis=-1)), 1, atol=1e-6)
    assert steps.scores.shape == steps.masked.shape == steps.weights.shape == (2, 6, 7, 11)
    assert np.isneginf(np.array(steps.masked)[:, :, 0, 5:]).all()
    assert mx.array_equal(steps.output, attention(q, k, v, mask="causal"))


def test_scores_of_a_thousand_do_not_overflow():
    q, k, v = Case(1, 2, 1, 3, 50, 64, 64, mx.float32, None, False, 1.0, 5).arrays()
    found = attention(1000 * q, k, v)
    assert np.isfinite(np.array(found)).all()
    best = np.argmax(np.array(attention_scores(1000 * q, k)), axis=-1)
    assert np.allclose(np.array(found), np.array(v)[0, 0][best], atol=1e-3)


def test_float64_stays_float64():
    with mx.stream(mx.cpu):
        q = mx.array(np.random.default_rng(0).standard_normal((1, 1, 4, 8)), mx.float64)
        found = attention(q, q, q)
        assert found.dtype == mx.float64
        array = np.array(q)
    weights = np.exp(array @ array.swapaxes(-1, -2) / np.sqrt(8))
    assert np.abs(np.array(found) - weights / weights.sum(-1, keepdims=True) @ array).max() < 1e-14


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ([(1, 4, 2, 8), (1, 3, 5, 8), (1, 3, 5, 8)], "4 query heads cannot share 3"),
        ([(1, 4, 2, 8), (1, 4, 5, 16), (1, 4, 5, 8)], "must agree"),
        ([(1, 4, 2, 8), (1, 4, 5, 8), (1, 4, 6, 8)], "must agree"),
        ([(4, 2, 8), (4, 5, 8), (4, 5, 8)], r"\[batch, heads, tokens, dim\]"),
        ([(1, 2, 1, 8), (1, 4, 5, 8), (1, 4, 5, 8)], "cannot share"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, said):
    with pytest.raises(UsageError, match=said):
        attention(*map(mx.zeros, shapes))


def test_a_mask_or_sinks_that_do_not_fit_are_named():
    q = mx.zeros((1, 2, 3, 8))
    with pytest.raises(UsageError, match="does not fit"):
        attention(q, q, q, mask=mx.zeros((2, 3)))
    with pytest.raises(UsageError, match="is no mask"):
        attention(q, q, q, mask="full")
    with pytest.raises(UsageError, match="one a query head"):
        attention(q, q, q, sinks=mx.zeros(3))
