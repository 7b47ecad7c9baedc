"""Masks, held against the sentence that defines each."""

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.attention.masks import apply_mask, causal_mask, length_mask, window_mask
from mlxkv.core.errors import UsageError


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (4, 4), (3, 10)])
@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_a_query_sees_its_own_position_and_the_window_before_it(queries, keys, window):
    positions = range(keys - queries, keys)
    causal = [[key <= at for key in range(keys)] for at in positions]
    windowed = [[at - window < key <= at for key in range(keys)] for at in positions]
    assert causal_mask(queries, keys).tolist() == causal
    assert window_mask(queries, keys, window).tolist() == windowed


def test_lengths_hide_what_lies_beyond_them():
    assert length_mask(mx.array([0, 1, 3]), 3)[:, 0, 0].tolist() == [[False] * 3, [True, False, False], [True] * 3]


def test_boolean_hides_and_any_other_dtype_is_added():
    scores = mx.ones((1, 1, 1, 2))
    assert apply_mask(scores, mx.array([True, False])).tolist() == [[[[1, -np.inf]]]]
    assert apply_mask(scores, mx.array([1, 2])).tolist() == [[[[2, 3]]]]
    assert apply_mask(scores, None) is scores


def test_what_cannot_be_is_said():
    with pytest.raises(UsageError, match="3 queries cannot be the last of 2 tokens"):
        causal_mask(3, 2)
    with pytest.raises(UsageError, match="hides every key"):
        window_mask(1, 2, 0)
