"""Positions: rotary ones turn queries and keys, sinusoidal ones are added to the embeddings.

A rotary pair (a, b) at position p becomes (a cos pt - b sin pt, a sin pt + b cos pt), t falling from pair to pair; so
the product of a query and a key depends on the distance between them only. Source: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxkv.core.errors import UsageError
from mlxkv.core.platform import keep_open_files_limit

with keep_open_files_limit():
    from mlx_lm.models.rope_utils import initialize_rope


def rope(
    x: mx.array,
    *,
    dims: int | None = None,
    traditional: bool = False,
    base: float = 10_000.0,
    scale: float = 1.0,
    offset: int | mx.array = 0,
    freqs: mx.array | None = None,
) -> mx.array:
    """Turn the first `dims` numbers of every head by its token's position.

    Args:
        x: [B, H, L, D]
        dims: even and at most D; all of D when None. The rest stays as it is.
        traditional: pairs are neighbours (0, 1), (2, 3), ...; otherwise halves (0, dims/2), (1, dims/2 + 1), ...
        base: of the angles; pair i turns by position * scale / base^(2i / dims).
        scale: of the positions; 1 / factor for linear scaling.
        offset: position of the first token, one for all or [B].
        freqs: [dims / 2] wavelengths over 2 pi in place of the powers of `base`, as `mx.fast.rope` takes them.

    Returns:
        As x, in its dtype; computed in float32.

    Raises:
        UsageError: odd or too many dims, or freqs of another size.

    Cost: one pass over x.
    """
    dims = x.shape[-1] if dims is None else dims
    if dims % 2 or not 0 < dims <= x.shape[-1]:
        raise UsageError(f"rope turns an even number of dims, at most {x.shape[-1]}, not {dims}.")
    if freqs is None:
        freqs = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    if freqs.shape != (dims // 2,):
        raise UsageError(f"{dims} dims have {dims // 2} frequencies, not {freqs.shape}.")
    first = mx.array(offset).reshape(-1, 1)
    positions = (first + mx.arange(x.shape[2])).astype(mx.float32) * scale
    angles = (positions[..., None] / freqs)[:, None]
    turned = x[..., :dims].astype(mx.float32)
    if traditional:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., : dims // 2], turned[..., dims // 2 :]
    cosine, sine = mx.cos(angles), mx.sin(angles)
    pair = (a * cosine - b * sine, a * sine + b * cosine)
    turned = mx.stack(pair, axis=-1).reshape(*a.shape[:-1], dims) if traditional else mx.concatenate(pair, axis=-1)
    return mx.concatenate([turned.astype(x.dtype), x[..., dims:]], axis=-1)


def scaled_rope(
    dims: int,
    *,
    base: float = 10_000.0,
    traditional: bool = False,
    scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int | None = None,
) -> nn.Module:
    """mlx-lm's rotary layer for a config's `rope_scaling` (linear, llama3, yarn, longrope, dynamic, ...).

    Returns:
        A layer called with (x, offset=0), x [B, H, L, D].

    Raises:
        UsageError: a rope_scaling that mlx-lm does not know or that lacks a key.
    """
    wanted = None if scaling is None else dict(scaling)
    try:
        return initialize_rope(dims, base, traditional, wanted, max_position_embeddings)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"rope_scaling {wanted} cannot be used: {error}.") from error


def sinusoidal(tokens: int, dims: int, *, base: float = 10_000.0) -> mx.array:
    """Positions to add to embeddings: [tokens, dims], sines in even columns and cosines in odd ones.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.

    >>> sinusoidal(1, 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """
    if dims % 2:
        raise UsageError(f"sinusoidal positions come in pairs; {dims} dims are odd.")
    angles = mx.arange(tokens)[:, None] / base ** (mx.arange(0, dims, 2) / dims)
    return mx.stack([mx.sin(angles), mx.cos(angles)], axis=-1).reshape(tokens, dims)
