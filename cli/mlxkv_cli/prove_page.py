"""`mlxkv doctor --prove` on a screen: a table that stays readable in 50 columns, then what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from mlxkv.prove.prove import Group as Checks

_SHOWN = {"ok": "ok", "note": "note", "fail": "FAIL"}
_STYLES = {"ok": "green", "note": "yellow", "fail": "bold red"}


def prove_page(groups: Sequence[Checks], facts: Mapping[str, str], seconds: float) -> RenderableType:
    """The whole answer: a row a check, and the advice of those that are not plainly right."""
    table = Table(
        Column("check", overflow="fold", max_width=20), Column("", no_wrap=True),
        Column("what was seen", overflow="fold"),
        box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0),
    )  # fmt: skip
    for group in groups:
        for check in group.checks:
            table.add_row(check.name, Text(_SHOWN[check.verdict], _STYLES[check.verdict]), check.said)
    head = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, fact in facts.items():
        head.add_row(name, fact)
    return Group(head, "", table, "", _closing(groups, seconds))


def _closing(groups: Sequence[Checks], seconds: float) -> str:
    advised = [check for group in groups for check in group.checks if check.advice]
    failed = sum(check.verdict == "fail" for check in advised)
    total = sum(len(group.checks) for group in groups)
    lines = [f"{check.name}: {check.advice}" for check in advised]
    verdict = f"{failed} of {total} checks FAILED" if failed else f"All {total} checks hold on this machine"
    return "\n".join([*lines, *([""] if lines else []), f"{verdict}; {seconds:.0f} s."])
