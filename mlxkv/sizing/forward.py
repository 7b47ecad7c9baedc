"""A forward pass that is never evaluated, and what can be seen on the way: attention calls and idle experts."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxkv.core.errors import ModelError
from mlxkv.sizing.architecture import CONFIG_FAULTS, replaced, sentence

_patching = threading.RLock()


@dataclass(frozen=True)
class AttentionShape:
    """Shapes handed to `scaled_dot_product_attention`.

    Latent attention (DeepSeek V3) unpacks its keys first, so they differ from what the cache holds.

    Attributes:
        query_heads, kv_heads, key_dim, value_dim, dtype: of the queries [B, Hq, L, Dk], keys and values.
        mask: `none`, `causal`, the dtype of a mask array, or `scores` for a model that does without MLX's function
            and takes the softmax of its own scores (Gemma 2); its key_dim, value_dim and kv_heads are 0 here.
        mask_heads: heads of the mask or scores; above 1 the model itself has written out [heads, L, S].
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    mask: str
    mask_heads: int


@dataclass
class Record:
    """What one forward pass of `tokens` tokens did; filled by `forward`.

    Attributes:
        attention: each call's shapes and its number of keys, in order.
        tied_tables: embeddings that also served as the output head.
        idle_params, idle_bytes: weights of experts that one token does not use.
    """

    tokens: int
    attention: list[tuple[AttentionShape, int]] = field(default_factory=list)
    tied_tables: list[nn.Module] = field(default_factory=list)
    idle_params: int = 0
    idle_bytes: int = 0

    def note_attention(self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> None:
        is_array = isinstance(mask, mx.array)
        shape = AttentionShape(
            query_heads=queries.shape[1],
            kv_heads=keys.shape[1],
            key_dim=keys.shape[3],
            value_dim=values.shape[3],
            dtype=dtype_name(queries.dtype),
            mask=dtype_name(mask.dtype) if is_array else str(mask or "none"),
            mask_heads=mask.shape[-3] if is_array and mask.ndim > 2 else int(is_array),
        )
        self.attention.append((shape, keys.shape[2]))

    def note_softmax(self, scores: mx.array) -> None:
        """Count scores [..., heads, L, S] that a model takes the softmax of itself."""
        if scores.ndim < 4 or scores.shape[-2] != self.tokens or scores.shape[-1] < self.tokens:
            return
        heads = prod(scores.shape[1:-2])
        shape = AttentionShape(heads, 0, 0, 0, dtype_name(scores.dtype), mask="scores", mask_heads=heads)
        self.attention.append((shape, scores.shape[-1]))

    def note_experts(self, params: int, stored_bytes: int, experts: int, indices: mx.array | None) -> None:
        """Count the experts of one gathered product that a token leaves idle; `indices` has one entry a use."""
        if indices is None:
            return
        idle = max(0, experts * self.tokens - indices.size)
        self.idle_params += params * idle // (experts * self.tokens)
        self.idle_bytes += stored_bytes * idle // (experts * self.tokens)


def forward(module: nn.Module, caches: Sequence[Any], record: Record) -> mx.array:
    """Logits [1, tokens, vocabulary] of `record.tokens` zeros, unevaluated; fills `caches` and `record`.

    Parameters that the pass replaces (Gemma 3n casts some) are put back. MLX's functions are wrapped meanwhile, for the
    whole process: calls from other threads pass through but may be recorded. Traces run one at a time.

    Raises `ModelError` when the pass fails: the config's numbers do not fit each other.
    """
    parameters = module.parameters()
    with _patching, _recording(record), _experts_not_chosen(module, record):
        try:
            logits: mx.array = module(mx.zeros((1, record.tokens), mx.int32), cache=caches)
        except CONFIG_FAULTS as error:
            raise ModelError(f"the model's forward pass fails on {record.tokens} tokens: {sentence(error)}.") from error
        finally:
            module.update(parameters)
    return logits


def dtype_name(dtype: mx.Dtype) -> str:
    """`bfloat16` for mx.bfloat16."""
    return str(dtype).rpartition(".")[2]


@contextlib.contextmanager
def _recording(record: Record) -> Iterator[None]:
    """Wrap the functions of MLX that `record` listens to."""
    attention, softmax = mx.fast.scaled_dot_product_attention, mx.softmax
    gather_mm, gather_qmm = mx.gather_mm, mx.gather_qmm

    def noted_attention(q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **others: Any) -> mx.array:
        record.note_attention(q, k, v, mask)
        return attention(q, k, v, mask=mask, **others)

    def noted_gather_mm(
        a: mx.array, b: mx.array, lhs_indices: Any = None, rhs_indices: Any = None, **others: Any
    ) -> Any:
        record.note_experts(b.size, b.nbytes, b.shape[0], rhs_indices)
        return gather_mm(a, b, lhs_indices, rhs_indices, **others)

    def noted_gather_qmm(
        x: mx.array, w: mx.array, scales: mx.array, biases: Any = None, *, rhs_indices: Any = None, **others: Any
    ) -> Any:
        packed_bytes = w.nbytes + scales.nbytes + (0 if biases is None else biases.nbytes)
        record.note_experts(w.size * 32 // others["bits"], packed_bytes, w.shape[0], rhs_indices)
        return gather_qmm(x, w, scales, biases, rhs_indices=rhs_indices, **others)

    def noted_softmax(a: mx.array, /, *arguments: Any, **others: Any) -> mx.array:
        record.note_softmax(a)
        return softmax(a, *arguments, **others)

    def noting_head(as_linear: Callable[[Any, mx.array], mx.array]) -> Callable[[Any, mx.array], mx.array]:
        def noted(table: Any, x: mx.array) -> mx.array:
            record.tied_tables.append(table)
            return as_linear(table, x)

        return noted

    with (
        replaced(nn.Embedding, "as_linear", noting_head(nn.Embedding.as_linear)),
        replaced(nn.QuantizedEmbedding, "as_linear", noting_head(nn.QuantizedEmbedding.as_linear)),
        replaced(mx.fast, "scaled_dot_product_attention", noted_attention),
        replaced(mx, "softmax", noted_softmax),
        replaced(mx, "gather_mm", noted_gather_mm),
        replaced(mx, "gather_qmm", noted_gather_qmm),
    ):
        yield


@contextlib.contextmanager
def _experts_not_chosen(module: nn.Module, record: Record) -> Iterator[None]:
    """DBRX reads which experts its router chose, which would evaluate the model; let it take the first ones."""
    home = type(module).__module__
    if not home.endswith(".dbrx"):
        yield
        return

    def first_experts(self: Any, x: mx.array) -> mx.array:
        for idle in self.experts[self.num_experts_per_tok :]:
            arrays = [array for _, array in tree_flatten(idle.parameters())]
            record.idle_params += sum(array.size for array in arrays)
            record.idle_bytes += sum(array.nbytes for array in arrays)
        used: list[mx.array] = [expert(x) for expert in self.experts[: self.num_experts_per_tok]]
        return mx.stack(used).sum(axis=0)

    with replaced(vars(sys.modules[home])["SparseMoeBlock"], "__call__", first_experts):
        yield
