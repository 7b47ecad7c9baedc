"""Every tensor's shape through a model, and what attention costs: read from an unevaluated forward pass.

prefill  projections and MLP  2 x parameters x n            linear
         Q K^T and A V        2 x heads x 2 x dim x n x n   quadratic
decode   one row of it        2 x parameters + 2 x heads x 2 x dim x n, and a read of the weights and the KV cache
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxkv.core.errors import ModelError, UsageError
from mlxkv.sizing.architecture import replaced, traced_module
from mlxkv.sizing.forward import Record, forward
from mlxkv.sizing.trace import BLOCK_TOKENS, ModelTrace, trace
from mlxkv.sizing.weights import build

CONTEXTS = tuple(2**power for power in range(10, 18))
"""1K to 128K."""
_TRACED = (64, 128)


@dataclass(frozen=True)
class Tensor:
    """What one step of the model gives.

    Attributes:
        path: the module's path in the model, empty for the model itself; `scores` and `heads` are attention's.
        shape: for the tokens asked for.
        grows: how its size grows with n tokens: `1`, `n` or `n x n`.
    """

    path: str
    made_by: str
    shape: tuple[int, ...]
    grows: str


@dataclass(frozen=True)
class Stage:
    """Tensors in order. Of `layers` alike only the first is listed; 0 for what is in no layer."""

    title: str
    layers: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Bill:
    """Operations and bytes at a context of `tokens`, a multiplication and an addition counted as two.

    Attributes:
        linear_flops: prefill of the whole: projections, MLP; the head for the last token.
        attention_flops: Q K^T and A V of all pairs of tokens, the masked half too, as MLX computes them.
        decode_linear_flops, decode_attention_flops: of one token more.
        kv_bytes: what the cache holds, and what that token reads of it.
        decode_weight_bytes: weights that token reads.
    """

    tokens: int
    linear_flops: int
    attention_flops: int
    decode_linear_flops: int
    decode_attention_flops: int
    kv_bytes: int
    decode_weight_bytes: int


@dataclass(frozen=True)
class Shapes:
    """Everything `mlxkv explain shapes` prints. `formula` is the KV cache's, with this model's numbers."""

    tokens: int
    stages: tuple[Stage, ...]
    bills: tuple[Bill, ...]
    formula: tuple[str, ...]
    bytes_per_token: int

    @property
    def doubling(self) -> tuple[float, float]:
        """How much linear and attention operations grow when the longest context but one doubles."""
        before, after = self.bills[-2:]
        return (
            after.linear_flops / before.linear_flops,
            after.attention_flops / before.attention_flops if before.attention_flops else 0.0,
        )


def explain_shapes(config: Mapping[str, Any], tokens: int) -> Shapes:
    """Trace the model of a config on 64 and on 128 tokens, and say what it is on `tokens`.

    Raises:
        UsageError: tokens below 1.
        ModelError: the config cannot be used; names the key. Or the model's steps depend on the number of tokens.

    Cost: four to eight unevaluated forward passes, 0.1 to 1 s; no weights.
    """
    if tokens < 1:
        raise UsageError(f"{tokens} tokens have no shapes; use 1 or more.")
    module = build(config)
    traced = trace(module)
    short, long = (_walk(module, count) for count in _TRACED)
    listed = short.tensors, long.tensors
    if len(short.tensors) != len(long.tensors):  # a layer takes its tokens one by one: its steps are listed once
        listed = list(dict.fromkeys(short.tensors)), list(dict.fromkeys(long.tensors))
    if [tensor.path for tensor in listed[0]] != [tensor.path for tensor in listed[1]]:
        raise ModelError("the model takes other steps for 128 tokens than for 64, so they cannot be listed for others.")
    tensors = [_at(tokens, a, b) for a, b in zip(*listed, strict=True)]
    head = 0 if short.tied_tables else traced.weights.head_params
    linear = traced.weights.active_params - traced.weights.embedding_params - head
    bills = tuple(_bill(traced, linear, _pair_dims(traced, config), count) for count in CONTEXTS)
    return Shapes(tokens, tuple(_stages(tensors)), bills, tuple(_formula(traced)), traced.growth_bytes_per_token)


class _Walk(Record):
    """Notes every module's output as it is computed, and the scores of every attention call."""

    def __init__(self, module: nn.Module, tokens: int) -> None:
        super().__init__(tokens)
        self.tensors: list[Tensor] = []
        self._paths = {id(part): path for path, part in module.named_modules()}
        self._inside: list[str] = []

    def noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A class's `__call__` that notes what it gives."""

        def noting(part: nn.Module, *arguments: Any, **others: Any) -> Any:
            self._inside.append(self._path(part))
            output = call(part, *arguments, **others)
            path = self._inside.pop()
            if isinstance(output, mx.array):
                self.tensors.append(Tensor(path, type(part).__name__, tuple(output.shape), ""))
            return output

        return noting

    def _path(self, part: nn.Module) -> str:
        """Its path; below the module that called it where several layers share it."""
        path, caller = self._paths.get(id(part), ""), self._inside[-1] if self._inside else ""
        return path if path.startswith(caller) else f"{caller}.{path.rpartition('.')[2]}"

    def note_attention(self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> None:
        super().note_attention(queries, keys, values, mask)
        batch, heads, length, _ = queries.shape
        self._note("scores", "Q K^T", (batch, heads, length, keys.shape[2]))
        self._note("heads", "weights V", (batch, heads, length, values.shape[3]))

    def note_softmax(self, scores: mx.array) -> None:
        before = len(self.attention)
        super().note_softmax(scores)
        if len(self.attention) > before:
            self._note("scores", "Q K^T", tuple(scores.shape))

    def _note(self, name: str, made_by: str, shape: tuple[int, ...]) -> None:
        self.tensors.append(Tensor(f"{self._inside[-1]}.{name}", made_by, shape, ""))


def _walk(module: nn.Module, tokens: int) -> _Walk:
    """Every tensor in the order it is computed."""
    walk = _Walk(module, tokens)
    with contextlib.ExitStack() as stack:
        for owner in _callers(module):
            stack.enter_context(replaced(owner, "__call__", walk.noted(vars(owner)["__call__"])))
        forward(module, vars(traced_module("cache"))["make_prompt_cache"](module), walk)
    return walk


def _callers(module: nn.Module) -> list[type]:
    """The classes whose `__call__` runs some part of the model, each once."""
    owners = (
        next((base for base in type(part).__mro__ if "__call__" in vars(base)), None) for part in module.modules()
    )
    return list(dict.fromkeys(owner for owner in owners if owner is not None))


def _at(tokens: int, short: Tensor, long: Tensor) -> Tensor:
    """The tensor at `tokens` tokens: every axis is a constant or linear in them, so two lengths tell."""
    shape = tuple(
        a + (b - a) * (tokens - _TRACED[0]) // _TRACED[0] for a, b in zip(short.shape, long.shape, strict=True)
    )
    ratio = _size(long.shape) / _size(short.shape)
    return Tensor(short.path, short.made_by, shape, "1" if ratio < 1.5 else "n" if ratio < 3 else "n x n")


def _size(shape: Sequence[int]) -> int:
    size = 1
    for count in shape:
        size *= count
    return size


def _stages(tensors: Sequence[Tensor]) -> Iterator[Stage]:
    """Before the layers, each kind of layer once, after them."""
    layers: dict[int, list[Tensor]] = {}
    outside: list[list[Tensor]] = [[], []]
    for tensor in tensors:
        number = _layer(tensor.path)
        if number is None:
            outside[bool(layers)].append(tensor)
        else:
            layers.setdefault(number, []).append(tensor)
    yield Stage("before the layers", 0, tuple(outside[0]))
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for number, found in layers.items():
        kind = tuple((_inside(tensor.path), tensor.shape) for tensor in found)
        kinds.setdefault(kind, []).append(number)
    for numbers in kinds.values():
        title = f"layer {numbers[0]}" + (f", and {len(numbers) - 1} more like it" if len(numbers) > 1 else "")
        yield Stage(title, len(numbers), tuple(layers[numbers[0]]))
    yield Stage("after the layers", 0, tuple(outside[1]))


def _layer(path: str) -> int | None:
    """The number of the layer a path is in: the first number in it."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def _inside(path: str) -> str:
    """The part of a path behind the layer's number; empty for the layer itself."""
    parts = path.split(".")
    number = next(i for i, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[number + 1 :])


def _pair_dims(traced: ModelTrace, config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Of each kind of call, numbers multiplied for a query and a key: in prefill, and in decode.

    Latent attention with scores of its own for positions unpacks its keys in prefill and attends in the latents in
    decode: mlx-lm's deepseek_v3.
    """
    inner = {**config, **config.get("text_config", {})}
    dims = []
    for call in traced.attention:
        unpacked = call.shape.key_dim + call.shape.value_dim
        if "kv_lora_rank" in inner and call.shape.mask_heads > 1:
            position = inner["qk_rope_head_dim"]
            dims.append((unpacked + position, 2 * inner["kv_lora_rank"] + position))
        else:
            dims.append((unpacked, unpacked))
    return dims


def _bill(traced: ModelTrace, linear: int, dims: Sequence[tuple[int, int]], tokens: int) -> Bill:
    prefill = decode = 0
    for call, (prefill_dims, decode_dims) in zip(traced.attention, dims, strict=True):
        keys = min(tokens, call.window_tokens) if call.window_tokens else tokens
        seen = 2 * call.layers * call.shape.query_heads * keys
        prefill += seen * prefill_dims * tokens
        decode += seen * decode_dims
    head = 2 * traced.weights.head_params
    return Bill(
        tokens=tokens,
        linear_flops=2 * linear * tokens + head,
        attention_flops=prefill,
        decode_linear_flops=2 * linear + head,
        decode_attention_flops=decode,
        kv_bytes=traced.kv_bytes(tokens),
        decode_weight_bytes=traced.weights.decode_bytes,
    )


def _formula(traced: ModelTrace) -> Iterator[str]:
    """KV a token, layers alike together: layers x heads x (key + value size) x bytes."""
    alike: dict[tuple[Any, ...], int] = {}
    for cache in traced.caches:
        if cache.kind in ("full", "window") and cache.arrays:
            sizes = tuple((array.shape[1], array.shape[3], array.bytes_per_token) for array in cache.arrays)
            alike[cache.kind, cache.window_tokens, sizes] = alike.get((cache.kind, cache.window_tokens, sizes), 0) + 1
    for (_, window, sizes), layers in alike.items():
        total = layers * sum(size for _, _, size in sizes)
        heads, value_bytes = sizes[0][0], sizes[0][2] // (sizes[0][0] * sizes[0][1])
        dims = " + ".join(str(dim) for _, dim, _ in sizes)
        held = f", at most {window:,} tokens of it" if window else ""
        block = f"; x {BLOCK_TOKENS} = {total * BLOCK_TOKENS:,} B a block"
        yield f"{layers} layers x {heads} KV heads x ({dims}) x {value_bytes} B = {total:,} B a token{held}{block}"
    if traced.fixed_bytes:
        yield f"and {traced.fixed_bytes:,} B of state, at any length"
