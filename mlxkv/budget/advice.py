"""What to change when something does not fit: settings are tried one by one, and only those that help are named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mlxkv.budget.machines import Machine, described_machine, table_sizes, with_wired_limit
from mlxkv.budget.memory import MOST_SHARE, Deployment
from mlxkv.budget.model import TracedModel, trace_model, with_weights
from mlxkv.core.errors import UsageError
from mlxkv.core.units import GIB, MIB, format_bytes
from mlxkv.sizing.trace import WeightSpec

_SMALLER_STEPS = (1024, 512, 256, 128)
_SMALL_STEP = 512
_KV_BITS = (8, 4)
_WEIGHT_BITS = (8, 4, 3)
_WIRED_STEP_BYTES = 256 * MIB


def advise(deployment: Deployment, tokens: int, sequences: int) -> tuple[str, ...]:
    """Sentences that each name one change that lets `sequences` sequences of `tokens` tokens run; empty if they do.

    Where no single change helps: two together, the longest context that fits, or a larger Mac.

    Cost: up to a second where it does not fit, because other precisions are tried; nothing otherwise.
    """
    judgement = deployment.judge(deployment.memory(tokens, sequences))
    if judgement.verdict == "fits":
        return ()
    if judgement.verdict == "tight":
        return (_when_tight(deployment, tokens, sequences),)
    context = deployment.model.context
    if context is not None and tokens > context.scaled_tokens:
        most = f"{context.scaled_tokens:,} tokens"
        return (f"The model reads at most {most}, whatever the memory; ask for that or take another model.",)
    quantised = tuple(_quantised_kv(deployment, tokens, sequences))
    fixes = list(_one_change(deployment, quantised, tokens, sequences))
    if not fixes:
        fixes += _two_changes(deployment, quantised, tokens, sequences)
    return (*fixes, *_last_resorts(deployment, tokens, sequences))


def _when_tight(deployment: Deployment, tokens: int, sequences: int) -> str:
    memory, machine = deployment.memory(tokens, sequences), deployment.machine
    left = machine.memory_bytes - memory.total_bytes
    if left < machine.system_bytes:
        return (
            f"Only {format_bytes(left)} of memory are left for macOS and other programs, which need about"
            f" {format_bytes(machine.system_bytes)}; close programs, or shorten the context."
        )
    return (
        f"{tokens:,} tokens take {_share(deployment, tokens, sequences)} of the GPU limit, and mlx-lm warns from 90 %;"
        " close other programs that use the GPU."
    )


def _one_change(
    deployment: Deployment, quantised: tuple[TracedModel, ...], tokens: int, sequences: int
) -> Iterator[str]:
    """One setting changed, the rest as it is."""
    for step in _SMALLER_STEPS:
        changed = replace(deployment, prefill_step_tokens=step)
        if step < deployment.prefill_step_tokens and changed.fits(tokens, sequences):
            yield f"--prefill-step {step}: prefill in smaller steps, {_total(changed, tokens, sequences)}."
            break
    for model in quantised:
        changed = replace(deployment, model=model)
        if changed.fits(tokens, sequences):
            yield f"--kv-bits {model.kv_bits}: quantised KV, {_total(changed, tokens, sequences)}."
            break
    fewer = deployment.max_sequences(tokens)
    if 0 < fewer < sequences:
        yield f"--sequences {fewer}: fewer at once, {_total(deployment, tokens, fewer)}."
    if deployment.hot_bytes:
        room = replace(deployment, hot_bytes=0).left_bytes(tokens, sequences) // MIB
        if room:
            yield f"--hot {room}MiB: a smaller hot tier; that much is left."
    for model in _smaller_weights(deployment):
        changed = replace(deployment, model=model)
        if changed.fits(tokens, sequences):
            yield f"--weights {model.bits:g}: a smaller quantisation, {_total(changed, tokens, sequences)}."
            break
    if raised := _with_raised_limit(deployment, tokens, sequences):
        yield _sysctl(raised.machine)


def _two_changes(
    deployment: Deployment, quantised: tuple[TracedModel, ...], tokens: int, sequences: int
) -> Iterator[str]:
    """A small prefill step, and with it quantised KV, a higher limit or smaller weights."""
    if deployment.prefill_step_tokens <= _SMALL_STEP:
        return
    small = replace(deployment, prefill_step_tokens=_SMALL_STEP)
    for model in quantised:
        changed = replace(small, model=model)
        if changed.fits(tokens, sequences):
            total = _total(changed, tokens, sequences)
            yield f"--prefill-step {_SMALL_STEP} --kv-bits {model.kv_bits}: only together, {total}."
            break
    if raised := _with_raised_limit(small, tokens, sequences):
        yield f"--prefill-step {_SMALL_STEP} and {_sysctl(raised.machine)}"
    for model in _smaller_weights(deployment):
        changed = replace(small, model=model)
        if changed.fits(tokens, sequences):
            total = _total(changed, tokens, sequences)
            yield f"--prefill-step {_SMALL_STEP} --weights {model.bits:g}: only together, {total}."
            return


def _last_resorts(deployment: Deployment, tokens: int, sequences: int) -> Iterator[str]:
    longest = deployment.max_context_tokens(sequences)
    if longest:
        yield f"--context {longest}: the longest context that fits as it is."
    machine = deployment.machine
    if machine.on_cpu:
        return
    for size in table_sizes():
        larger = replace(deployment, machine=described_machine(memory_bytes=size, macos=machine.macos))
        if size > machine.memory_bytes and larger.fits(tokens, sequences):
            yield f"--ram {size // GIB}GB: the smallest Mac in the table on which it fits as it is."
            return
    if not longest:
        most = table_sizes()[-1] // GIB
        yield f"No Mac in the table runs it as it is, not even one of {most} GB; take a smaller model."


def _with_raised_limit(deployment: Deployment, tokens: int, sequences: int) -> Deployment | None:
    """With the lowest GPU limit that suffices and leaves the system its share, or None where there is none."""
    machine = deployment.machine
    needed = int(deployment.memory(tokens, sequences).total_bytes / MOST_SHARE)
    limit = -(-needed // _WIRED_STEP_BYTES) * _WIRED_STEP_BYTES
    if machine.on_cpu or limit <= machine.gpu_limit_bytes or limit > machine.memory_bytes - machine.system_bytes:
        return None
    raised = replace(deployment, machine=with_wired_limit(machine, limit))
    return raised if raised.fits(tokens, sequences) else None


def _sysctl(machine: Machine) -> str:
    limit, rest = machine.gpu_limit_bytes, machine.memory_bytes - machine.gpu_limit_bytes
    return (
        f"sudo sysctl iogpu.wired_limit_mb={limit // MIB}: raises the GPU limit to {format_bytes(limit)} until the next"
        f" start. Warning: only {format_bytes(rest)} stay for everything else; too little freezes or panics the Mac."
    )


def _quantised_kv(deployment: Deployment, tokens: int, sequences: int) -> Iterator[TracedModel]:
    """The model with quantised KV, where mlx-lm can do it, it is not yet, and a quarter of its KV would have room."""
    model, memory = deployment.model, deployment.memory(tokens, sequences)
    least = memory.weights_bytes + memory.runtime_bytes + memory.hot_bytes + memory.kv_bytes // 4
    if model.kv_bits is not None or least > deployment.machine.gpu_limit_bytes:
        return
    try:
        for bits in _KV_BITS:
            yield trace_model(
                model.source, weights=model.weights, kv_bits=bits, kv_group_size=model.kv_group_size, quick=True
            )
    except UsageError:  # this cache cannot be quantised, whatever the bits
        return


def _smaller_weights(deployment: Deployment) -> Iterator[TracedModel]:
    """The model in fewer bits, most first; without those that the limit cannot hold even with no scales at all."""
    model = deployment.model
    for bits in _WEIGHT_BITS:
        least = model.trace.weights.params * bits // 8
        if bits < model.bits and least < deployment.machine.gpu_limit_bytes:
            yield with_weights(model, WeightSpec(bits))


def _total(deployment: Deployment, tokens: int, sequences: int) -> str:
    total = format_bytes(deployment.memory(tokens, sequences).total_bytes)
    return f"{total} in all, {_share(deployment, tokens, sequences)} of the GPU limit"


def _share(deployment: Deployment, tokens: int, sequences: int) -> str:
    return f"{deployment.memory(tokens, sequences).total_bytes / deployment.machine.gpu_limit_bytes:.0%}"
