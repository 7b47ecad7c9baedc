"""The shapes that every function of this package takes, checked in one place."""

from __future__ import annotations

import mlx.core as mx

from mlxkv.core.errors import UsageError


def head_groups(queries: mx.array, keys: mx.array, values: mx.array) -> int:
    """How many query heads share a KV head.

    Args:
        queries: [B, Hq, L, D]
        keys: [B, Hkv, S, D]
        values: [B, Hkv, S, Dv]

    Raises:
        UsageError: the shapes do not fit each other; names them.
    """
    shapes = f"queries {queries.shape}, keys {keys.shape}, values {values.shape}"
    if not queries.ndim == keys.ndim == values.ndim == 4:
        raise UsageError(f"attention takes arrays [batch, heads, tokens, dim], not {shapes}; reshape them.")
    if keys.shape[:3] != values.shape[:3] or queries.shape[0] != keys.shape[0] or queries.shape[3] != keys.shape[3]:
        raise UsageError(f"these do not belong together: {shapes}; batch, tokens and key dim must agree.")
    groups: int
    groups, rest = divmod(queries.shape[1], keys.shape[1])
    if rest or not groups:
        raise UsageError(
            f"{queries.shape[1]} query heads cannot share {keys.shape[1]} KV heads evenly; the first must be a"
            " multiple of the second."
        )
    return groups


def check_sinks(sinks: mx.array, heads: int) -> None:
    """Raise `UsageError` unless there is one sink a query head."""
    if sinks.shape != (heads,):
        raise UsageError(f"sinks have the shape {sinks.shape}; one a query head is wanted, ({heads},).")


def default_scale(queries: mx.array, scale: float | None) -> float:
    """`scale`, or 1 / sqrt(D) where it is None."""
    return float(queries.shape[-1]) ** -0.5 if scale is None else scale
