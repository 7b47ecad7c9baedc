"""Scaled dot-product attention written out, one step a function: the oracle for the rest, and what the labs run.

    scores   s = scale * q k^T        [B, Hq, L, S]
    mask     s = -inf where hidden
    softmax  w = e^(s - max s) / sum  each row sums to 1
    output   o = w v                  [B, Hq, L, Dv]

Computed in float32, or in float64 where the inputs are. Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1;
grouped heads: Ainslie et al. 2023, arXiv:2305.13245; sinks: Xiao et al. 2023, arXiv:2309.17453, as learned logits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

from mlxkv.attention.masks import Mask, apply_mask
from mlxkv.attention.shapes import check_sinks, default_scale, head_groups


class Steps(NamedTuple):
    """Every intermediate result: `scores`, `masked` and `weights` [B, Hq, L, S], `output` [B, Hq, L, Dv]."""

    scores: mx.array
    masked: mx.array
    weights: mx.array
    output: mx.array


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float | None = None,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of every query over all keys it may see.

    Args:
        queries: [B, Hq, L, D]
        keys: [B, Hkv, S, D], Hq a multiple of Hkv: query heads h * Hq / Hkv and on share KV head h.
        values: [B, Hkv, S, Dv]
        scale: of the scores; 1 / sqrt(D) when None.
        mask: None, "causal" (the queries are the last of the keys), boolean (True is seen) or additive; an array
            broadcasts to [B, Hq, L, S].
        sinks: [Hq], a score a head that takes its share of the softmax and adds nothing.

    Returns:
        [B, Hq, L, Dv] in the dtype of the queries. A query that sees no key gets zeros.

    Raises:
        UsageError: shapes that do not fit.

    Cost: 2 B Hq L S (D + Dv) operations; holds the [B, Hq, L, S] scores.
    """
    return attention_steps(queries, keys, values, scale=scale, mask=mask, sinks=sinks).output.astype(queries.dtype)


def attention_steps(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float | None = None,
    mask: Mask = None,
    sinks: mx.array | None = None,
) -> Steps:
    """As `attention`, with every intermediate result, all of them float32 (float64 for float64 inputs)."""
    head_groups(queries, keys, values)
    scores = attention_scores(queries, keys, scale=scale)
    masked = apply_mask(scores, mask)
    weights = softmax(masked, sinks)
    return Steps(scores, masked, weights, weighted_sum(weights, values))


def attention_scores(queries: mx.array, keys: mx.array, *, scale: float | None = None) -> mx.array:
    """scale * q k^T for queries [B, Hq, L, D] and keys [B, Hkv, S, D]: [B, Hq, L, S].

    Raises:
        UsageError: as `attention`.
    """
    groups = head_groups(queries, keys, keys)
    batch, heads, length, _ = queries.shape
    exact = _exact(queries)
    grouped = queries.astype(exact).reshape(batch, heads // groups, groups * length, -1)
    scores = grouped @ keys.astype(exact).swapaxes(-1, -2)
    return scores.reshape(batch, heads, length, -1) * mx.array(default_scale(queries, scale), exact)


def softmax(scores: mx.array, sinks: mx.array | None = None) -> mx.array:
    """Weights of scores [B, Hq, L, S]: each row sums to 1, or to less where a sink takes its part.

    A row of nothing but -inf gets zeros. The largest score is taken off first, so that none overflows.
    """
    if scores.shape[-1] == 0:
        return scores
    peak = mx.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        check_sinks(sinks, scores.shape[1])
        sinks = sinks.astype(scores.dtype)[None, :, None, None]
        peak = mx.maximum(peak, sinks)
    peak = mx.where(peak == -mx.inf, mx.zeros_like(peak), peak)
    powers = exp(scores - peak)
    total = mx.sum(powers, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + exp(sinks - peak)
    return powers / mx.where(total == 0, mx.ones_like(total), total)


def exp(x: mx.array) -> mx.array:
    """e^x. MLX's own has the precision of float32 for float64 too; its power has not."""
    return mx.power(mx.array(math.e, mx.float64), x) if x.dtype == mx.float64 else mx.exp(x)


def weighted_sum(weights: mx.array, values: mx.array) -> mx.array:
    """w v for weights [B, Hq, L, S] and values [B, Hkv, S, Dv]: [B, Hq, L, Dv]."""
    batch, heads, length, keys = weights.shape
    kv_heads = values.shape[1]
    grouped = weights.reshape(batch, kv_heads, heads // kv_heads * length, keys)
    return (grouped @ values.astype(weights.dtype)).reshape(batch, heads, length, -1)


def _exact(array: mx.array) -> mx.Dtype:
    return mx.float64 if array.dtype == mx.float64 else mx.float32
