"""`mlxkv lint`: whether recorded conversations keep their prefix, before anything is deployed."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from mlxkv.core.errors import UsageError
from mlxkv_cli.options import Json
from mlxkv_cli.output import Output, printable

if TYPE_CHECKING:
    from mlxkv.blocklog.lint import Report, Turn


def lint(
    chats: Annotated[
        str, typer.Argument(metavar="CHATS.jsonl", help="OpenAI or Anthropic request bodies, one a line; - is stdin.")
    ],
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Its tokenizer and template are used; no weights are read.")
    ],
    least: Annotated[
        float | None,
        typer.Option("--min", metavar="SHARE", min=0, max=1, help="Exit with code 1 under this share, such as 0.8."),
    ] = None,
    whole_blocks: Annotated[
        bool,
        typer.Option("--blocks", metavar="", help="Count whole blocks of 64 tokens only, as the SSD gives them back."),
    ] = False,
    text: Annotated[bool, typer.Option("--text", metavar="", help="Show the words where a prefix breaks.")] = False,
    as_json: Json = False,
) -> None:
    """Say for each recorded request how much of it an earlier one shares, what broke the prefix, and what to move."""
    from mlxkv.blocklog.lint import lint as run_lint
    from mlxkv.blocklog.lint import read_bodies, template_reads_the_clock
    from mlxkv.models.loader import tokenizer_of

    output = Output(json=as_json)
    if chats != "-" and not Path(chats).is_file():
        raise UsageError(f"there is no file {chats}; check the path.")
    tokenizer = tokenizer_of(model)
    try:
        with nullcontext(sys.stdin) if chats == "-" else open(chats, encoding="utf-8") as lines:
            report = run_lint(read_bodies(lines), tokenizer, block_tokens=whole_blocks)
    except UnicodeDecodeError as error:
        raise UsageError(f"{chats} is not UTF-8 ({error.reason} at byte {error.start}); convert it first.") from error
    if not report.turns:
        raise UsageError(f"{chats} has no request bodies; write one a line.")
    if template_reads_the_clock(tokenizer):
        output.warn("this chat template writes the date by itself: all prompts change with it")
    share = report.reusable_share
    output.result(
        _page(report, text=text),
        turns=[_fields(turn, text=text) for turn in report.turns],
        requests=len(report.turns),
        broken=len(report.broken),
        prompt_tokens=report.prompt_tokens,
        reusable_tokens=report.reusable_tokens,
        reusable_share=share,
    )
    if least is not None and share is not None and share < least:
        output.say(f"mlxkv: {share:.1%} of the tokens are reusable, and --min asks for {least:.1%}")
        raise typer.Exit(1)


def _fields(turn: Turn, *, text: bool) -> dict[str, object]:
    fields = dataclasses.asdict(turn) | {"broken": turn.broken}
    if not text:
        fields.pop("words")
    return fields


def _page(report: Report, *, text: bool) -> RenderableType:
    right = [Column(title, justify="right") for title in ("line", "prompt", "reusable", "%")]
    table = Table(*right, "like", "what ends it", box=None, pad_edge=False, header_style="bold")
    for turn in report.turns:
        table.add_row(
            f"{turn.line}", f"{turn.prompt_tokens:,}", f"{turn.reusable_tokens:,}",
            f"{turn.reusable_tokens / turn.prompt_tokens:.0%}", str(turn.nearest_line or ""),
            f"{turn.cause}: {turn.detail}" if turn.broken else turn.detail,
        )  # fmt: skip
    parts: list[RenderableType] = [table, ""]
    if text:
        parts += [line for turn in report.broken if turn.words for line in (_words(turn, turn.words), "")]
    share = report.reusable_share
    said = "n/a" if share is None else f"{share:.1%}"
    parts.append(
        Text(f"{said} of the tokens after the first request are reusable; {len(report.broken)} prefixes broke.")
    )
    advice = dict.fromkeys(f"{turn.cause}: {turn.advice}" for turn in report.broken)
    return Group(*parts, *(Text(f"  {line}") for line in advice))


def _words(turn: Turn, words: tuple[str, str, str]) -> Text:
    before, now, then = (repr(piece)[1:-1] for piece in words)
    return Text(printable(f"line {turn.line}: ...{before}\n  now:     {now}\n  before:  {then}"))
