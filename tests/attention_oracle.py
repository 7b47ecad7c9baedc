"""Attention in NumPy float64, written without a look at the package, and hypothesis strategies for its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

EPS = {mx.float32: 2e-6, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
"""Rounding that a result may show, relative to what was summed: one unit of a half, twice."""
WORK = 15_000_000
"""Products a drawn case may need; MLX's own BLAS does a thousand million a second."""


@dataclass(frozen=True)
class Case:
    """Shapes and a seed. `spread` multiplies the queries: large scores make the softmax nearly a step."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    keys: int
    dim: int
    value_dim: int
    dtype: mx.Dtype
    mask: str | None
    sinks: bool
    spread: float
    seed: int

    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        rng = np.random.default_rng(self.seed)
        shapes = (
            (self.batch, self.heads, self.length, self.dim),
            (self.batch, self.kv_heads, self.keys, self.dim),
            (self.batch, self.kv_heads, self.keys, self.value_dim),
        )
        q, k, v = (rng.standard_normal(shape) for shape in shapes)
        return tuple(mx.array(a.astype(np.float32)).astype(self.dtype) for a in (self.spread * q, k, v))

    def mask_array(self) -> mx.array | None:
        """As an array, boolean or additive; some rows may be hidden altogether."""
        rng = np.random.default_rng(self.seed + 1)
        if self.mask is None:
            return None
        if self.mask == "causal":
            return mx.array(np.tril(np.ones((self.length, self.keys), bool), self.keys - self.length))
        if self.mask == "boolean":
            return mx.array(rng.random((self.batch, 1, self.length, self.keys)) < 0.7)
        if self.mask == "hidden":
            seen = rng.random((self.batch, 1, self.length, self.keys)) < 0.5
            seen[:, :, 0] = False
            return mx.array(seen)
        return mx.array(rng.standard_normal((self.heads, self.length, self.keys)).astype(np.float32))

    def sink_array(self) -> mx.array | None:
        rng = np.random.default_rng(self.seed + 2)
        return mx.array(rng.standard_normal(self.heads).astype(np.float32)) if self.sinks else None


@st.composite
def cases(draw, dtypes=(mx.float32, mx.float16, mx.bfloat16), masks=(None, "causal", "boolean", "hidden", "additive")):
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 8))
    length, keys = draw(st.integers(1, 70)), draw(st.integers(0, 700))
    dim = draw(st.sampled_from([16, 64, 80, 128, 256]))
    value_dim = draw(st.sampled_from([dim, dim, dim, 16, 128]))
    batch = draw(st.integers(1, 9))
    while batch * heads * length * max(keys, 1) * (dim + value_dim) > WORK:  # stay fast: less of what is largest
        if length > 4:
            length //= 2
        elif batch > 1:
            batch //= 2
        else:
            keys //= 2
    mask = draw(st.sampled_from(masks))
    return Case(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        length=length,
        keys=keys,
        dim=dim,
        value_dim=value_dim,
        dtype=draw(st.sampled_from(dtypes)),
        mask="boolean" if mask == "causal" and length > keys else mask,
        sinks=draw(st.booleans()),
        spread=draw(st.sampled_from([1.0, 1.0, 3.0])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def numpy_attention(queries, keys, values, mask=None, sinks=None, scale=None) -> np.ndarray:
    """Row by row in float64; zeros where nothing is seen."""
    q, k, v = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (queries, keys, values))
    repeats = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeats, axis=1), np.repeat(v, repeats, axis=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = np.einsum("bhld,bhsd->bhls", q, k) * scale
    if mask is not None:
        m = np.array(mask)
        scores = np.where(m, scores, -np.inf) if m.dtype == bool else scores + m
    if sinks is not None:
        column = np.broadcast_to(np.array(sinks).astype(np.float64)[None, :, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, column], axis=-1)
        v = np.concatenate([v, np.zeros((*v.shape[:2], 1, v.shape[3]))], axis=2)
    if scores.shape[-1] == 0:
        return np.zeros((*q.shape[:3], v.shape[-1]))
    top = scores.max(axis=-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = powers.sum(axis=-1, keepdims=True)
    return np.einsum("bhls,bhsd->bhld", powers / np.where(total == 0, 1, total), v)


def assert_is_attention(found, queries, keys, values, mask=None, sinks=None, *, spread: float = 1.0) -> None:
    """`found` is float64 attention within its dtype's rounding of what was summed, the sum of weight x |value|.

    Args:
        spread: scores of so many times the usual size carry an absolute error that much larger into the exponents.
    """
    got = np.array(found.astype(mx.float32)).astype(np.float64)
    expected = numpy_attention(queries, keys, values, mask, sinks)
    assert got.shape == expected.shape
    assert np.isfinite(got).all()
    size = numpy_attention(queries, keys, mx.abs(values), mask, sinks).max(initial=1e-3)
    error = np.abs(got - expected).max(initial=0) / size
    assert error <= EPS[found.dtype] * spread, f"{error:.3g} for {found.dtype}"
