"""Options that several commands share, each also an environment variable, and the way an example is written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from mlxkv.core.errors import UsageError
from mlxkv.core.units import parse_bytes


def size(text: str) -> int:
    """`parse_bytes` for an option: Typer adds the option's name to what went wrong."""
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error


def _path(text: str) -> Path:
    """A path; `~` is expanded here because nobody does so in an environment variable."""
    return Path(text).expanduser()


CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        envvar="MLXKV_CACHE_DIR",
        parser=_path,
        help="Where blocks are kept on the SSD. Without it, mlxkv's folder in the user's cache directory.",
    ),
]
Hot = Annotated[
    int | None,
    typer.Option(
        "--hot",
        metavar="SIZE",
        envvar="MLXKV_HOT",
        parser=size,
        help="Most memory the hot tier may hold, such as 4GiB. Without it, an eighth of the machine's.",
    ),
]
Cold = Annotated[
    int | None,
    typer.Option(
        "--cold",
        metavar="SIZE",
        envvar="MLXKV_COLD",
        parser=size,
        help="Most the cold tier may take on the SSD, such as 50GiB. Without it, 20GiB.",
    ),
]
NoCold = Annotated[
    bool,
    typer.Option("--no-cold", metavar="", envvar="MLXKV_NO_COLD", help="Keep blocks in memory only; write no file."),
]
Log = Annotated[
    Path | None,
    typer.Option("--log", metavar="FILE", envvar="MLXKV_LOG", parser=_path, help="Add the block log to this file."),
]
LogText = Annotated[
    bool,
    typer.Option("--log-text", metavar="", help="Put the prompts' text into the block log too; without it, none is."),
]
KvBits = Annotated[
    int | None,
    typer.Option("--kv-bits", metavar="4|8", help="Quantised KV, where mlx-lm can: smaller blocks of their own."),
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object and nothing else on stdout.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Do not ask before deleting.")]
DryRun = Annotated[bool, typer.Option("--dry-run", metavar="", help="Show what would be done and do nothing.")]


def examples(*commands: str) -> str:
    """The epilog of a command's `--help`: command lines to copy.

    >>> print(examples("mlxkv doctor", "mlxkv doctor --json"))
    Examples:
      mlxkv doctor
      mlxkv doctor --json
    """
    return "\n".join([f"Example{'s' if len(commands) > 1 else ''}:", *(f"  {escape(line)}" for line in commands)])
