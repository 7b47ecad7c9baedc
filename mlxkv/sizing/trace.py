"""A model's KV cache in exact bytes, read from its own forward pass without evaluating anything.

MLX arrays are lazy: mlx-lm's cache after a forward pass that nobody evaluates has every shape and dtype it would have
after a real one. So the layout is asked for, not derived: layers without KV, shared KV, latents, windows and recurrent
state come out of the model's code, whatever the architecture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlxkv.core.errors import ModelError, UsageError
from mlxkv.sizing.architecture import traced_module
from mlxkv.sizing.forward import AttentionShape, Record, dtype_name, forward
from mlxkv.sizing.weights import AFFINE_BITS, AFFINE_GROUP_SIZES, WeightSpec, build, count_params, weight_bytes

__all__ = [
    "AttentionCall", "AttentionShape", "CacheCost", "ModelTrace", "TracedArray", "TracedCache", "WeightCount",
    "WeightSpec", "build", "check_quantizable", "trace", "trace_caches",
]  # fmt: skip

BLOCK_TOKENS = 64
_LONG_TOKENS = (4096, 8192)
_TOKEN_AXIS = 2

Kind = Literal["full", "window", "state", "unknown"]


@dataclass(frozen=True)
class TracedArray:
    """One array of a layer's cache.

    Attributes:
        path: the attribute that holds it: `keys`, `values`, `keys.0` (quantised: weights, scales, biases), `cache.1`.
        shape: as allocated.
        dtype: `bfloat16`, `uint32`, ...
        token_axis: the axis with one row a token, or None for a state.
        rows: tokens held on that axis; the rest of it is slack or lies outside the window.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    token_axis: int | None
    rows: int
    allocated_bytes: int

    @property
    def token_shape(self) -> tuple[int, ...]:
        """The shape of one token, its axis kept: `(1, 2, 1, 64)`. A state has none: its whole shape."""
        if self.token_axis is None:
            return self.shape
        return (*self.shape[: self.token_axis], 1, *self.shape[self.token_axis + 1 :])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row; 0 for a state."""
        if self.token_axis is None or not self.shape[self.token_axis]:
            return 0
        return self.allocated_bytes // self.shape[self.token_axis]

    @property
    def logical_bytes(self) -> int:
        """Bytes of the rows in use."""
        return self.allocated_bytes if self.token_axis is None else self.bytes_per_token * self.rows


@dataclass(frozen=True)
class TracedCache:
    """The cache of one layer, or of one part of a layer that keeps several.

    Attributes:
        path: position in the model's cache list, `3`, and inside a `CacheList`, `3.1`.
        class_name: mlx-lm's class.
        kind: `full` keeps every token, `window` the last ones, `state` a fixed size; `unknown` is a class mlxkv has no
            rule for, measured as a whole.
        window_tokens: 0 unless the kind is `window`.
        step_tokens: rows are allocated in multiples of it.
    """

    path: str
    class_name: str
    kind: Kind
    window_tokens: int
    step_tokens: int
    arrays: tuple[TracedArray, ...]

    @property
    def logical_bytes(self) -> int:
        return sum(array.logical_bytes for array in self.arrays)

    @property
    def allocated_bytes(self) -> int:
        return sum(array.allocated_bytes for array in self.arrays)

    @property
    def bytes_per_token(self) -> int:
        return sum(array.bytes_per_token for array in self.arrays)


@dataclass(frozen=True)
class CacheCost:
    """What one cache costs at any length: `growth * tokens + window part * min(tokens, window) + fixed`.

    Growth is measured on two lengths. For a cache of kind `unknown` those are long ones, and the sum is exact from
    there on and an upper bound below.
    """

    path: str
    kind: Kind
    growth_bytes_per_token: int
    window_tokens: int
    window_bytes_per_token: int
    fixed_bytes: int
    step_tokens: int

    def kv_bytes(self, tokens: int) -> int:
        """Bytes in use after `tokens` tokens, one sequence, while decoding."""
        held = min(tokens, self.window_tokens)
        return self.growth_bytes_per_token * tokens + self.window_bytes_per_token * held + self.fixed_bytes

    def allocated_bytes(self, tokens: int, prefill_step_tokens: int) -> int:
        """Bytes mlx-lm holds after `tokens` tokens that came in chunks of `prefill_step_tokens` (1 while decoding).

        A window of w tokens holds w + chunk - 1 rows after a chunk, so that each token of it sees a whole window.
        """
        rows = _round_up(tokens, self.step_tokens)
        held = min(rows, _round_up(self.window_tokens + prefill_step_tokens - 1, self.step_tokens))
        return self.growth_bytes_per_token * rows + self.window_bytes_per_token * held + self.fixed_bytes


@dataclass(frozen=True)
class AttentionCall:
    """Attention with the same shapes in `layers` layers; `window_tokens` is the most keys a query sees, 0 for all."""

    shape: AttentionShape
    window_tokens: int
    layers: int


@dataclass(frozen=True)
class WeightCount:
    """Weights in memory and at work.

    Attributes:
        params, bytes: all of them.
        active_params: without the experts that one token does not use.
        embedding_params: tables that are looked up, not multiplied.
        head_params: the projection to the vocabulary, which prefill needs for the last token only; a tied table
            counts here as well as in `embedding_params`.
        decode_bytes: what one decoded token reads: active weights without the looked-up tables, with the head.
    """

    params: int
    bytes: int
    active_params: int
    embedding_params: int
    head_params: int
    decode_bytes: int


@dataclass(frozen=True)
class ModelTrace:
    """Everything a forward pass told about one sequence.

    Attributes:
        caches: each layer's arrays after one block of tokens.
        costs: what each of them costs at any length, in the same order.
        attention: the attention calls of one prefill step.
        weights: the module's weights.
    """

    caches: tuple[TracedCache, ...]
    costs: tuple[CacheCost, ...]
    attention: tuple[AttentionCall, ...]
    weights: WeightCount

    @property
    def growth_bytes_per_token(self) -> int:
        """What each further token adds for ever."""
        return sum(cost.growth_bytes_per_token for cost in self.costs)

    @property
    def window_tokens(self) -> int:
        """The longest window, or 0."""
        return max((cost.window_tokens for cost in self.costs), default=0)

    @property
    def window_bytes_per_token(self) -> int:
        """What each token adds as long as the windows are not full."""
        return sum(cost.window_bytes_per_token for cost in self.costs)

    @property
    def fixed_bytes(self) -> int:
        """Recurrent and convolution state, the same at every length."""
        return sum(cost.fixed_bytes for cost in self.costs)

    @property
    def first_block_bytes(self) -> int:
        """A sequence of one block, state included."""
        return self.kv_bytes(BLOCK_TOKENS)

    @property
    def steady_block_bytes(self) -> int:
        """What each further block adds once every window is full."""
        return self.growth_bytes_per_token * BLOCK_TOKENS

    @property
    def stored_block_bytes(self) -> int:
        """A block as the tiers store it: growing and windowed layers, no state."""
        return (self.growth_bytes_per_token + self.window_bytes_per_token) * BLOCK_TOKENS

    def kv_bytes(self, tokens: int) -> int:
        """Bytes in use after `tokens` tokens, one sequence, while decoding."""
        return sum(cost.kv_bytes(tokens) for cost in self.costs)

    def allocated_bytes(self, tokens: int, *, prefill_step_tokens: int = 1) -> int:
        """Bytes mlx-lm's caches hold after `tokens` tokens prefilled in steps; 1 is the state while decoding."""
        return sum(cost.allocated_bytes(tokens, prefill_step_tokens) for cost in self.costs)


@dataclass(frozen=True)
class _Family:
    """How to read one of mlx-lm's cache classes. `rows` and `window` take the cache; step 1 means no slack."""

    kind: Kind
    rows: Callable[[Any], int] = field(default=lambda cache: cache.offset)
    window: Callable[[Any], int] = field(default=lambda _: 0)
    step: Callable[[Any], int] = field(default=lambda cache: cache.step)


_FAMILIES = {
    "KVCache": _Family("full"),
    "QuantizedKVCache": _Family("full"),
    "ConcatenateKVCache": _Family("full", step=lambda _: 1),
    "RotatingKVCache": _Family(
        "window",
        rows=lambda cache: min(cache.offset, cache.max_size),
        window=lambda cache: cache.max_size,
        step=lambda _: 1,
    ),
    "ChunkedKVCache": _Family(
        "window",
        rows=lambda cache: min(cache.offset - cache.start_position, cache.chunk_size),
        window=lambda cache: cache.chunk_size,
    ),
    "ArraysCache": _Family("state", step=lambda _: 1),
}
_UNKNOWN = _Family("unknown", step=lambda _: 1)


def trace_caches(module: nn.Module, prompt_cache: Sequence[Any], tokens: int) -> tuple[TracedCache, ...]:
    """Run `module` on [1, tokens] zeros with `prompt_cache` and read what its caches then hold.

    Args:
        module: built here or loaded by mlx-lm; its weights are not evaluated.
        prompt_cache: fresh caches, mlx-lm's list; they are left full of unevaluated arrays, so drop them after.
        tokens: length of the forward pass.

    Raises `ModelError` when the forward pass fails.
    Cost: one forward pass in Python, 0.01 to 0.3 s; recurrent layers without a Metal kernel loop over the tokens.
    """
    forward(module, prompt_cache, Record(tokens))
    return _describe(prompt_cache)


def trace(
    module: nn.Module,
    *,
    tokens: tuple[int, int] = (BLOCK_TOKENS, 2 * BLOCK_TOKENS),
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> ModelTrace:
    """Measure a module on two lengths.

    Args:
        module: from `build`, or loaded by mlx-lm.
        tokens: the two lengths, ascending.
        kv_bits, kv_group_size: trace a quantised KV cache; attention and weights do not depend on it.

    Raises `UsageError` when mlx-lm cannot quantise this model's cache, and `ModelError` when the forward pass fails.
    Cost: two to six forward passes in Python, 0.03 to 1 s; nothing is evaluated.
    """
    record, caches = Record(tokens[0]), _new_caches(module)
    logits = forward(module, caches, record)
    first = _describe(caches)
    attention = _attention(module, record, first)
    weights = _count_weights(module, record, vocabulary=logits.shape[-1])
    if kv_bits is None:
        new = partial(_new_caches, module)
    else:
        check_quantizable(first, kv_bits, kv_group_size)
        new = partial(_new_quantized_caches, module, kv_bits, kv_group_size)
        first = _first_quantized(module, new(), tokens[0])
    second = trace_caches(module, new(), tokens[1])
    costs = [_cost(short, long, tokens) for short, long in zip(first, second, strict=True)]
    if any(cost.kind == "unknown" for cost in costs):
        far = [trace_caches(module, new(), count) for count in _LONG_TOKENS]
        costs = [
            _cost(short, long, _LONG_TOKENS) if cost.kind == "unknown" else cost
            for cost, short, long in zip(costs, *far, strict=True)
        ]
    return ModelTrace(first, tuple(costs), attention, weights)


def _new_caches(module: nn.Module) -> list[Any]:
    """What mlx-lm's `make_prompt_cache` makes for this module."""
    caches: list[Any] = vars(traced_module("cache"))["make_prompt_cache"](module)
    return caches


def _new_quantized_caches(module: nn.Module, bits: int, group_size: int) -> list[Any]:
    """Fresh caches, those that mlx-lm's `maybe_quantize_kv_cache` would convert already converted."""
    return [
        cache.to_quantized(group_size=group_size, bits=bits) if _family_name(cache) == "KVCache" else cache
        for cache in _new_caches(module)
    ]


def _leaves(caches: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each cache with its path, `CacheList`s opened."""
    for index, cache in enumerate(caches):
        path = f"{prefix}{index}"
        if _family_name(cache) == "CacheList":
            yield from _leaves(cache.caches, f"{path}.")
        elif cache is not None:
            yield path, cache


def _family_name(cache: object) -> str:
    """The name of the nearest class of mlx-lm that `cache` is, by name: the traced copies are classes of their own."""
    names = [base.__name__ for base in type(cache).__mro__]
    return next((name for name in names if name in _FAMILIES or name == "CacheList"), names[0])


def _describe(caches: Sequence[Any]) -> tuple[TracedCache, ...]:
    return tuple(_describe_leaf(path, cache) for path, cache in _leaves(caches))


def _describe_leaf(path: str, cache: Any) -> TracedCache:
    family = _FAMILIES.get(_family_name(cache), _UNKNOWN)
    by_token = family.kind in ("full", "window")
    arrays = tuple(
        TracedArray(
            path=name,
            shape=tuple(array.shape),
            dtype=dtype_name(array.dtype),
            token_axis=_TOKEN_AXIS if by_token else None,
            rows=family.rows(cache) if by_token else 0,
            allocated_bytes=array.nbytes,
        )
        for name, array in _arrays(vars(cache))
    )
    return TracedCache(path, type(cache).__name__, family.kind, family.window(cache), family.step(cache), arrays)


def _arrays(held: Any, prefix: str = "") -> Iterator[tuple[str, mx.array]]:
    """Every array in a cache's attributes, with its path."""
    if isinstance(held, mx.array):
        yield prefix.rstrip("."), held
    elif isinstance(held, dict):
        for name, value in held.items():
            yield from _arrays(value, f"{prefix}{name}.")
    elif isinstance(held, (list, tuple)):
        for index, value in enumerate(held):
            yield from _arrays(value, f"{prefix}{index}.")


def _cost(short: TracedCache, long: TracedCache, tokens: tuple[int, int]) -> CacheCost:
    """The rule through two measurements. A state that grew has no rule here and becomes `unknown`."""
    growth = -(-(long.logical_bytes - short.logical_bytes) // (tokens[1] - tokens[0]))
    kind = "unknown" if short.kind == "state" and growth else short.kind
    if kind == "window":
        return CacheCost(short.path, kind, 0, short.window_tokens, short.bytes_per_token, 0, short.step_tokens)
    fixed = max(0, long.logical_bytes - growth * tokens[1])
    return CacheCost(short.path, kind, growth, 0, 0, fixed, short.step_tokens)


def _attention(module: nn.Module, record: Record, traced: tuple[TracedCache, ...]) -> tuple[AttentionCall, ...]:
    """The recorded calls, equal ones counted. Where the model has windows, a second chunk behind a full one shows by
    the number of its keys which calls are windowed."""
    windows = [0] * len(record.attention)
    longest = max((cache.window_tokens for cache in traced), default=0)
    if longest:
        caches, past, chunk = _new_caches(module), Record(longest + 1), Record(record.tokens)
        forward(module, caches, past)
        forward(module, caches, chunk)
        every = past.tokens + chunk.tokens
        windows = [0 if keys == every else _window_of(caches, keys - chunk.tokens) for _, keys in chunk.attention]
    growing = [cache for cache in traced if cache.kind in ("full", "window")]
    shapes = [_with_dims(shape, growing[0]) if shape.mask == "scores" else shape for shape, _ in record.attention]
    calls = Counter(zip(shapes, windows, strict=True))
    return tuple(AttentionCall(shape, window, layers) for (shape, window), layers in calls.items())


def _with_dims(shape: AttentionShape, cache: TracedCache) -> AttentionShape:
    """Scores that a model wrote out itself tell no dims; its cache of keys and values does."""
    keys, values = cache.arrays[0], cache.arrays[-1]
    return replace(shape, kv_heads=keys.shape[1], key_dim=keys.shape[3], value_dim=values.shape[3])


def _window_of(caches: Sequence[Any], past_keys: int) -> int:
    """The cache window that keeps `past_keys` tokens before a chunk: a ring one less than it, a chunked cache all."""
    sizes = {
        _FAMILIES[name].window(cache) for _, cache in _leaves(caches) if (name := _family_name(cache)) in _FAMILIES
    }
    return min(size for size in sizes if size >= past_keys)


def _count_weights(module: nn.Module, record: Record, *, vocabulary: int) -> WeightCount:
    params, stored_bytes = count_params(module), weight_bytes(module)
    layers = sorted(module.named_modules(), key=lambda named: named[0].count("."))
    tables = [layer for _, layer in layers if isinstance(layer, (nn.Embedding, nn.QuantizedEmbedding))]
    linear = [layer for _, layer in layers if isinstance(layer, (nn.Linear, nn.QuantizedLinear))]
    tied = record.tied_tables
    heads = tied or [layer for layer in linear if layer["weight"].shape[0] == vocabulary][:1]
    return WeightCount(
        params=params,
        bytes=stored_bytes,
        active_params=params - record.idle_params,
        embedding_params=sum(map(count_params, tables)),
        head_params=sum(map(count_params, heads)),
        decode_bytes=stored_bytes - record.idle_bytes - sum(map(weight_bytes, tables)) + sum(map(weight_bytes, tied)),
    )


def check_quantizable(caches: tuple[TracedCache, ...], bits: int, group_size: int) -> None:
    """Raise `UsageError` unless mlx-lm quantises every growing cache of the model; states stay as they are."""
    if bits not in AFFINE_BITS or group_size not in AFFINE_GROUP_SIZES:
        raise UsageError(
            f"KV of {bits} bits in groups of {group_size} is none of MLX's; use 2, 3, 4, 5, 6 or 8 bits in groups of"
            " 32, 64 or 128."
        )
    growing = [cache for cache in caches if cache.kind != "state"]
    if not growing:
        raise UsageError(
            "this model keeps no keys and values to quantise, only a state of fixed size; leave KV bits out."
        )
    for cache in growing:
        if cache.class_name != "KVCache" or "." in cache.path:
            inside = " inside a CacheList" if "." in cache.path else ""
            raise UsageError(
                f"mlx-lm cannot quantise this model's KV: layer {cache.path} keeps a {cache.class_name}{inside};"
                " leave KV bits out."
            )
        for array in cache.arrays:
            if array.shape[-1] % group_size:
                raise UsageError(
                    f"{array.path} of layer {cache.path} have {array.shape[-1]} numbers a head, which groups of"
                    f" {group_size} do not divide; use a smaller KV group or leave KV bits out."
                )


def _first_quantized(module: nn.Module, caches: list[Any], tokens: int) -> tuple[TracedCache, ...]:
    """Trace quantised caches. The model ran with plain ones, so a failure now is the quantised cache's."""
    try:
        return trace_caches(module, caches, tokens)
    except ModelError as error:
        raise UsageError(
            f"mlx-lm cannot run this model with quantised KV ({error.__cause__}); leave KV bits out."
        ) from error


def _round_up(tokens: int, step_tokens: int) -> int:
    return -(-tokens // step_tokens) * step_tokens
