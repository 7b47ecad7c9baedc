"""The device's numbers: products as a model makes them, against numpy in float64 over the same rounded inputs.

An error is the largest difference over the root mean square of the exact result. The bounds are three to ten times what
MLX's CPU shows, and below what a wrong kernel does, which is 1 and more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from mlxkv.prove.check import Check, Figure, finite

Numbers = np.ndarray[Any, Any]
DTYPES: tuple[tuple[str, mx.Dtype], ...] = (
    ("float32", mx.float32),
    ("float16", mx.float16),
    ("bfloat16", mx.bfloat16),
)
BOUNDS = {"float32": 5e-5, "float16": 1e-2, "bfloat16": 6e-2}
ATTENTION_BOUNDS = {"float32": 5e-5, "float16": 2e-2, "bfloat16": 1.5e-1}
QUANTISED_BOUNDS = {"float32": 5e-5, "float16": 6e-2, "bfloat16": 5e-1}  # MLX's CPU adds up in the dtype itself
REDUCED_FLOAT32 = 1e-2  # what matrix units that round float32 to 10 bits (TF32) stay below

_SHAPES = ((1, 576, 512), (8, 512, 64), (65, 320, 96), (130, 64, 97))  # rows, inner, columns: a step, odd sizes
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 64
_LENGTHS = ((1, 130), (33, 97), (64, 64))  # queries, keys
_BITS, _GROUP = (4, 8), 64


def check_products() -> Check:
    """Matrix products, plain and with a transposed right side, in each dtype."""
    return _checked("products", _products, BOUNDS, f"{len(_SHAPES)} shapes")


def check_quantised() -> Check:
    """Products with 4- and 8-bit weights, against the same weights unpacked by numpy."""
    return _checked("quantised products", _quantised, QUANTISED_BOUNDS, "4 and 8 bits")


def check_attention() -> Check:
    """Fused attention, causal and without a mask."""
    return _checked("attention", _attention, ATTENTION_BOUNDS, f"{len(_LENGTHS)} lengths")


def _checked(
    name: str,
    errors: Callable[[mx.Dtype, np.random.Generator], Iterator[float]],
    bounds: dict[str, float],
    tried: str,
) -> Check:
    found = {
        dtype_name: max(errors(dtype, np.random.default_rng(index))) for index, (dtype_name, dtype) in enumerate(DTYPES)
    }
    wrong = [dtype for dtype, error in found.items() if not error <= bounds[dtype]]
    said = ", ".join(f"{dtype} {error:.0e}" for dtype, error in found.items())
    figures: dict[str, Figure] = {f"{dtype}_error": finite(error) for dtype, error in found.items()}
    if wrong == ["float32"] and found["float32"] <= REDUCED_FLOAT32:
        return Check(name, "note", f"float32 is rounded on the way (TF32): {said}", figures,
                     "Where float32 has to be exact, set MLX_ENABLE_TF32=0.")  # fmt: skip
    if wrong:
        return Check(name, "fail", f"wrong in {', '.join(wrong)}: {said}", figures,
                     "Nothing computed here can be trusted: reinstall mlx, on Linux try MLXKV_BLAS=none, and report"
                     " it.")  # fmt: skip
    return Check(name, "ok", f"{tried}, error against float64: {said}", figures)


def _products(dtype: mx.Dtype, random: np.random.Generator) -> Iterator[float]:
    for rows, inner, columns in _SHAPES:
        left, exact_left = _drawn(random, (rows, inner), dtype)
        right, exact_right = _drawn(random, (inner, columns), dtype)
        turned, exact_turned = _drawn(random, (columns, inner), dtype)
        yield error_of(mx.matmul(left, right), exact_left @ exact_right)
        yield error_of(mx.matmul(left, turned.T), exact_left @ exact_turned.T)


def _quantised(dtype: mx.Dtype, random: np.random.Generator) -> Iterator[float]:
    for bits in _BITS:
        weights, _ = _drawn(random, (192, 256), dtype)
        packed, scales, biases = mx.quantize(weights, group_size=_GROUP, bits=bits)
        exact = _unpacked(packed, scales, biases, bits)
        for rows in (1, 33):
            left, exact_left = _drawn(random, (rows, 256), dtype)
            found = mx.quantized_matmul(left, packed, scales, biases, transpose=True, group_size=_GROUP, bits=bits)
            yield error_of(found, exact_left @ exact.T)


def _attention(dtype: mx.Dtype, random: np.random.Generator) -> Iterator[float]:
    scale = _HEAD_DIM**-0.5
    for queries, keys in _LENGTHS:
        q, exact_q = _drawn(random, (1, _HEADS, queries, _HEAD_DIM), dtype)
        k, exact_k = _drawn(random, (1, _KV_HEADS, keys, _HEAD_DIM), dtype)
        v, exact_v = _drawn(random, (1, _KV_HEADS, keys, _HEAD_DIM), dtype)
        for mask in (None, "causal"):
            found = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
            yield error_of(found, _exact_attention(exact_q, exact_k, exact_v, scale, causal=mask is not None))


def error_of(found: mx.array, exact: Numbers) -> float:
    """The largest difference over the root mean square of what is exact; infinity for anything not finite."""
    difference = np.abs(as_float64(found) - exact)
    error = float(difference.max() / math.sqrt(float(np.mean(exact**2))))
    return error if math.isfinite(error) else math.inf


def as_float64(array: mx.array) -> Numbers:
    """The values of an array of any float dtype."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _drawn(random: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, Numbers]:
    """Normal numbers as MLX holds them, and exactly those in float64."""
    array = mx.array(random.standard_normal(shape).astype(np.float32)).astype(dtype)
    return array, as_float64(array)


def _unpacked(packed: mx.array, scales: mx.array, biases: mx.array, bits: int) -> Numbers:
    """Weights [rows, inner] from MLX's affine format: `32 / bits` numbers a word, the lowest bits first."""
    words = np.array(packed)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    levels = ((words[..., None] >> shifts) & (2**bits - 1)).reshape(words.shape[0], -1).astype(np.float64)
    step, start = (np.repeat(as_float64(array), _GROUP, axis=1) for array in (scales, biases))
    weights: Numbers = levels * step + start
    return weights


def _exact_attention(q: Numbers, k: Numbers, v: Numbers, scale: float, *, causal: bool) -> Numbers:
    """Attention [1, heads, queries, dim] by its formula; the last query is at the last key."""
    shared = q.shape[1] // k.shape[1]
    k, v = (np.repeat(array, shared, axis=1) for array in (k, v))
    scores = scale * q @ k.swapaxes(-1, -2)
    if causal:
        queries, keys = scores.shape[-2:]
        hidden = np.arange(keys)[None] > np.arange(queries)[:, None] + keys - queries
        scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended: Numbers = weights / weights.sum(axis=-1, keepdims=True) @ v
    return attended
