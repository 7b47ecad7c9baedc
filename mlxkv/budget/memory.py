"""Bytes of one model on one machine at any context: every term, the three checks, and the longest context that passes.

    total = weights + KV as allocated + prefill transient + runtime share + hot tier

Everything is a pure function of a traced model, a machine and a few numbers, so that the longest context is found by
bisection over the same function that fills the table. docs/budget.md has each term with its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from mlxkv.budget.machines import Machine
from mlxkv.budget.model import DTYPE_BYTES, TracedModel
from mlxkv.sizing.trace import AttentionCall, CacheCost

RUNTIME_BYTES = 1_500_000_000
"""What MLX holds besides on Metal: activations of a step, kernels, its allocator's rounding.

Source: fitted on one ladder, ml-explore/mlx-lm#1480 (Qwen3.6-35B-A3B 4-bit, 8 k to 192 k, within 1.1 %)."""
FITS_SHARE, MOST_SHARE = 0.90, 0.95
"""Shares of the GPU limit: above the first mlx-lm itself starts to warn, above the second nothing is left for error."""
MOST_TOKENS = 10**9
MOST_SEQUENCES = 65_536
PREFILL_STEP_TOKENS = 2048
"""mlx-lm's default."""

_CPU_ACTIVATIONS = 18

Verdict = Literal["fits", "tight", "does not fit"]
Check = Literal["gpu_limit", "max_buffer", "system_memory", "model_context"]


@dataclass(frozen=True)
class Memory:
    """The bill for `sequences` sequences of `tokens` tokens each, at the worst moment of prefilling the last one.

    Attributes:
        kv_bytes: keys, values and states in use while decoding; a shared prefix once.
        slack_bytes: what is allocated beyond that: steps of 256 tokens, and windows while a step is prefilled.
        transient_bytes: what lives only while a step is prefilled.
        runtime_bytes: as it was measured on this machine, else a constant; see RUNTIME_BYTES.
        hot_bytes: the hot tier's budget.
        largest_buffer_bytes, largest_buffer: the longest single array, and what it is.
    """

    tokens: int
    sequences: int
    weights_bytes: int
    kv_bytes: int
    slack_bytes: int
    transient_bytes: int
    runtime_bytes: int
    hot_bytes: int
    largest_buffer_bytes: int
    largest_buffer: str

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes + self.kv_bytes + self.slack_bytes + self.transient_bytes + self.runtime_bytes
            + self.hot_bytes
        )  # fmt: skip


@dataclass(frozen=True)
class Judgement:
    """Whether it fits; `binding` is the check nearest to its bound or furthest beyond it, `failed` are all beyond."""

    verdict: Verdict
    binding: Check
    failed: tuple[Check, ...]


@dataclass(frozen=True)
class Deployment:
    """One model on one machine with the settings that cost memory; all questions about bytes go here.

    Attributes:
        shared_prefix_tokens: tokens all sequences begin with; mlxkv keeps their KV once.
        hot_bytes: the hot tier's budget, memory of the same GPU limit.
    """

    model: TracedModel
    machine: Machine
    prefill_step_tokens: int = PREFILL_STEP_TOKENS
    shared_prefix_tokens: int = 0
    hot_bytes: int = 0

    def memory(self, tokens: int, sequences: int = 1) -> Memory:
        """The bill. One sequence is prefilled at a time, the others are decoding.

        Cost: microseconds; nothing is traced again.
        """
        kv_bytes = self._kv_bytes(tokens, sequences)
        largest_bytes, largest = max(self._buffers(tokens))
        return Memory(
            tokens=tokens,
            sequences=sequences,
            weights_bytes=self.model.trace.weights.bytes,
            kv_bytes=kv_bytes,
            slack_bytes=self._allocated_bytes(tokens, sequences) - kv_bytes,
            transient_bytes=self._transient_bytes(tokens),
            runtime_bytes=self._runtime_bytes(),
            hot_bytes=self.hot_bytes,
            largest_buffer_bytes=largest_bytes,
            largest_buffer=largest,
        )

    def judge(self, memory: Memory) -> Judgement:
        """Hold the bill against the GPU limit, the longest buffer, the system's share and the model's own maximum."""
        machine = self.machine
        uses: dict[Check, float] = {"gpu_limit": memory.total_bytes / (machine.gpu_limit_bytes * MOST_SHARE)}
        if machine.max_buffer_bytes is not None:
            uses["max_buffer"] = memory.largest_buffer_bytes / machine.max_buffer_bytes
        if self.model.context is not None:
            uses["model_context"] = memory.tokens / self.model.context.scaled_tokens
        binding = max(uses, key=uses.__getitem__)
        failed = tuple(check for check, use in uses.items() if use > 1)
        if failed:
            return Judgement("does not fit", binding, failed)
        if memory.total_bytes + machine.system_bytes > machine.memory_bytes:
            return Judgement("tight", "system_memory", ())
        tight = memory.total_bytes > machine.gpu_limit_bytes * FITS_SHARE
        return Judgement("tight" if tight else "fits", binding, ())

    def fits(self, tokens: int, sequences: int = 1) -> bool:
        """Whether so many sequences of so many tokens can run; `tight` counts."""
        return self.judge(self.memory(tokens, sequences)).verdict != "does not fit"

    def max_context_tokens(self, sequences: int = 1) -> int:
        """The longest context that fits, to the token; 0 when none does. At most the model's own maximum."""
        return largest(lambda tokens: self.fits(tokens, sequences), MOST_TOKENS)

    def max_sequences(self, tokens: int) -> int:
        """Most sequences of `tokens` tokens that fit; 0 when not even one does."""
        return largest(lambda sequences: self.fits(tokens, sequences), MOST_SEQUENCES)

    def left_bytes(self, tokens: int, sequences: int = 1) -> int:
        """What is left under the GPU limit for a hot tier; 0 when it does not fit."""
        total = self.memory(tokens, sequences).total_bytes
        return max(0, int(self.machine.gpu_limit_bytes * MOST_SHARE) - total)

    def attention_note(self, call: AttentionCall, tokens: int) -> str:
        """What one kind of attention layer writes out in the largest step, for a person."""
        shape, queries = call.shape, self._unfused_queries(call, tokens)
        size = DTYPE_BYTES.get(shape.dtype, 2)
        if self._makes_its_own_mask(call):
            step = min(self.prefill_step_tokens, tokens)
            return (
                f"2 x ({shape.mask_heads} heads x {step:,} queries + {shape.kv_heads} heads x"
                f" {shape.key_dim + shape.value_dim}) x {self._keys(call, tokens):,} keys x {size} B"
            )
        if not queries:
            return f"fused for head size {shape.key_dim}, no scores"
        return f"{shape.query_heads} heads x {queries:,} queries x {self._keys(call, tokens):,} keys x {size} B"

    def _runtime_bytes(self) -> int:
        measured = self.machine.runtime
        if measured is not None:
            return measured.of(self.model.hidden_size, self.prefill_step_tokens)
        return 0 if self.machine.on_cpu else RUNTIME_BYTES

    def _kv_bytes(self, tokens: int, sequences: int) -> int:
        traced = self.model.trace
        shared = traced.growth_bytes_per_token * min(self.shared_prefix_tokens, tokens)
        return sequences * traced.kv_bytes(tokens) - (sequences - 1) * shared

    def _allocated_bytes(self, tokens: int, sequences: int) -> int:
        """One sequence in the middle of a prefill step; the others hold their own suffix and window."""
        step = min(self.prefill_step_tokens, tokens)
        first = self.model.trace.allocated_bytes(tokens, prefill_step_tokens=step)
        shared = min(self.shared_prefix_tokens, tokens)
        return first + (sequences - 1) * sum(_own_bytes(cost, tokens, shared) for cost in self.model.trace.costs)

    def _transient_bytes(self, tokens: int) -> int:
        scores = max((self._scores_bytes(call, tokens) for call in self.model.trace.attention), default=0)
        return scores + self._cpu_bytes(tokens) if self.machine.on_cpu else scores

    def _scores_bytes(self, call: AttentionCall, tokens: int) -> int:
        """What one attention layer writes out: scores [heads, L, S], or twice that where the model makes its own mask.

        Latent attention (DeepSeek V3) hands its position scores over as a mask [heads, L, S] and unpacks keys and
        values for all S tokens; twice both matches mlx-lm#839 within 0.3 %.
        """
        shape, size = call.shape, DTYPE_BYTES.get(call.shape.dtype, 2)
        keys = self._keys(call, tokens)
        if self._makes_its_own_mask(call):
            queries = min(self.prefill_step_tokens, tokens)
            unpacked = shape.kv_heads * keys * (shape.key_dim + shape.value_dim)
            return 2 * (shape.mask_heads * queries * keys + unpacked) * size
        return shape.query_heads * self._unfused_queries(call, tokens) * keys * size

    @staticmethod
    def _makes_its_own_mask(call: AttentionCall) -> bool:
        return call.shape.mask != "scores" and call.shape.mask_heads > 1

    def _unfused_queries(self, call: AttentionCall, tokens: int) -> int:
        """Queries of the largest step whose scores are written out: 0 where MLX has a fused kernel."""
        shape, kernels = call.shape, self.machine.kernels
        queries = min(self.prefill_step_tokens, tokens)
        if shape.mask == "scores" or self.model.kv_bits is not None:
            return queries  # the model's own softmax; mlx-lm's attention over quantised KV
        if shape.key_dim == shape.value_dim and shape.key_dim in kernels.fused_dims:
            return 0
        least = kernels.causal_256_from_queries
        if least is not None and shape.key_dim == shape.value_dim == 256 and shape.mask == "causal":
            return min(queries, least - 1)  # the rest of a prompt after its full steps
        return queries

    def _keys(self, call: AttentionCall, tokens: int) -> int:
        if not call.window_tokens:
            return tokens
        return min(tokens, call.window_tokens + self.prefill_step_tokens - 1)

    def _cpu_bytes(self, tokens: int) -> int:
        """What a step holds besides on the CPU, where MLX queues ten operations ahead of the one that runs.

        A boolean mask [L, S], one layer's keys and values (they are copied to grow), and the outputs of the queued
        operations: 18 times the hidden size a token, measured on llama-shaped models (benchmarks/prefill_memory.py).
        """
        step = min(self.prefill_step_tokens, tokens)
        traced = self.model.trace
        grown = max((cost.allocated_bytes(tokens, step) - cost.fixed_bytes for cost in traced.costs), default=0)
        size = max((DTYPE_BYTES.get(call.shape.dtype, 2) for call in traced.attention), default=2)
        return step * tokens + grown + _CPU_ACTIVATIONS * self.model.hidden_size * step * size

    def _buffers(self, tokens: int) -> Iterator[tuple[int, str]]:
        """The longest array of each kind."""
        yield self.model.largest_weight_bytes, "a weight"
        step = min(self.prefill_step_tokens, tokens)
        for cache, cost in zip(self.model.trace.caches, self.model.trace.costs, strict=True):
            rows = _round_up(tokens, cost.step_tokens)
            if cost.window_tokens:
                rows = min(rows, _round_up(cost.window_tokens + step - 1, cost.step_tokens))
            for array in cache.arrays:
                yield array.bytes_per_token * rows, "one layer's keys or values"
        for call in self.model.trace.attention:
            heads = max(call.shape.query_heads, call.shape.mask_heads)
            queries = step if self._makes_its_own_mask(call) else self._unfused_queries(call, tokens)
            size = DTYPE_BYTES.get(call.shape.dtype, 2)
            yield heads * queries * self._keys(call, tokens) * size, "the attention scores of a prefill step"


def _own_bytes(cost: CacheCost, tokens: int, shared_tokens: int) -> int:
    """What a decoding sequence holds of one cache, when it has the first tokens' growing part from elsewhere."""
    together = cost.allocated_bytes(tokens, 1)
    rows = _round_up(tokens, cost.step_tokens) - _round_up(tokens - shared_tokens, cost.step_tokens)
    return together - cost.growth_bytes_per_token * rows


def largest(passes: Callable[[int], bool], most: int) -> int:
    """The largest number from 0 to `most` that passes, where each below one that passes does too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if passes(middle) else (low, middle - 1)
    return low


def _round_up(tokens: int, step_tokens: int) -> int:
    return -(-tokens // step_tokens) * step_tokens
