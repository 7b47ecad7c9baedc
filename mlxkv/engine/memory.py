"""How a server shares out a machine's memory: the hot tier, running sequences, and how long a prefill chunk may be."""

from __future__ import annotations

from dataclasses import dataclass

from mlx.utils import tree_reduce

from mlxkv.budget.machines import RuntimeShare, find_machine, this_cpu
from mlxkv.budget.measured import with_measured
from mlxkv.budget.memory import MOST_SHARE, Deployment
from mlxkv.budget.model import trace_model
from mlxkv.budget.source import Source
from mlxkv.core.errors import BudgetError
from mlxkv.core.units import format_bytes
from mlxkv.engine.generate import CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS
from mlxkv.models.loader import LoadedModel, on_cpu
from mlxkv.sizing.config import check_config

UNKNOWN_CONTEXT_TOKENS = 32_768
TRANSIENT_SHARE = 0.25
"""Of what is left beside the weights, a prefill chunk may take this much for a while."""


@dataclass(frozen=True)
class MemoryShares:
    """What is left of a machine beside the weights, shared out.

    Attributes:
        limit_bytes: most that may be used in all.
        weights_bytes: of the loaded model, as they are in memory.
        transient_bytes: what the largest prefill chunk holds for a while.
        hot_bytes: the hot tier's budget.
        live_bytes: what running sequences may hold together.
        runtime: the measured runtime share that is counted in `transient_bytes`; None where the budget's own is.
    """

    limit_bytes: int
    weights_bytes: int
    transient_bytes: int
    hot_bytes: int
    live_bytes: int
    chunk_tokens: int
    runtime: RuntimeShare | None = None


def share_memory(model: LoadedModel, *, hot_bytes: int | None, chunk_tokens: int | None) -> MemoryShares:
    """Share out this machine's memory; half of what is left goes to the hot tier unless `hot_bytes` says otherwise.

    Args:
        chunk_tokens: None takes 256 on a CPU, where that is fastest, and on a GPU the longest chunk, from 2,048 down to
            256, whose scores stay within a quarter of what is left.

    Raises:
        BudgetError: nothing is left for a sequence; says the numbers.

    Cost: a trace of the config, 0.05 to 1 s.
    """
    machine = with_measured(this_cpu() if on_cpu() else find_machine())
    traced = trace_model(Source(model.name, "loaded", check_config(model.config)))
    weights = int(tree_reduce(lambda total, array: total + array.nbytes, model.module.parameters(), 0))
    limit = int(machine.gpu_limit_bytes * MOST_SHARE)
    tokens = model.context_tokens or UNKNOWN_CONTEXT_TOKENS

    def transient(chunk: int) -> int:
        bill = Deployment(traced, machine, prefill_step_tokens=chunk).memory(tokens)
        return bill.transient_bytes + bill.runtime_bytes

    chunk = chunk_tokens or (CPU_CHUNK_TOKENS if on_cpu() else GPU_CHUNK_TOKENS)
    if chunk_tokens is None:
        while chunk > CPU_CHUNK_TOKENS and transient(chunk) > TRANSIENT_SHARE * (limit - weights):
            chunk //= 2
    left = limit - weights - transient(chunk)
    hot = max(left // 2, 0) if hot_bytes is None else hot_bytes
    if left - hot <= 0:
        raise BudgetError(
            f"of {format_bytes(limit)} the weights take {format_bytes(weights)}, a prefill chunk of {chunk:,} tokens"
            f" {format_bytes(transient(chunk))} and the hot tier {format_bytes(hot)}: nothing is left for a sequence;"
            " lower --hot or --prefill-chunk, or take a smaller model."
        )
    return MemoryShares(limit, weights, transient(chunk), hot, left - hot, chunk, machine.runtime)
