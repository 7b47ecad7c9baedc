"""Which query may see which key: True in a boolean mask, added to the score by any other dtype.

Queries are the last L of S tokens unless said otherwise: query i stands at position S - L + i.
"""

from __future__ import annotations

from typing import TypeAlias

import mlx.core as mx

from mlxkv.core.errors import UsageError

Mask: TypeAlias = mx.array | str | None
"""None, the word "causal", or an array that broadcasts to [B, Hq, L, S]."""


def causal_mask(queries: int, keys: int) -> mx.array:
    """Boolean [L, S]: each query sees the keys up to its own position.

    Raises:
        UsageError: there are more queries than keys, so that the first have no position.

    >>> causal_mask(2, 3).tolist()
    [[True, True, False], [True, True, True]]
    """
    if queries > keys:
        raise UsageError(f"{queries} queries cannot be the last of {keys} tokens; pass a mask of your own.")
    return mx.arange(keys - queries, keys)[:, None] >= mx.arange(keys)


def window_mask(queries: int, keys: int, window_tokens: int) -> mx.array:
    """Boolean [L, S]: causal, and each query sees `window_tokens` keys at most, its own among them.

    Raises:
        UsageError: as `causal_mask`, or a window below 1.

    >>> window_mask(2, 3, 2).tolist()
    [[True, True, False], [False, True, True]]
    """
    if window_tokens < 1:
        raise UsageError(f"a window of {window_tokens} tokens hides every key; use 1 or more.")
    positions = mx.arange(keys - queries, keys)[:, None]
    return causal_mask(queries, keys) & (positions < mx.arange(keys) + window_tokens)


def length_mask(lengths: mx.array, keys: int) -> mx.array:
    """Boolean [B, 1, 1, S]: of row b the first lengths[b] keys.

    >>> length_mask(mx.array([0, 2]), 2)[:, 0, 0].tolist()
    [[False, False], [True, True]]
    """
    return (mx.arange(keys) < lengths[:, None])[:, None, None]


def apply_mask(scores: mx.array, mask: Mask) -> mx.array:
    """Scores [B, Hq, L, S] with those of hidden keys at -inf.

    Raises:
        UsageError: a word other than "causal", or an array that does not broadcast to the scores.

    Cost: one pass over the scores.
    """
    if mask is None:
        return scores
    if isinstance(mask, str) and mask != "causal":
        raise UsageError(f'{mask!r} is no mask; use "causal", an array or None.')
    array = causal_mask(*scores.shape[-2:]) if isinstance(mask, str) else mask
    if not _broadcasts(array.shape, scores.shape):
        raise UsageError(f"a mask of shape {array.shape} does not fit scores of shape {scores.shape}.")
    if array.dtype == mx.bool_:
        return mx.where(array, scores, mx.array(-mx.inf, scores.dtype))
    return scores + array.astype(scores.dtype)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(a in (1, b) for a, b in pairs)
