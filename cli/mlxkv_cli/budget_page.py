"""The pages of `mlxkv budget`: at most 80 columns, without colour, figures in GiB and KiB."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column, Table

from mlxkv.core.units import GIB, KIB, format_bytes

if TYPE_CHECKING:
    from mlxkv.budget import Estimate, Plan
    from mlxkv.budget.terms import Term

_WIDTH = 79
_INDENT = 10
_BINDING = {
    "gpu_limit": "the GPU limit",
    "max_buffer": "the largest single buffer",
    "system_memory": "what is left for the system",
    "model_context": "the model's own maximum",
}
_TIME_UNITS = ((5400.0, 3600.0, "h"), (120.0, 60.0, "min"), (1.0, 1.0, "s"), (0.0, 0.001, "ms"))


def budget_page(plan: Plan, explained: Sequence[Term] = ()) -> RenderableType:
    """The answer for one model."""
    parts: list[RenderableType] = [*_head(plan), "", _memory_table(plan)]
    if plan.contexts[0].latency is not None:
        parts += ["", _latency_table(plan)]
    parts += ["", *_summary(plan)]
    if explained:
        parts += ["", *_explanation(plan, explained)]
    return Group(*parts)


def compare_page(plans: Sequence[Plan]) -> RenderableType:
    """Models side by side, at the longest context that was asked for."""
    tokens = plans[0].contexts[-1].tokens
    right = ("KiB/tok", "weights", f"KV {_short(tokens)}", "total", "longest", "cold", "tok/s")
    table = Table(
        Column("model", max_width=21, overflow="fold"),
        *(_figures(title) for title in right),
        Column("verdict", overflow="fold"),
        box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0),
    )  # fmt: skip
    for plan in plans:
        row = plan.contexts[-1]
        cold = "?" if row.latency is None else _time(row.latency.cold_s.mid)
        rate = "?" if row.latency is None else f"{row.latency.decode_tokens_per_s.mid:,.0f}"
        table.add_row(
            plan.model, _kib(plan.kv.bytes_per_token), _gib(plan.weights.bytes), _gib(row.memory.kv_bytes),
            _gib(row.memory.total_bytes), f"{plan.max_context_tokens:,}", cold, rate,
            "no" if row.verdict == "does not fit" else row.verdict,
        )  # fmt: skip
    head = [
        f"{tokens:,} tokens, {_sequences(plans[0])}; GiB; seconds are estimates",
        *_labelled("machine", _machine(plans[0])),
    ]
    return Group(*head, "", table)


def _head(plan: Plan) -> Iterator[str]:
    kv = plan.kv
    yield from textwrap.wrap(f"{plan.model}: {plan.origin}", _WIDTH, subsequent_indent="  ")
    block = f"{_kib(kv.bytes_per_block)} KiB ({kv.bytes_per_block:,} B)"
    yield from _labelled("KV", f"{_kib(kv.bytes_per_token)} KiB a token, {block} a block of {kv.block_tokens} tokens")
    if kv.window_tokens:
        window = f"{_kib(kv.window_bytes_per_token)} KiB a token in windows of at most {kv.window_tokens:,} tokens"
        yield from _labelled("", f"and {window}")
    if kv.fixed_bytes:
        yield from _labelled("", f"and {format_bytes(kv.fixed_bytes)} of state, at any length")
    if kv.first_block_bytes != kv.bytes_per_block:
        yield from _labelled("", f"a sequence's first block: {_kib(kv.first_block_bytes)} KiB")
    if kv.formula_note:
        yield from _labelled("", kv.formula_note)
    weights = f"{_gib(plan.weights.bytes)} GiB: {plan.weights.params:,} parameters at {plan.weights.bits:g} bits"
    yield from _labelled("weights", weights)
    yield from _labelled("machine", _machine(plan))
    for name, tier in (("hot tier", plan.hot), ("cold tier", plan.cold)):
        if tier is not None:
            held = f"{tier.tokens:,} tokens of prefixes ({tier.tokens // kv.block_tokens:,} blocks)"
            yield from _labelled(name, f"{format_bytes(tier.bytes)} hold {held}")


def _machine(plan: Plan) -> str:
    machine = plan.machine
    if machine.on_cpu:
        return f"{machine.chip}, {format_bytes(machine.memory_bytes)} ({machine.source})"
    limits = f"GPU limit {format_bytes(machine.gpu_limit_bytes)}"
    if machine.max_buffer_bytes is not None:
        limits += f", largest buffer {format_bytes(machine.max_buffer_bytes)}"
    return f"{machine.chip or 'unknown chip'}, {format_bytes(machine.memory_bytes)}, {limits} ({machine.source})"


def _memory_table(plan: Plan) -> Table:
    right = ("context", "KV", "weights", "transient", "total", "of limit")
    table = Table(
        *(_figures(title) for title in right), Column("verdict", overflow="fold"), _figures("at once"),
        box=None, pad_edge=False, header_style="bold", title=f"GiB for {_sequences(plan)}", title_justify="left",
        title_style="",
    )  # fmt: skip
    for row in plan.contexts:
        memory = row.memory
        table.add_row(
            f"{row.tokens:,}", _gib(memory.kv_bytes), _gib(memory.weights_bytes), _gib(memory.transient_bytes),
            _gib(memory.total_bytes), f"{row.share:.0%}", row.verdict, f"{row.max_sequences:,}",
        )  # fmt: skip
    return table


def _figures(title: str) -> Column:
    """A column of numbers; on a narrow terminal they are folded, for a digit left out would make another number."""
    return Column(title, justify="right", overflow="fold")


def _latency_table(plan: Plan) -> Table:
    right = ("context", "cold", "from hot", "from SSD", "tokens/s")
    table = Table(
        *(_figures(title) for title in right),
        box=None, pad_edge=False, header_style="bold", title_justify="left", title_style="",
        title="Time to the first token, then the rate: estimates, with their range",
    )  # fmt: skip
    for row in plan.contexts:
        if row.latency is not None:
            waits = (row.latency.cold_s, row.latency.hot_s, row.latency.ssd_s)
            rate = row.latency.decode_tokens_per_s
            rates = f"{_digits(rate.mid)} ({_digits(rate.low)}-{_digits(rate.high)})"
            table.add_row(f"{row.tokens:,}", *map(_time_range, waits), rates)
    return table


def _summary(plan: Plan) -> Iterator[str]:
    fixed = plan.contexts[0].memory
    measured = plan.machine.runtime is not None
    share = f"{_gib(fixed.runtime_bytes)} GiB runtime share{' (measured on this machine)' if measured else ''}"
    other = [share] if fixed.runtime_bytes or measured else []
    other += [f"{_gib(fixed.hot_bytes)} GiB hot tier"] if fixed.hot_bytes else []
    yield from textwrap.wrap(
        f"total includes {' and '.join([*other, 'allocation in steps'])}; at once: sequences that fit.", _WIDTH
    )
    yield from textwrap.wrap(_longest(plan), _WIDTH)
    advised = next(row for row in plan.contexts if row.tokens == plan.advised_tokens)
    bound = _BINDING[advised.binding]
    near = f"nearest bound: {bound}" if advised.verdict == "fits" else f"{bound} binds"
    yield from textwrap.wrap(f"{advised.tokens:,} tokens: {advised.verdict}; {near}.", _WIDTH)
    if plan.advice:
        yield ""
        yield f"What to change for {advised.tokens:,} tokens:" if not advised.fits else "Mind:"
        for sentence in plan.advice:
            yield from textwrap.wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _longest(plan: Plan) -> str:
    context = plan.deployment.model.context
    most = "the config states no maximum" if context is None else f"the model reads {context.scaled_tokens:,}"
    if context is not None and context.native_tokens != context.scaled_tokens:
        most += f", {context.native_tokens:,} without its rope scaling"
    return f"Longest context that fits: {plan.max_context_tokens:,} tokens ({most})."


def _explanation(plan: Plan, explained: Sequence[Term]) -> Iterator[str]:
    yield f"Every term at {plan.advised_tokens:,} tokens:"
    for term in explained:
        yield f"  {term.name:<22}{term.value:>14}"
        for text in (term.formula, term.source):
            if text:
                yield from textwrap.wrap(text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 8)


def _labelled(label: str, text: str) -> list[str]:
    """`label` in the margin of wrapped text."""
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{label:<{_INDENT}}", subsequent_indent=" " * _INDENT)


def _sequences(plan: Plan) -> str:
    count = plan.contexts[0].sequences
    shared = plan.deployment.shared_prefix_tokens
    said = "one sequence" if count == 1 else f"{count:,} sequences"
    return f"{said} over {shared:,} common tokens" if shared and count > 1 else said


def _gib(count: int) -> str:
    return f"{count / GIB:,.2f}"


def _kib(count: int) -> str:
    return f"{count / KIB:,.2f}".rstrip("0").rstrip(".")


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _time_unit(seconds: float) -> tuple[float, str]:
    return next((unit, name) for least, unit, name in _TIME_UNITS if seconds >= least)


def _time(seconds: float) -> str:
    unit, name = _time_unit(seconds)
    return f"{_digits(seconds / unit)} {name}"


def _time_range(estimate: Estimate) -> str:
    """The middle and the range in one unit: `12 (10-23) s`."""
    unit, name = _time_unit(estimate.mid)
    low, mid, high = (_digits(seconds / unit) for seconds in (estimate.low, estimate.mid, estimate.high))
    return f"{mid} ({low}-{high}) {name}"


def _digits(value: float) -> str:
    """Two significant digits, and all digits before the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
