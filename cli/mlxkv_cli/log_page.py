"""The pages of `mlxkv log` and `mlxkv why`: figures laid out for a terminal of 60 columns or more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from mlxkv.blocklog.events import Event
from mlxkv.blocklog.readers import LogReader
from mlxkv.blocklog.summary import Summary
from mlxkv.blocklog.verdict import Trouble, counted
from mlxkv.blocklog.why import Divergence
from mlxkv.cache.names import BLOCK_TOKENS
from mlxkv.core.units import KIB, format_bytes, format_seconds
from mlxkv_cli.output import printable

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 30
_BAR_WIDTH = 24
ROOMY = 78  # columns that a wide table needs


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """Values as bars of eight heights, at most `width` of them; neighbours are averaged.

    >>> sparkline([0, 1, 2, 4])
    '▁▃▄█'
    """
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    top = max(means) or 1
    return "".join(_BARS[min(int(mean / top * len(_BARS)), len(_BARS) - 1)] for mean in means)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "n/a"


def _table(*columns: str | Column) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def _name(title: str) -> Column:
    return Column(title, no_wrap=True)


def _right(title: str) -> Column:
    return Column(title, justify="right", no_wrap=True)


def summary_page(
    found: Summary, reader: LogReader, trouble: Sequence[Trouble], said: Sequence[str], exact: Mapping[str, int]
) -> RenderableType:
    """Everything `mlxkv log summary` shows.

    Args:
        exact: bytes of a 64-token block of the models that are known, in 2-byte numbers.
    """
    parts: list[RenderableType] = [_head(found, reader), ""]
    if found.requests:
        parts += [_tokens(found), _kinds_of_tokens(found), ""]
        if found.bins.prompt:
            step = format_seconds(found.bins.step_s)
            parts += [f"tokens reused over time  {sparkline(found.bins.hits())}  ({step} a step)", ""]
        parts += [table for table in (_reasons(found), _causes(found), _ttft(found)) if table is not None]
    parts.append(_pairs(_blocks(found, exact)))
    if trouble:
        parts += ["", Text("trouble", "bold")]
        parts += [_listed(f"{each.name}: {each.seen}. {each.advice}") for each in trouble]
    parts += ["", Text("verdict", "bold"), *(_listed(sentence) for sentence in said)]
    return Group(*parts)


def _listed(text: str) -> Padding:
    return Padding(Text(printable(text)), (0, 0, 0, 2))


def _head(found: Summary, reader: LogReader) -> Text:
    models = ", ".join(name for name, _ in found.models.most_common(3))
    when = f"{_short(found.first_time)} to {_short(found.last_time)}" if found.first_time else ""
    said = [", ".join(sorted(found.sources)) or "nothing known", models, when]
    lines = [f"{reader.lines:,} lines"]
    for count, what in (
        (reader.unknown_lines, "unknown"), (reader.continued_lines, "continued"), (reader.torn_lines, "torn"),
        (reader.read.cut_lines, "without an end"),
    ):  # fmt: skip
        if count:
            lines.append(f"{count:,} {what}")
    if reader.read.duplicates:
        lines.append(f"{len(reader.read.duplicates)} files given twice")
    return Text(printable("; ".join(part for part in said if part)) + "\n" + ", ".join(lines))


def _short(time: str | None) -> str:
    return (time or "?")[:19].replace("T", " ")


def _tokens(found: Summary) -> Table:
    known = found.hit_tokens + found.computed_tokens
    table = _table("prompt tokens", _right(""), _right(""), "")
    rows = [
        ("hot (memory)", found.hot_tokens), ("cold (SSD)", found.cold_tokens),
        ("reused, tier not logged", found.untiered_tokens), ("computed", found.computed_tokens),
        ("reuse not logged", found.unknown_tokens),
    ]  # fmt: skip
    for name, count in rows:
        if count or name in ("hot (memory)", "computed"):
            share = _share(count, known) if name != rows[-1][0] else ""
            bar = "█" * round(_BAR_WIDTH * count / known) if known and share else ""
            table.add_row(f"  {name}", f"{count:,}", share, bar)
    table.add_row("  all", f"{found.prompt_tokens:,}", "", "")
    return table


def _kinds_of_tokens(found: Summary) -> Text:
    said = [
        counted(found.requests, "request"), f"{found.looked_up_tokens:,} tokens looked up",
        f"{found.cold_tokens:,} restored from the SSD",
        f"{found.hit_tokens:,} not computed",
    ]  # fmt: skip
    if found.tail_tokens:
        said.append(f"{found.tail_tokens:,} of them from tails")
    for count, what in (
        (found.unfinished_requests, "unfinished"), (found.short_requests, "shorter than a block"),
        (found.unknown_requests, "without a word on reuse"),
    ):  # fmt: skip
        if count:
            said.append(f"{counted(count, 'request')} {what}")
    return Text(", ".join(said))


def _reasons(found: Summary) -> Group | None:
    lost = [(reason, each) for reason, each in found.lost() if reason != "all reused"]
    if not lost:
        return None
    table = _table("stopped matching because", _right("requests"), _right("tokens lost"))
    for reason, each in lost[:10]:
        table.add_row(f"  {printable(reason)}", f"{each.requests:,}", f"{each.tokens:,}")
    return Group(table, "")


def _causes(found: Summary) -> Group | None:
    if not found.causes:
        return None
    table = _table("likely cause", _right("requests"), _right("tokens lost"))
    for cause, each in found.ranked_causes()[:10]:
        table.add_row(f"  {cause}", f"{each.requests:,}", f"{each.tokens:,}")
    return Group(table, "")


def _ttft(found: Summary) -> Group | None:
    if not found.ttft:
        return None
    table = _table("first token", _right("requests"), _right("median"), _right("95 %"))
    for name in ("reused", "partly reused", "computed"):
        if name in found.ttft:
            sample = found.ttft[name]
            table.add_row(f"  {name}", f"{sample.count:,}", *(format_seconds(sample.at(q) or 0) for q in (0.5, 0.95)))
    return Group(table, "")


def _blocks(found: Summary, exact: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    counts = (
        (found.committed_tails, "tail"), (found.committed_checkpoints, "checkpoint"), (found.restores, "restore"),
        (found.quarantined_blocks, "set aside"),
    )  # fmt: skip
    parts = [f"{found.committed_blocks:,} committed"]
    parts += [counted(count, what) if what != "set aside" else f"{count:,} {what}" for count, what in counts if count]
    parts += [f"{count:,} evicted ({tier})" for tier, count in sorted(found.evicted_blocks.items())]
    yield "blocks", ", ".join(parts)
    if found.write_amplification is not None:
        size, times = format_bytes(found.written_bytes), found.write_amplification
        yield "written", f"{counted(found.written_blocks, 'block')}, {size}; each byte {times:.2f} times"
    for model, sizes in found.block_bytes.items():
        size_bytes, count = sizes.most_common(1)[0]
        said = f"{size_bytes / KIB:,.2f} KB a block of 64 tokens, {model} ({counted(count, 'block')})"
        if model in exact and size_bytes == exact[model]:
            said += "; the model's exact value"
        elif model in exact:
            said += f"; {size_bytes / exact[model]:.2f} times the {exact[model] / KIB:,.2f} KB of 2-byte numbers"
        yield "size", said
    for each in found.geometry:
        kv = each.layers if each.kv_layers is None else each.kv_layers
        exactly = "exact" if each.block64_bytes == each.exact_bytes else f"{each.exact_bytes / KIB:,.2f} KB"
        said = f"the log says {each.block64_bytes / KIB:,.2f} KB per 64-token block;"
        yield "size", f"{said} {kv} layers with KV, {each.kv_heads} heads x {each.head_dim}: {exactly}"
    if found.block_tokens not in (None, BLOCK_TOKENS):
        yield "size", f"the server's own blocks have {found.block_tokens:,} tokens"
    if found.unstored_tokens:
        yield "tails", f"{found.unstored_tokens:,} tokens were not stored: they fill no block"
    if found.scans:
        yield "scan", ", ".join(f"{name} {count:,}" for name, count in found.scans.items())
    for name, tier in sorted(found.tiers.items(), reverse=True):
        fill = "budget not logged"
        if tier.budget_bytes:
            fill = f"{_share(tier.peak_bytes, tier.budget_bytes)} of {format_bytes(tier.budget_bytes)}"
        yield name, "off" if tier.off else f"{format_bytes(tier.peak_bytes)} at the fullest, {fill}"


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and what is said of them, folded beside the name."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, said in rows:
        grid.add_row(printable(name), printable(said))
    return grid


def requests_table(events: Sequence[Event], width: int) -> Table:
    """One request a row; under `ROOMY` columns without time, tiers and the first token."""
    if width < ROOMY:
        table = _table(_name("request"), *map(_right, ("prompt", "reused", "computed")), "stopped matching")
        for event in events:
            known = (event.prompt_tokens, event.hit_tokens, event.computed_tokens)
            table.add_row(printable(event.request or ""), *map(_number, known), _stopped(event))
        return table
    titles = ("prompt", "hot", "cold", "computed", "first")
    table = _table("time", _name("request"), *map(_right, titles), "stopped matching")
    for event in events:
        hot = event.hot_tokens if event.hot_tokens is not None else event.reused_tokens
        numbers = (event.prompt_tokens, hot, event.cold_tokens, event.computed_tokens)
        first = "" if event.ttft_s is None else format_seconds(event.ttft_s)
        table.add_row(
            (event.time or "")[11:19], printable(event.request or ""), *map(_number, numbers), first, _stopped(event)
        )
    return table


def _number(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def _stopped(event: Event) -> str:
    return ("" if event.finished else "unfinished; ") + printable(event.reason or "")


def why_page(found: Divergence, words: tuple[str, str, str] | None) -> RenderableType:
    """What `mlxkv why` says of one request."""
    place = f"token {found.token:,}" if found.exact else f"between token {found.token:,} and {found.latest_token:,}"
    if found.nearest is not None and found.token >= found.matched_tokens + found.lost_tokens:
        place = "no token: an earlier prompt begins with all of this one"
    where = {"tools": "in the tools", "end": "behind the last message", "reply": "in the reply", None: ""}.get(
        found.role, f"in message {found.index} ({found.role})"
    )
    nearest = found.nearest or "no earlier request is known to share anything"
    rows = [
        ("request", found.request),
        ("nearest", nearest + (f" of {_short(found.nearest_time)}" if found.nearest_time else "")),
        ("differs at", place + (f", {where}" if where else "")),
        ("reused", f"up to token {found.matched_tokens:,}; {counted(found.lost_tokens, 'token')} computed from there"),
        ("cause", f"{found.cause}: {found.detail}"),
    ]
    if found.advice:
        rows.append(("advice", found.advice))
    parts: list[RenderableType] = [_pairs(rows)]
    if words is not None:
        before, now, then = (repr(text)[1:-1] for text in words)
        parts += ["", _pairs([("", f"...{before}"), ("now", now), ("before", then)])]
    return Group(*parts)


def blocks_table(rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    """One block a row, as `blocks.BlockRow.to_fields` gives it; under `ROOMY` columns without times and writes."""
    roomy = width >= ROOMY
    titles = ("tokens", "KB", "tier", "hits", *(("born", "used", "KB written") if roomy else ()))
    table = _table(_name("block"), _name("chain"), *map(_right, titles))
    for row in rows:
        more = ((row["born"] or "")[11:19], (row["last_used"] or "")[11:19], f"{row['written_bytes'] / KIB:,.0f}")
        names = (printable(row["block"][:12]), f"{printable(row['chain'][:8])} {row['index']}")
        sizes = (str(row["tokens"]), f"{row['bytes'] / KIB:,.0f}")
        table.add_row(*names, *sizes, row["tier"] or "gone", f"{row['hits']:,}", *(more if roomy else ()))
    return table
