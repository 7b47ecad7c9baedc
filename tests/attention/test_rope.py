"""Rotary and sinusoidal positions, against MLX's and against their formulas."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.attention.rope import rope, scaled_rope, sinusoidal
from mlxkv.core.errors import UsageError


def drawn(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@given(
    dims=st.sampled_from([2, 8, 16, 64]),
    extra=st.sampled_from([0, 3, 16]),
    traditional=st.booleans(),
    base=st.sampled_from([100.0, 10_000.0, 1e6]),
    scale=st.sampled_from([1.0, 0.25]),
    offsets=st.lists(st.integers(0, 5000), min_size=1, max_size=3),
    tokens=st.integers(1, 9),
)
@settings(max_examples=60)
def test_it_is_mlx_own_rope(dims, extra, traditional, base, scale, offsets, tokens):
    x, offset = drawn(len(offsets), 2, tokens, dims + extra), mx.array(offsets)
    theirs = mx.fast.rope(x, dims, traditional=traditional, base=base, scale=scale, offset=offset)
    ours = rope(x, dims=dims, traditional=traditional, base=base, scale=scale, offset=offset)
    assert np.abs(np.array(theirs - ours)).max() < 5e-3  # angles of 5,000 turns in float32
    if max(offsets) < 50:
        assert np.abs(np.array(theirs - ours)).max() < 5e-5


def test_a_pair_turns_by_its_position():
    x = mx.array([[[[1.0, 0.0], [1.0, 0.0]]]])
    turned = np.array(rope(x, offset=1))[0, 0]
    assert np.allclose(turned, [[math.cos(1), math.sin(1)], [math.cos(2), math.sin(2)]], atol=1e-6)


def test_a_product_depends_on_the_distance_only():
    q, k = drawn(1, 1, 1, 64), drawn(1, 1, 1, 64, seed=1)
    products = [
        (rope(q, offset=at) * rope(k, offset=at - 3)).sum().item() for at in (3, 10, 200)
    ]  # the same two tokens, further on
    assert np.ptp(products) < 1e-3
    assert abs(products[0] - (q * k).sum().item()) > 1e-2


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ],
)
def test_scaled_variants_are_mlx_lm_own(scaling):
    layer, x = scaled_rope(32, scaling=scaling, max_position_embeddings=1024), drawn(1, 2, 5, 32)
    factor = getattr(layer, "mscale", 1.0)
    ours = rope(factor * x, offset=7, freqs=layer._freqs)
    assert np.abs(np.array(layer(x, offset=7) - ours)).max() < 5e-6
    assert np.abs(np.array(ours - rope(x, offset=7))).max() > 1e-2


def test_linear_scaling_divides_positions():
    layer, x = scaled_rope(16, scaling={"type": "linear", "factor": 4.0}), drawn(1, 1, 3, 16)
    assert np.abs(np.array(layer(x, offset=8) - rope(x, offset=8, scale=0.25))).max() < 5e-6


def test_sinusoidal_positions_are_the_formula():
    found = np.array(sinusoidal(5, 6))
    for position in range(5):
        for i in range(3):
            angle = position / 10_000 ** (2 * i / 6)
            assert np.allclose(found[position, 2 * i : 2 * i + 2], [math.sin(angle), math.cos(angle)], atol=1e-6)


def test_what_cannot_be_is_said():
    with pytest.raises(UsageError, match="even number of dims"):
        rope(mx.zeros((1, 1, 1, 8)), dims=3)
    with pytest.raises(UsageError, match="4 frequencies"):
        rope(mx.zeros((1, 1, 1, 8)), freqs=mx.ones(3))
    with pytest.raises(UsageError, match="cannot be used"):
        scaled_rope(8, scaling={"type": "unheard of"})
    with pytest.raises(UsageError, match="in pairs"):
        sinusoidal(2, 3)
