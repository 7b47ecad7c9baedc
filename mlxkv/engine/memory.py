"""How a server shares out a machine's memory: the hot tier, running sequences, and how long a prefill chunk may be."""

from __future__ import annotations

from dataclasses import dataclass

from mlx.utils import tree_reduce

from mlxkv.budget.machines import Machine, RuntimeShare, find_machine, this_cpu
from mlxkv.budget.measured import with_measured
from mlxkv.budget.memory import MOST_SHARE, Deployment
from mlxkv.budget.model import TracedModel, trace_model
from mlxkv.budget.source import Source
from mlxkv.core.errors import BudgetError
from mlxkv.core.units import format_bytes
from mlxkv.engine.chunks import CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS, Chunks, in_time, plan_chunks
from mlxkv.models.loader import LoadedModel, on_cpu
from mlxkv.sizing.config import check_config

UNKNOWN_CONTEXT_TOKENS = 32_768
TRANSIENT_SHARE = 1 / 16
"""Of what is left beside the weights, a prefill chunk may take this much for a while; where it would, it is halved."""


@dataclass(frozen=True)
class MemoryShares:
    """What is left of a machine beside the weights, shared out.

    Attributes:
        limit_bytes: most that may be used in all.
        weights_bytes: of the loaded model, as they are in memory.
        transient_bytes: most that a prefill chunk holds for a while, and the runtime share.
        hot_bytes: the hot tier's budget.
        live_bytes: what running sequences may hold together.
        runtime: the measured runtime share that is counted in `transient_bytes`; None where the budget's own is.
    """

    limit_bytes: int
    weights_bytes: int
    transient_bytes: int
    hot_bytes: int
    live_bytes: int
    chunks: Chunks
    runtime: RuntimeShare | None = None


def share_memory(model: LoadedModel, *, hot_bytes: int | None, chunk_tokens: int | None) -> MemoryShares:
    """Share out this machine's memory; half of what is left goes to the hot tier unless `hot_bytes` says otherwise.

    Args:
        chunk_tokens: the longest chunk. None is 256 on a CPU, where that is fastest, and 2,048 on a GPU. Where a
            prompt is so deep that a chunk would take more than a sixteenth of what is left, or too long for a GPU, it
            is halved.

    Raises:
        BudgetError: nothing is left for a sequence; says the numbers.

    Cost: a trace of the config, 0.05 to 1 s.
    """
    machine = with_measured(this_cpu() if on_cpu() else find_machine())
    traced = trace_model(Source(model.name, "loaded", check_config(model.config)))
    weights = int(tree_reduce(lambda total, array: total + array.nbytes, model.module.parameters(), 0))
    limit = int(machine.gpu_limit_bytes * MOST_SHARE)
    tokens = model.context_tokens or UNKNOWN_CONTEXT_TOKENS

    chunks = prefill_chunks(traced, machine, limit - weights, chunk_tokens)
    reserve = max(_step_bytes(traced, machine, length, end) for length, end in chunks.peaks(tokens))
    left = limit - weights - reserve
    hot = max(left // 2, 0) if hot_bytes is None else hot_bytes
    if left - hot <= 0:
        raise BudgetError(
            f"of {format_bytes(limit)} the weights take {format_bytes(weights)}, prefill chunks of at most"
            f" {chunks.longest:,} tokens {format_bytes(reserve)} and the hot tier {format_bytes(hot)}: nothing is left"
            " for a sequence; lower --hot or --prefill-chunk, or take a smaller model."
        )
    return MemoryShares(limit, weights, reserve, hot, left - hot, chunks, machine.runtime)


def prefill_chunks(traced: TracedModel, machine: Machine, spare_bytes: int, longest: int | None = None) -> Chunks:
    """How long a prefill chunk of a model may be on a machine, by where it begins.

    Args:
        spare_bytes: what is left beside the weights.
        longest: None is 256 on a CPU and 2,048 on a GPU.

    Cost: about a hundred bills, microseconds each.
    """
    most_bytes = TRANSIENT_SHARE * spare_bytes

    def fits(length: int, end: int) -> bool:
        grown = _step_bytes(traced, machine, length, end) - _step_bytes(traced, machine, length, 1)
        return grown <= most_bytes and (machine.on_cpu or in_time(length, end))

    return plan_chunks(fits, longest or (CPU_CHUNK_TOKENS if machine.on_cpu else GPU_CHUNK_TOKENS))


def _step_bytes(traced: TracedModel, machine: Machine, length: int, end: int) -> int:
    """What a chunk that ends at so many tokens holds for a while, and the runtime share."""
    bill = Deployment(traced, machine, prefill_step_tokens=length).memory(end)
    return bill.transient_bytes + bill.runtime_bytes
