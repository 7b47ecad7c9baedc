"""Every term of a total with its formula, filled in, and where it comes from: what `--explain` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlxkv.budget.latency import prefill_flops
from mlxkv.budget.memory import FITS_SHARE, MOST_SHARE, RUNTIME_BYTES, Deployment, Memory
from mlxkv.core.units import format_bytes


@dataclass(frozen=True)
class Term:
    """One line of the bill.

    Attributes:
        value: with its unit.
        formula: with the numbers in it.
        source: a measurement, a file, an issue, or that it is a judgement.
    """

    name: str
    value: str
    formula: str
    source: str


def terms(deployment: Deployment, tokens: int, sequences: int) -> tuple[Term, ...]:
    """The terms of `tokens` tokens for `sequences` sequences, then the checks, then the FLOPs."""
    memory = deployment.memory(tokens, sequences)
    return (
        *_weights(deployment, memory),
        *_kv(deployment, memory),
        *_transient(deployment, memory),
        *_rest(deployment, memory),
        *_checks(deployment, memory),
        *_flops(deployment, tokens),
    )


def _weights(deployment: Deployment, memory: Memory) -> Iterator[Term]:
    model = deployment.model
    stored = model.trace.weights
    mean = stored.bytes * 8 / stored.params
    precision = (
        "in the precision the config states"
        if model.weights is None
        else f"brought to {model.bits:g} bits by the class's own rule"
    )
    yield Term(
        "weights",
        format_bytes(memory.weights_bytes),
        f"{stored.params:,} parameters x {mean:.3f} bits / 8, scales and biases included",
        f"traced: mlx-lm's class built lazily, {precision}",
    )
    if model.source.files_bytes is not None:
        yield Term("", format_bytes(model.source.files_bytes), "the files on the disk", "sizes in the directory")


def _kv(deployment: Deployment, memory: Memory) -> Iterator[Term]:
    traced, tokens, sequences = deployment.model.trace, memory.tokens, memory.sequences
    each = f" x {sequences} sequences" if sequences > 1 else ""
    if growth := traced.growth_bytes_per_token:
        yield Term(
            "KV, growing",
            format_bytes(growth * tokens * sequences),
            f"{growth:,} B x {tokens:,} tokens{each}",
            "traced: mlx-lm's cache after two unevaluated forward passes, 64 and 128 tokens",
        )
    shared = min(deployment.shared_prefix_tokens, tokens)
    if shared and sequences > 1:
        yield Term(
            "shared prefix",
            f"-{format_bytes(growth * shared * (sequences - 1))}",
            f"{growth:,} B x {shared:,} tokens x {sequences - 1}, kept once",
            "mlxkv's shared-prefix attention; mlx-lm gives each sequence its own copy",
        )
    if traced.window_bytes_per_token:
        held = sum(cost.window_bytes_per_token * min(tokens, cost.window_tokens) for cost in traced.costs)
        yield Term(
            "KV, windows",
            format_bytes(held * sequences),
            f"{traced.window_bytes_per_token:,} B x min(tokens, {traced.window_tokens:,}){each}",
            "traced: the window of mlx-lm's rotating and chunked caches",
        )
    if traced.fixed_bytes:
        yield Term(
            "state", format_bytes(traced.fixed_bytes * sequences), f"{traced.fixed_bytes:,} B{each}",
            "traced: recurrent and convolution state, the same at every length",
        )  # fmt: skip
    yield Term(
        "allocation",
        format_bytes(memory.slack_bytes),
        f"rows in steps of 256 tokens; windows + {deployment.prefill_step_tokens:,} - 1 while a step is prefilled",
        "mlx_lm/models/cache.py: KVCache.step, RotatingKVCache._update_concat",
    )


def _transient(deployment: Deployment, memory: Memory) -> Iterator[Term]:
    calls = {deployment.attention_note(call, memory.tokens) for call in deployment.model.trace.attention}
    formula = "; ".join(sorted(calls)) or "no attention"
    yield Term(
        "prefill transient",
        format_bytes(memory.transient_bytes),
        formula + ("; mask, one layer's KV, queued operations" if deployment.machine.on_cpu else ""),
        "mlx scaled_dot_product_attention.cpp; ml-explore/mlx-lm#1480, #839; on Metal a lower bound",
    )


def _rest(deployment: Deployment, memory: Memory) -> Iterator[Term]:
    measured = deployment.machine.runtime
    if measured is not None:
        yield Term(
            "runtime share",
            format_bytes(memory.runtime_bytes),
            f"{measured.bytes:,} B with {measured.model} at hidden size {measured.hidden_size:,} and"
            f" {measured.step_tokens:,} tokens a step, in proportion where either is larger",
            f"measured on this machine on {measured.date} by `mlxkv doctor --prove`",
        )
    elif memory.runtime_bytes:
        yield Term(
            "runtime share", format_bytes(memory.runtime_bytes), f"{RUNTIME_BYTES:,} B, a constant",
            "estimate, fitted on ml-explore/mlx-lm#1480 (M5 Max, eight lengths)",
        )  # fmt: skip
    if deployment.hot_bytes:
        yield Term("hot tier", format_bytes(memory.hot_bytes), "its budget", "--hot")
    yield Term("total", format_bytes(memory.total_bytes), "the sum", "")


def _checks(deployment: Deployment, memory: Memory) -> Iterator[Term]:
    machine = deployment.machine
    yield Term(
        "GPU limit",
        format_bytes(machine.gpu_limit_bytes),
        f"total at most {MOST_SHARE:.0%} of it, tight from {FITS_SHARE:.0%}",
        machine.source,
    )
    if machine.max_buffer_bytes is not None:
        yield Term(
            "largest buffer",
            format_bytes(memory.largest_buffer_bytes),
            f"{memory.largest_buffer}; at most {format_bytes(machine.max_buffer_bytes)}",
            "Metal's maxBufferLength"
            + (", by the rule in macs.json" if "max_buffer_bytes" in machine.estimated else ""),
        )
    yield Term(
        "left for the system",
        format_bytes(max(0, machine.memory_bytes - memory.total_bytes)),
        f"{format_bytes(machine.memory_bytes)} - total; a warning below {format_bytes(machine.system_bytes)}",
        "a judgement: an eighth of memory, 2 to 8 GiB",
    )


def _flops(deployment: Deployment, tokens: int) -> Iterator[Term]:
    flops = prefill_flops(deployment, tokens)
    yield Term(
        "prefill, linear",
        f"{flops.linear / 1e12:,.2f} TFLOP",
        f"2 x {deployment.model.linear_params:,} active parameters x {tokens:,} tokens",
        "traced: without looked-up tables, idle experts and the head",
    )
    yield Term(
        "prefill, quadratic",
        f"{flops.quadratic / 1e12:,.2f} TFLOP",
        "2 x heads x (key + value size) x pairs of query and key, summed over layers",
        "traced attention shapes; steps computed as MLX does",
    )
