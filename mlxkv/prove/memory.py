"""Peak memory against what `budget` said for the very same runs, and the runtime share that follows from both."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import mlx.core as mx
from mlx.utils import tree_reduce

from mlxkv.budget.machines import Machine, RuntimeShare, find_machine, this_cpu
from mlxkv.budget.measured import remember, with_measured
from mlxkv.budget.memory import Deployment
from mlxkv.budget.model import TracedModel, trace_model
from mlxkv.budget.source import Source
from mlxkv.core.units import MIB, format_bytes
from mlxkv.models.loader import LoadedModel, on_cpu
from mlxkv.prompt_cache.adapter import plain_prompt_cache
from mlxkv.prove.check import Check, Figure, why
from mlxkv.prove.runs import Subject, chunk_tokens, prefill_plain
from mlxkv.sizing.config import check_config

PARTS = (4, 2, 1)  # of the prompt: runs of a quarter, a half and all of it
ALLOWED_SHARE, ALLOWED_BYTES = 0.05, 4 * MIB
"""How far a peak may be above what was said: allocators round, and a small model has little to round."""


@dataclass(frozen=True)
class Peak:
    """One run: what it took beyond the weights at most, and what was said of it."""

    tokens: int
    peak_bytes: int
    said_bytes: int
    runtime_bytes: int

    @property
    def share_bytes(self) -> int:
        """What is left for the runtime."""
        return self.peak_bytes - (self.said_bytes - self.runtime_bytes)


def check_memory(subject: Subject) -> tuple[Check, RuntimeShare | None]:
    """Prefill a few lengths and hold MLX's peak against the bill; the share is the most that was left over.

    The second is what to remember; None where nothing could be measured.
    """
    model, machine = subject.model, with_measured(this_machine())
    traced = trace_model(Source(model.name, "loaded", _as_it_runs(model)))
    deployment = Deployment(traced, machine, prefill_step_tokens=chunk_tokens())
    weights = int(tree_reduce(lambda total, array: total + array.nbytes, model.module.parameters(), 0))
    peaks = [_measure(subject, deployment, len(subject.prompt) // part) for part in PARTS]
    if not all(peak.peak_bytes for peak in peaks):
        return Check("memory", "note", "MLX does not count memory on this device", {}, "Nothing to do."), None
    share = _share(traced, peaks)
    return _judge(peaks, weights, share, measured_before=machine.runtime is not None), share


def keep(share: RuntimeShare) -> Check:
    """Remember the share for `budget` and `serve`."""
    figures: dict[str, Figure] = {"runtime_share_bytes": share.bytes}
    machine = this_machine()
    if not machine.here:
        said = f"{format_bytes(share.bytes)}, and `budget` knows no limits of this device"
        return Check("runtime share", "note", said, figures, "Nothing to do: it is not kept.")
    try:
        remember(machine, share)
    except OSError as error:
        return Check("runtime share", "note", f"it cannot be kept: {why(error)}", figures,
                     "Make the cache directory of your user writable; until then `budget` uses its own.")  # fmt: skip
    said = f"{format_bytes(share.bytes)}, measured; `budget` and `serve` use it here from now on"
    return Check("runtime share", "ok", said, figures)


def this_machine() -> Machine:
    """The machine that MLX computes on now."""
    return this_cpu() if on_cpu() else find_machine()


def _as_it_runs(model: LoadedModel) -> dict[str, object]:
    """The config in the precision that was loaded: on a CPU everything is float32."""
    return check_config({**model.config, **({"torch_dtype": "float32"} if on_cpu() else {})})


def _measure(subject: Subject, deployment: Deployment, tokens: int) -> Peak:
    """Prefill `tokens` tokens and feed the last, with nothing else running."""
    prompt, model = subject.prompt[:tokens], subject.model
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    prompt_cache = plain_prompt_cache(model.module)
    prefill_plain(model, prompt_cache, prompt)
    mx.eval(model.module(mx.array([prompt[-1:]]), cache=prompt_cache))
    peak = max(mx.get_peak_memory() - before, 0)
    bill = deployment.memory(len(prompt))
    return Peak(tokens, peak, bill.total_bytes - bill.weights_bytes, bill.runtime_bytes)


def _share(traced: TracedModel, peaks: Sequence[Peak]) -> RuntimeShare:
    most = max(0, *(peak.share_bytes for peak in peaks))
    today = datetime.now(UTC).date().isoformat()
    step_tokens = min(chunk_tokens(), max(peak.tokens for peak in peaks))
    return RuntimeShare(most, traced.name, traced.hidden_size, step_tokens, today)


def _judge(peaks: Sequence[Peak], weights_bytes: int, share: RuntimeShare, *, measured_before: bool) -> Check:
    """The run that came nearest to its bill, or went furthest beyond it."""
    worst = max(peaks, key=lambda peak: peak.peak_bytes - peak.said_bytes)
    peak, said_bytes = weights_bytes + worst.peak_bytes, weights_bytes + worst.said_bytes
    figures: dict[str, Figure] = {
        "tokens": worst.tokens, "weights_bytes": weights_bytes, "peak_bytes": peak, "budget_bytes": said_bytes,
        "runtime_share_bytes": share.bytes, "runtime_share_was": "measured" if measured_before else "estimated",
    }  # fmt: skip
    said = (
        f"{worst.tokens:,} tokens took {format_bytes(peak)}, weights included, where `budget` says"
        f" {format_bytes(said_bytes)}"
    )
    if worst.peak_bytes > worst.said_bytes * (1 + ALLOWED_SHARE) + ALLOWED_BYTES:
        advice = "What was measured is counted from now on: run it again, and report it if it fails once more."
        return Check("memory", "fail", said, figures, advice)
    return Check("memory", "ok", said, figures)
