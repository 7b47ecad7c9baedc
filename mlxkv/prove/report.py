"""The answer as Markdown, to paste into an issue: nothing in it says whose machine it was."""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mlxkv.prove.check import Check, Figure
from mlxkv.prove.prove import Group

_OF_NOBODY = {"root", "user", "admin", "localhost", "linux", "mac", "runner"}
_SHORTEST = 3  # a shorter name cannot be told from a word


def markdown(groups: Sequence[Group], facts: Mapping[str, str]) -> str:
    """A table a group, the figures as JSON-like lines, and what to do.

    Args:
        facts: what it was run on, in the order it is shown.
    """
    lines = ["## mlxkv doctor --prove", "", *(f"- {name}: {value}" for name, value in facts.items())]
    for group in groups:
        lines += ["", f"### {group.title}", "", "| check | verdict | what was seen |", "|---|---|---|"]
        lines += [f"| {check.name} | {_verdict(check)} | {_cell(check.said)} |" for check in group.checks]
    advised = [check for group in groups for check in group.checks if check.advice]
    if advised:
        lines += ["", "### What to do", "", *(f"- {check.name}: {check.advice}" for check in advised)]
    lines += ["", "<details><summary>All figures</summary>", "", "```"]
    lines += [f"{check.name}: {_figures(check)}" for group in groups for check in group.checks if check.figures]
    lines += ["```", "", "</details>", ""]
    return without_names("\n".join(lines))


def without_names(text: str) -> str:
    """`text` without this user's home, name and host, should any have got into it."""
    for name, put in _personal():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", put, text, flags=re.IGNORECASE)
    return text


def _personal() -> list[tuple[str, str]]:
    """What must not be told, longest first, and what stands for it."""
    found = [(str(Path(home)), "~") for home in {os.path.expanduser("~"), os.environ.get("HOME", "")} if home != "/"]
    with suppress(OSError, KeyError):  # a user without an entry
        found.append((getpass.getuser(), "(user)"))
    found += [(os.environ.get(name, ""), "(user)") for name in ("USER", "LOGNAME")]
    host = platform.node()
    found += [(host, "(host)"), (host.partition(".")[0], "(host)")]
    telling = [(name, put) for name, put in found if len(name) >= _SHORTEST and name.lower() not in _OF_NOBODY]
    return sorted(telling, key=lambda pair: -len(pair[0]))


def _verdict(check: Check) -> str:
    return f"**{check.verdict}**" if check.verdict == "fail" else check.verdict


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _figures(check: Check) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in check.figures.items())


def _value(value: Figure) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
