"""The closed formula of the textbooks for KV bytes a token, and why it errs where it does.

    layers x KV heads x head_dim x 2 x bytes

It is right for plain full attention and teaches what matters: KV is linear in tokens, layers and *KV* heads, not in
parameters. It is never used for an answer: layers without KV, windows, shared KV and latents are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxkv.core.units import MIB
from mlxkv.sizing.config import text_level
from mlxkv.sizing.trace import BLOCK_TOKENS, CacheCost, ModelTrace


def formula_bytes_per_token(config: Mapping[str, Any], *, value_bytes: int = 2) -> int | None:
    """KV bytes a token by the closed formula; None where the config lacks a number it needs.

    A null or absent KV head count is the number of attention heads, a null or absent head_dim is hidden / heads.

    >>> config = {"model_type": "qwen2", "num_hidden_layers": 24, "num_attention_heads": 14, "hidden_size": 896}
    >>> formula_bytes_per_token(config | {"num_key_value_heads": 2}) / 1024
    12.0
    """
    parts = _parts(config)
    if parts is None:
        return None
    layers, kv_heads, head_dim = parts
    return layers * kv_heads * head_dim * 2 * value_bytes


def formula_kv_bytes(config: Mapping[str, Any], tokens: int, *, value_bytes: int = 2) -> int | None:
    """KV bytes of `tokens` tokens by the closed formula: the whole of it, for teaching."""
    per_token = formula_bytes_per_token(config, value_bytes=value_bytes)
    return None if per_token is None else per_token * tokens


def why_formula_differs(config: Mapping[str, Any], trace: ModelTrace, *, value_bytes: int = 2) -> str | None:
    """One sentence beside the traced figure, or None where formula and trace agree."""
    stated = formula_bytes_per_token(config, value_bytes=value_bytes)
    parts = _parts(config)
    if stated is None or parts is None:
        return None
    if stated == trace.growth_bytes_per_token and not trace.window_bytes_per_token:
        return None
    layers, kv_heads, head_dim = parts
    per_layer = kv_heads * head_dim * 2 * value_bytes
    reasons = "; ".join(_reasons(trace, layers, per_layer, kv_heads, head_dim))
    return f"oMLX's line would say {stated * BLOCK_TOKENS / MIB:.2f} MB for this model: {reasons}."


def _reasons(trace: ModelTrace, layers: int, per_layer: int, kv_heads: int, head_dim: int) -> list[str]:
    holding = [cost for cost in trace.costs if cost.growth_bytes_per_token or cost.window_bytes_per_token]
    windowed = [cost for cost in holding if cost.window_bytes_per_token]
    places = {cost.path.split(".")[0] for cost in holding}
    reasons = []
    if len(places) < layers:
        reasons.append(f"it counts all {layers} layers, {len(places)} hold KV")
    if windowed:
        reasons.append(f"{len(windowed)} layers keep only the last {trace.window_tokens:,} tokens")
    if any(cache.class_name == "QuantizedKVCache" for cache in trace.caches):
        reasons.append("it knows nothing of quantised KV")
    elif odd := sorted({_per_token(cost) for cost in holding} - {per_layer}):
        sizes = " or ".join(f"{size:,} B" for size in odd)
        reasons.append(f"it takes {per_layer:,} B a layer ({kv_heads} heads of {head_dim}), the cache holds {sizes}")
    return reasons or ["this model's cache has another shape"]


def _per_token(cost: CacheCost) -> int:
    return cost.growth_bytes_per_token + cost.window_bytes_per_token


def _parts(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Layers, KV heads and head_dim, or None where one is not a single number."""
    level = text_level(config)
    layers = _first(level, "num_hidden_layers", "n_layer")
    heads = _first(level, "num_attention_heads", "n_head")
    hidden = _first(level, "hidden_size", "n_embd")
    kv_heads = _first(level, "num_key_value_heads") or heads
    head_dim = _first(level, "head_dim") or (hidden // heads if hidden and heads else None)
    return (layers, kv_heads, head_dim) if layers and kv_heads and head_dim else None


def _first(level: Mapping[str, Any], *keys: str) -> int | None:
    return next((level[key] for key in keys if isinstance(level.get(key), int)), None)
