"""What a model costs, measured by tracing mlx-lm's own class: the figures that everything else starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxkv.budget.formula import formula_bytes_per_token, why_formula_differs
from mlxkv.budget.source import Source
from mlxkv.sizing.config import Config, ContextWindow, context_window, text_level
from mlxkv.sizing.trace import ModelTrace, WeightSpec, build, trace
from mlxkv.sizing.weights import weight_bytes

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_SHORT = (16, 32)


@dataclass(frozen=True)
class TracedModel:
    """One model in one precision, with one precision of KV.

    Attributes:
        weights: the precision that was asked for, None for what the config states.
        bits: nominal bits of the weights; where several are mixed, the mean over all parameters.
        kv_bits, kv_group_size: quantised KV; bits are None for the model's own dtype.
        hidden_size: 0 where the config does not state it.
        largest_weight_bytes: the longest single array.
        head_is_tied: the output head is the embedding table.
        context: the longest context the config states, None where it states none.
        formula_bytes_per_token: what the closed formula says, None where it does not apply.
        why_formula_differs: one sentence, None where formula and trace agree.
        is_mixture: one token leaves experts idle.
    """

    source: Source
    trace: ModelTrace
    weights: WeightSpec | None
    bits: float
    kv_bits: int | None
    kv_group_size: int
    hidden_size: int
    largest_weight_bytes: int
    head_is_tied: bool
    context: ContextWindow | None
    formula_bytes_per_token: int | None
    why_formula_differs: str | None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def is_mixture(self) -> bool:
        return self.trace.weights.active_params < self.trace.weights.params

    @property
    def linear_params(self) -> int:
        """Parameters every token of a prompt is multiplied with: active, without looked-up tables and the head."""
        weights = self.trace.weights
        head = 0 if self.head_is_tied else weights.head_params
        return max(0, weights.active_params - weights.embedding_params - head)


def trace_model(
    source: Source,
    *,
    weights: WeightSpec | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quick: bool = False,
) -> TracedModel:
    """Build the source's class lazily and trace it.

    Args:
        weights: the precision to quantise or cast to; None for what the config states.
        kv_bits, kv_group_size: quantised KV.
        quick: trace fewer tokens; the same bytes, for trying out settings.

    Raises:
        ModelError: the config cannot be used; names the key.
        UsageError: mlx-lm cannot quantise this model's KV.

    Cost: 0.05 to 1 s, nothing evaluated, under 200 MiB for 671 B parameters.
    """
    module = build(source.config, weights=weights)
    lengths = {"tokens": _SHORT} if quick else {}
    traced = trace(module, kv_bits=kv_bits, kv_group_size=kv_group_size, **lengths)
    value_bytes = _value_bytes(traced)
    hidden = text_level(source.config).get("hidden_size")
    return TracedModel(
        source=source,
        trace=traced,
        weights=weights,
        bits=_nominal_bits(source.config, weights, traced),
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        hidden_size=hidden if isinstance(hidden, int) else 0,
        largest_weight_bytes=_largest_array_bytes(module),
        head_is_tied=not _has_own_head(module),
        context=context_window(source.config),
        formula_bytes_per_token=formula_bytes_per_token(source.config, value_bytes=value_bytes),
        why_formula_differs=why_formula_differs(source.config, traced, value_bytes=value_bytes),
    )


def with_weights(model: TracedModel, weights: WeightSpec) -> TracedModel:
    """`model` with its weights in another precision; only what they take in memory is measured again, not speed.

    Cost: 0.02 to 0.3 s; no forward pass.
    """
    module = build(model.source.config, weights=weights)
    stored = replace(model.trace.weights, bytes=weight_bytes(module))
    return replace(
        model,
        weights=weights,
        bits=weights.bits,
        trace=replace(model.trace, weights=stored),
        largest_weight_bytes=_largest_array_bytes(module),
    )


def _largest_array_bytes(module: nn.Module) -> int:
    return max(int(array.nbytes) for _, array in tree_flatten(module.parameters()))


def _value_bytes(traced: ModelTrace) -> int:
    """Bytes of one number of keys or values before any quantisation: those of the queries."""
    return next((DTYPE_BYTES.get(call.shape.dtype, 2) for call in traced.attention), 2)


def _nominal_bits(config: Config, weights: WeightSpec | None, traced: ModelTrace) -> float:
    """The bits asked for, else those stated, else the mean, which is 16 or 32 where nothing is quantised."""
    if weights is not None:
        return weights.bits
    own = config.get("quantization") or {}
    if isinstance(own.get("bits"), int):
        return float(own["bits"])
    mean = traced.weights.bytes * 8 / traced.weights.params
    whole = min((16.0, 32.0), key=lambda bits: abs(bits - mean))
    return whole if math.isclose(mean, whole, rel_tol=0.02) else round(mean, 2)


def _has_own_head(module: nn.Module) -> bool:
    """Whether a linear layer outside all repeated layers turns the last hidden state into the vocabulary."""
    named = module.named_modules()
    vocabularies = {_rows(layer) for _, layer in named if isinstance(layer, (nn.Embedding, nn.QuantizedEmbedding))}
    return any(
        _rows(layer) in vocabularies
        for path, layer in named
        if isinstance(layer, (nn.Linear, nn.QuantizedLinear)) and not any(map(str.isdigit, path.split(".")))
    )


def _rows(layer: nn.Module) -> int:
    weight: mx.array = layer["weight"]
    return int(weight.shape[0])
