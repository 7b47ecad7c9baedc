"""`mlxkv cache`: what is on the SSD, whether it is sound, and how to make it less."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Column, Table

from mlxkv.core.config import COLD_BYTES, DAILY_WRITE_BYTES, default_floor_bytes, default_hot_bytes
from mlxkv.core.errors import CacheRootError, UsageError
from mlxkv.core.platform import default_cache_dir
from mlxkv.core.units import format_bytes
from mlxkv_cli.caching import warnings_on
from mlxkv_cli.options import CacheDir, Cold, DryRun, Hot, Json, KvBits, Log, Yes, examples, size
from mlxkv_cli.output import Output

if TYPE_CHECKING:
    from mlxkv.cache.cold import ColdTier
    from mlxkv.cache.index import Row

app = typer.Typer(no_args_is_help=True, help="See, check and shrink the blocks on the SSD.")

SHOWN_BLOCKS = 50
Keep = Annotated[
    int, typer.Option("--keep", metavar="SIZE", parser=size, help="Most the cold tier may hold afterwards.")
]
Model = Annotated[str | None, typer.Option("--model", metavar="NAME", help="Only the blocks of this model.")]


@app.command(epilog=examples("mlxkv cache info", "mlxkv cache info Qwen3.5-27B", "mlxkv cache info --json"))
def info(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A catalog name, a directory, a config.json, a .gguf file or a hub id."),
    ] = None,
    kv_bits: KvBits = None,
    cache_dir: CacheDir = None,
    hot: Hot = None,
    cold: Cold = None,
    as_json: Json = False,
) -> None:
    """Sizes against budgets, and what each model holds; or with MODEL, how its layers are kept and what that costs."""
    from mlxkv.cache import maintenance

    output = Output(json=as_json)
    if model is not None:
        _show_kinds(output, model, kv_bits)
        return
    directory = cache_dir or default_cache_dir()
    budgets = {
        "hot_budget_bytes": default_hot_bytes() if hot is None else hot,
        "cold_budget_bytes": COLD_BYTES if cold is None else cold,
        "floor_bytes": default_floor_bytes(directory),
        "daily_write_bytes": DAILY_WRITE_BYTES,
    }
    with _tier(directory, output) as tier:
        found = maintenance.roots(tier) if tier else []
        used = tier.used_bytes if tier else 0
        written = tier.written_today_bytes() if tier else 0
        files, aside = maintenance.quarantine_use(directory)
    right = ("blocks", "checkpoints", "tokens", "KiB a block", "size", "hits", "used")
    table = Table(
        "model", "root", *(Column(title, justify="right") for title in right),
        box=None, pad_edge=False, header_style="bold",
    )  # fmt: skip
    for use in found:
        per_block = f"{use.block_bytes / max(use.blocks, 1) / 1024:,.0f}"
        table.add_row(use.model, use.root.hex()[:12], f"{use.blocks:,}", f"{use.checkpoints:,}", f"{use.tokens:,}",
                      per_block, format_bytes(use.used_bytes), f"{use.hits:,}", _age(use.last_used))  # fmt: skip
    share = used / budgets["cold_budget_bytes"] if budgets["cold_budget_bytes"] else 0.0
    lines = [
        f"cold tier  {format_bytes(used)} of {format_bytes(budgets['cold_budget_bytes'])} ({share:.1%}) in {directory}",
        f"hot tier   up to {format_bytes(budgets['hot_budget_bytes'])} of memory in each running process",
        f"written    {format_bytes(written)} of {format_bytes(budgets['daily_write_bytes'])} today (UTC);"
        f" {format_bytes(budgets['floor_bytes'])} of the disk stay free",
        f"damaged    {files} files set aside, {format_bytes(aside)}",
    ]
    output.result(
        Group(*lines, "", table if found else "No blocks yet; `mlxkv chat MODEL` makes some."),
        cache_dir=directory,
        used_bytes=used,
        written_today_bytes=written,
        quarantined_files=files,
        quarantined_bytes=aside,
        **budgets,
        models=[{**vars(use), "root": use.root.hex()} for use in found],
    )


@app.command(epilog=examples("mlxkv cache ls", "mlxkv cache ls --limit 0 --json"))
def ls(
    cache_dir: CacheDir = None,
    model: Model = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=0, help="Most blocks to show; 0 shows all. Without it, 50, or with --json all."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """The blocks, chain by chain: tokens, size, hits and age of each."""
    from mlxkv.cache import maintenance

    output = Output(json=as_json)
    with _tier(cache_dir or default_cache_dir(), output) as tier:
        everything = maintenance.chains(tier) if tier else iter(())
        chosen = [item for item in everything if model in (None, item.model)]
    most = (0 if as_json else SHOWN_BLOCKS) if limit is None else limit
    shown = chosen[:most] if most else chosen
    rows = [
        (
            item.row.name.hex()[:12],
            item.model,
            _place(item.row) + (f"  +{item.branches} ways" if item.branches > 1 else ""),
            f"{item.row.nbytes / 1024:,.0f}",
            "cold",
            f"{item.row.hits:,}",
            _age(item.row.created),
            _age(item.used),
        )
        for item in shown
    ]
    right = [Column(title, justify="right") for title in ("KiB", "tier", "hits", "age", "used")]
    output.table(
        ["block", "model", "tokens", *right], rows, blocks=[_fields(item.row, item.model, item.used) for item in shown]
    )
    if len(shown) < len(chosen):
        output.say(f"{len(chosen) - len(shown):,} more; --limit 0 shows all.", "dim")


@app.command(epilog=examples("mlxkv cache show 3fa9c2", "mlxkv cache show 3fa9c2 --text --model smollm2-135m"))
def show(
    block: Annotated[
        str, typer.Argument(metavar="BLOCK", help="The first digits of a block's name, as `mlxkv cache ls` shows it.")
    ],
    text: Annotated[
        bool, typer.Option("--text", metavar="", help="Decode its tokens; needs the model's tokenizer.")
    ] = False,
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Where the tokenizer is.")] = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """One block: where it is, what it continues, what continues it."""
    from mlxkv.cache import maintenance
    from mlxkv.cache.names import unpack

    output = Output(json=as_json)
    with _tier(cache_dir or default_cache_dir(), output) as tier:
        row = _one(tier, block)
        assert tier is not None
        name, path = maintenance.model_of(tier, row.root), tier.path(row)
        following = [child.name.hex() for child in tier.children(row.name)]
        used = maintenance.last_used(tier, row)
    tokens = unpack(row.tokens)
    fields: dict[str, Any] = {**_fields(row, name, used), "file": path, "children": following, "token_ids": tokens}
    lines = [
        f"block     {row.name.hex()}",
        f"model     {name}, root {row.root.hex()[:12]}",
        f"tokens    {_place(row)} of its chain" + (f": {' '.join(map(str, tokens[:12]))} ..." if tokens else ""),
        f"continues {'nothing: it is the first' if row.index == 0 else row.parent.hex()[:12]}",
        f"followed  by {', '.join(n[:12] for n in following) or 'nothing'}",
        f"file      {path} ({format_bytes(row.nbytes)})",
        f"used      {row.hits:,} times, last {_age(used)} ago, made {_age(row.created)} ago",
    ]
    if text:
        from mlxkv.models.loader import tokenizer_of

        fields["text"] = tokenizer_of(model or name).decode(tokens)
        lines += ["", fields["text"]]
    output.result("\n".join(lines), **fields)


@app.command(epilog=examples("mlxkv cache verify", "mlxkv cache verify --fix"))
def verify(
    fix: Annotated[
        bool, typer.Option("--fix", metavar="", help="Repair the index and set damaged files aside.")
    ] = False,
    cache_dir: CacheDir = None,
    log: Log = None,
    as_json: Json = False,
) -> None:
    """Check every byte of every block, and the index against the files. Exit code 1 when something is wrong."""
    from mlxkv.cache import maintenance

    output = Output(json=as_json)
    directory = cache_dir or default_cache_dir()
    with _tier(directory, output) as tier, output.progress("reading every block"):
        found = maintenance.verify(tier) if tier else maintenance.Verification()
    held = found.blocks
    if fix and found.problems:
        with _tier(directory, output, change=True, log=log) as tier:
            held = maintenance.repair(tier, found) if tier else 0
    lines = [f"{found.blocks:,} blocks are sound, {format_bytes(found.read_bytes)} read"]
    lines += [f"{count:,} {kind}" for kind, count in found.problems.items()]
    lines += [f"  {kind}: {what}" for kind, what in found.files[:20]]
    if found.foreign:
        lines.append(f"{len(found.foreign):,} files are not the cache's; left alone: {', '.join(found.foreign[:5])}")
    if found.problems:
        repaired = f"Repaired; {held:,} blocks are held now, without what continued a block that is gone."
        lines.append(repaired if fix else "Run `mlxkv cache verify --fix` to repair it.")
    output.result(
        "\n".join(lines),
        blocks=found.blocks,
        held_blocks=held,
        read_bytes=found.read_bytes,
        problems=dict(found.problems),
        files=[{"problem": kind, "file": what} for kind, what in found.files],
        foreign=found.foreign,
        fixed=fix,
    )
    if found.problems and not fix:
        raise typer.Exit(1)


@app.command(epilog=examples("mlxkv cache prune --keep 5GiB --dry-run", "mlxkv cache prune --keep 5GiB --yes"))
def prune(
    keep: Keep,
    cache_dir: CacheDir = None,
    log: Log = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete the least recently used blocks until the rest fits in SIZE."""
    from mlxkv.cache import maintenance

    output = Output(json=as_json)
    with _tier(cache_dir or default_cache_dir(), output, change=not dry_run, log=log) as tier:
        rows = maintenance.plan_prune(tier, keep) if tier else []
        _delete(output, tier, rows, dry_run=dry_run, yes=yes, reason="prune", tidy=keep == 0)


@app.command(epilog=examples("mlxkv cache clear --dry-run", "mlxkv cache clear --model smollm2-135m --yes"))
def clear(
    cache_dir: CacheDir = None,
    model: Model = None,
    log: Log = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete every block, or every block of one model. Files that are not the cache's stay."""
    from mlxkv.cache import maintenance

    output = Output(json=as_json)
    with _tier(cache_dir or default_cache_dir(), output, change=not dry_run, log=log) as tier:
        rows = [item.row for item in maintenance.chains(tier) if model in (None, item.model)] if tier else []
        _delete(output, tier, rows, dry_run=dry_run, yes=yes, reason="clear", tidy=model is None)


def _show_kinds(output: Output, model: str, kv_bits: int | None) -> None:
    from mlxkv.budget.source import find_source
    from mlxkv.prompt_cache.kinds import kinds_of
    from mlxkv.sizing.weights import build
    from mlxkv_cli.kinds_page import page

    source = find_source(model)
    kinds = kinds_of(build(source.config), kv_bits=kv_bits)
    output.result(page(source.name, source.origin, kinds), model=source.name, origin=source.origin, **asdict(kinds))


def _delete(
    output: Output, tier: ColdTier | None, rows: list[Row], *, dry_run: bool, yes: bool, reason: str, tidy: bool
) -> None:
    """Show the plan, ask, act, report."""
    planned = sum(row.nbytes for row in rows)
    blocks = freed = 0
    if not rows or tier is None:
        said = "Nothing to delete."
    elif dry_run:
        said = f"Would delete {len(rows):,} blocks, {format_bytes(planned)}."
    else:
        output.confirm(f"Delete {len(rows):,} blocks, {format_bytes(planned)}?", yes=yes)
        blocks, freed = tier.delete(rows, reason=reason)
        said = f"{blocks:,} blocks deleted, {format_bytes(freed)} freed"
    if tidy and tier is not None and not dry_run:
        tier.tidy()
    output.result(
        said, blocks=blocks, freed_bytes=freed, planned_blocks=len(rows), planned_bytes=planned, dry_run=dry_run
    )


@contextmanager
def _tier(
    directory: Path, output: Output, *, change: bool = False, log: Path | None = None
) -> Iterator[ColdTier | None]:
    """The cold tier; None where there is no cache yet. Without `change` nothing is created, repaired or deleted."""
    from mlxkv.cache.block_log import BlockLog
    from mlxkv.cache.cold import absent_mount_point, opened

    absent = absent_mount_point(directory)
    if absent is not None:
        raise CacheRootError(f"{absent} is not mounted; attach the disk, or choose another --cache-dir.")
    if not os.path.exists(directory):
        blocking = next((parent for parent in directory.parents if os.path.exists(parent)), directory)
        if not os.path.isdir(blocking):
            raise CacheRootError(f"{blocking} is not a directory; choose another --cache-dir.")
        yield None
        return
    with warnings_on(output), opened(directory, BlockLog(log), change=change) as tier:
        yield tier


def _one(tier: ColdTier | None, text: str) -> Row:
    digits = text.lower()
    if not digits or set(digits) - set("0123456789abcdef"):
        raise UsageError(f"{text!r} is not the start of a block's name; `mlxkv cache ls` shows them.")
    found = tier.by_prefix(digits) if tier else []
    if not found:
        raise UsageError(f"no block starts with {text}; `mlxkv cache ls` shows them.")
    if len(found) > 1:
        raise UsageError(f"several blocks start with {text}; give more digits.")
    return found[0]


def _place(row: Row) -> str:
    """Which tokens of its chain a block holds, or how many come before a checkpoint."""
    if row.is_checkpoint:
        return f"checkpoint at {row.index * 64:,}"
    return f"{row.index * 64:,}-{row.index * 64 + 63:,}"


def _fields(row: Row, model: str, used: float) -> dict[str, Any]:
    return {
        "block": row.name.hex(),
        "parent": row.parent.hex(),
        "root": row.root.hex(),
        "model": model,
        "index": row.index,
        "kind": "checkpoint" if row.is_checkpoint else "block",
        "tokens": len(row.tokens) // 4,
        "bytes": row.nbytes,
        "tier": "cold",
        "hits": row.hits,
        "created": datetime.fromtimestamp(row.created, UTC).isoformat(timespec="seconds"),
        "used": datetime.fromtimestamp(used, UTC).isoformat(timespec="seconds"),
    }


def _age(then: float) -> str:
    """How long ago, in the largest unit that keeps it above one."""
    seconds = max(time.time() - then, 0)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
