"""The whole answer to `mlxkv budget`: the model's figures, a row a context, the longest that fits, what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxkv.budget.advice import advise
from mlxkv.budget.latency import Latency, estimate
from mlxkv.budget.machines import Machine, find_machine
from mlxkv.budget.measured import with_measured
from mlxkv.budget.memory import (
    MOST_SEQUENCES,
    MOST_TOKENS,
    PREFILL_STEP_TOKENS,
    Check,
    Deployment,
    Memory,
    Verdict,
    largest,
)
from mlxkv.budget.model import TracedModel, trace_model
from mlxkv.budget.source import Source, find_source
from mlxkv.cache.checkpoint import cadence_of
from mlxkv.core.errors import UsageError
from mlxkv.core.units import KIB
from mlxkv.sizing.trace import BLOCK_TOKENS, WeightSpec

_FIRST_DEFAULT_CONTEXT, _LAST_DEFAULT_CONTEXT = 1024, 131_072
_COLD_FILE_BYTES = 4 * KIB
_GRADES: tuple[Verdict, ...] = ("fits", "tight", "does not fit")


@dataclass(frozen=True)
class Versions:
    """What the figures depend on: another mlx-lm may cache other arrays."""

    mlxkv: str
    mlx: str
    mlx_lm: str


@dataclass(frozen=True)
class KvFigures:
    """KV of one sequence in exact bytes, from the trace.

    Attributes:
        bytes_per_token: what each further token adds for ever.
        bytes_per_block: 64 times that.
        first_block_bytes: a sequence of 64 tokens, windows and state included.
        window_tokens, window_bytes_per_token: the longest window, and what a token adds until the windows are full.
        fixed_bytes: recurrent and convolution state.
        formula_bytes_per_token: by the closed formula, None where it does not apply.
        formula_note: why it differs, None where it agrees.
    """

    bytes_per_token: int
    block_tokens: int
    bytes_per_block: int
    first_block_bytes: int
    window_tokens: int
    window_bytes_per_token: int
    fixed_bytes: int
    formula_bytes_per_token: int | None
    formula_note: str | None


@dataclass(frozen=True)
class WeightFigures:
    """Weights in memory; `bits` is nominal: 4-bit affine in groups of 64 takes 4.5."""

    bytes: int
    params: int
    bits: float


@dataclass(frozen=True)
class ContextPlan:
    """One row: what a context costs and whether it fits.

    Attributes:
        verdict: `tight` has less than a tenth of the GPU limit to spare.
        binding: the check nearest to its bound.
        share: total over the GPU limit.
        max_sequences: how many sequences of this length fit.
        latency: None where the machine's rates are unknown.
    """

    memory: Memory
    verdict: Verdict
    binding: Check
    share: float
    max_sequences: int
    latency: Latency | None

    @property
    def tokens(self) -> int:
        return self.memory.tokens

    @property
    def sequences(self) -> int:
        return self.memory.sequences

    @property
    def fits(self) -> bool:
        return self.verdict != "does not fit"


@dataclass(frozen=True)
class TierPlan:
    """A tier's budget, and how many tokens of prefixes it holds, in whole blocks.

    With a recurrent state: of one prefix, its checkpoints counted; without one it could not be resumed.
    """

    bytes: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        contexts: ascending by tokens.
        max_context_tokens: the longest context that fits with `sequences` sequences, 0 when none does.
        max_sequences: of the longest context in `contexts` that fits once; 0 when none does.
        verdict: of the longest context that was asked for; where none was named, the best of all rows.
        advised_tokens: the context that `advice` is about: the longest row, or the shortest where no row fits.
        advice: what to change so that it fits, best first; empty when it does.
        hot, cold: None where no budget was given.
    """

    model: str
    origin: str
    versions: Versions
    kv: KvFigures
    weights: WeightFigures
    machine: Machine
    contexts: tuple[ContextPlan, ...]
    max_context_tokens: int
    max_sequences: int
    verdict: Verdict
    advised_tokens: int
    advice: tuple[str, ...]
    hot: TierPlan | None
    cold: TierPlan | None
    deployment: Deployment

    def at(self, tokens: int) -> ContextPlan:
        """The row of a context, also of one that was not asked for."""
        for row in self.contexts:
            if row.tokens == tokens:
                return row
        return plan_context(self.deployment, tokens, self.contexts[0].sequences)


def plan(
    model: str | Path | Mapping[str, Any] | Source,
    *,
    machine: Machine | None = None,
    contexts: Sequence[int] | None = None,
    sequences: int = 1,
    shared_prefix_tokens: int = 0,
    hot_bytes: int | None = None,
    cold_bytes: int | None = None,
    weights: WeightSpec | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    prefill_step_tokens: int = PREFILL_STEP_TOKENS,
) -> Plan:
    """What a model costs on a machine and whether it fits, from its config alone.

    Args:
        model: a directory, a config.json, a GGUF file, a catalog name, a hub id, a config, or a `Source`.
        machine: from `find_machine`; None for this Mac, or a Mac of 24 GB elsewhere.
        contexts: tokens of one sequence; None for powers of two up to the model's maximum.
        sequences: that run at once, each with its own context.
        shared_prefix_tokens: tokens they all begin with; their KV is kept once.
        hot_bytes, cold_bytes: budgets of the tiers; the hot one is memory of the GPU limit.
        weights: None for the precision the config states.
        kv_bits, kv_group_size: quantised KV.

    Raises:
        ModelNotFoundError, ModelError: as `find_source` and `trace_model`.
        UsageError: a number that cannot be, or KV bits this model does not allow.

    Cost: 0.05 to 1 s, nothing evaluated, no weights read.
    """
    _check("sequences", sequences, MOST_SEQUENCES)
    _check("prefill step", prefill_step_tokens, MOST_TOKENS)
    _check("shared prefix", shared_prefix_tokens, MOST_TOKENS, least=0)
    for tokens in contexts or ():
        _check("context", tokens, MOST_TOKENS)
    source = model if isinstance(model, Source) else find_source(model)
    traced = trace_model(source, weights=weights, kv_bits=kv_bits, kv_group_size=kv_group_size)
    deployment = Deployment(
        traced,
        machine or with_measured(find_machine()),
        prefill_step_tokens=prefill_step_tokens,
        shared_prefix_tokens=shared_prefix_tokens,
        hot_bytes=hot_bytes or 0,
    )
    asked = sorted(set(contexts)) if contexts else default_contexts(traced)
    rows = tuple(plan_context(deployment, tokens, sequences) for tokens in asked)
    decisive = rows[-1] if contexts else min(rows, key=lambda row: _GRADES.index(row.verdict))
    fitting = [row for row in rows if row.max_sequences]
    advised = rows[-1].tokens if contexts or decisive.fits else rows[0].tokens
    return Plan(
        model=source.name,
        origin=source.origin,
        versions=Versions(version("mlxkv"), version("mlx"), version("mlx-lm")),
        kv=_kv_figures(traced),
        weights=WeightFigures(traced.trace.weights.bytes, traced.trace.weights.params, traced.bits),
        machine=deployment.machine,
        contexts=rows,
        max_context_tokens=deployment.max_context_tokens(sequences),
        max_sequences=fitting[-1].max_sequences if fitting else 0,
        verdict=decisive.verdict,
        advised_tokens=advised,
        advice=advise(deployment, advised, sequences),
        hot=None if hot_bytes is None else TierPlan(hot_bytes, _tier_tokens(traced, hot_bytes, 0)),
        cold=None if cold_bytes is None else TierPlan(cold_bytes, _tier_tokens(traced, cold_bytes, _COLD_FILE_BYTES)),
        deployment=deployment,
    )


def plan_context(deployment: Deployment, tokens: int, sequences: int) -> ContextPlan:
    """One row of the table."""
    memory = deployment.memory(tokens, sequences)
    judgement = deployment.judge(memory)
    return ContextPlan(
        memory=memory,
        verdict=judgement.verdict,
        binding=judgement.binding,
        share=memory.total_bytes / deployment.machine.gpu_limit_bytes,
        max_sequences=deployment.max_sequences(tokens),
        latency=estimate(deployment, tokens, sequences),
    )


def default_contexts(model: TracedModel) -> list[int]:
    """Powers of two from 1,024 to the model's maximum and that itself; to 131,072 where it states none."""
    most = _LAST_DEFAULT_CONTEXT if model.context is None else model.context.scaled_tokens
    powers = [2**power for power in range(30) if _FIRST_DEFAULT_CONTEXT <= 2**power < most]
    return [*powers, most]


def _kv_figures(model: TracedModel) -> KvFigures:
    traced = model.trace
    return KvFigures(
        bytes_per_token=traced.growth_bytes_per_token,
        block_tokens=BLOCK_TOKENS,
        bytes_per_block=traced.steady_block_bytes,
        first_block_bytes=traced.first_block_bytes,
        window_tokens=traced.window_tokens,
        window_bytes_per_token=traced.window_bytes_per_token,
        fixed_bytes=traced.fixed_bytes,
        formula_bytes_per_token=model.formula_bytes_per_token,
        formula_note=model.why_formula_differs,
    )


def _tier_tokens(model: TracedModel, budget_bytes: int, more_bytes: int) -> int:
    """Tokens of prefixes in whole blocks; a file on the SSD takes `more_bytes` for its header and its last page."""
    block, state = model.trace.stored_block_bytes, model.trace.fixed_bytes
    if not state:
        return budget_bytes // (block + more_bytes) * BLOCK_TOKENS if block else 0
    cadence = cadence_of(state, block // BLOCK_TOKENS)

    def fit(blocks: int) -> bool:
        checkpoints = -(-blocks * BLOCK_TOKENS // cadence)
        return blocks * (block + more_bytes) + checkpoints * (state + more_bytes) <= budget_bytes

    return largest(fit, MOST_TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS


def _check(what: str, value: int, most: int, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{what} is {value!r}; it must be a whole number from {least} to {most:,}.")
