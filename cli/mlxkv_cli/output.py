"""What a command says and where: stdout is data, stderr is talk.

With `--json` the data is one JSON object and the talk stays as it is. Colour only on a terminal, and never when
NO_COLOR is set.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from mlxkv.core.errors import UsageError

_UNFOLDED_WIDTH = 10_000  # where no terminal ends the line
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Output:
    """The one way a command speaks. Holds no state but whether JSON was asked for.

    Text is printed as it is: square brackets are no markup, and what could steer the terminal (a model's output,
    a file's name) is escaped there. Into a file or a pipe it goes unchanged.
    """

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self._out = Console(markup=False, emoji=False, highlight=False)
        if not self._out.is_terminal:
            self._out.width = _UNFOLDED_WIDTH
        self._err = Console(markup=False, emoji=False, highlight=False, stderr=True)

    @property
    def interactive(self) -> bool:
        """Whether a person can be asked: both stdin and stderr are terminals."""
        return sys.stdin.isatty() and self._err.is_terminal

    @property
    def width(self) -> int:
        """Columns there are for an answer: the terminal's, or as many as one likes in a pipe."""
        return self._out.width

    def result(self, shown: RenderableType, /, **fields: object) -> None:
        """The command's answer: `shown` for a person, or with `--json` the fields as one object. Call it once."""
        if self.json:
            print(json.dumps(fields, default=_plain, allow_nan=False), flush=True)
        elif isinstance(shown, str):
            _print_text(self._out, shown)
        else:
            self._out.print(shown, width=self._out.measure(shown).maximum)

    def table(self, columns: Sequence[str | Column], rows: Iterable[Sequence[str]], /, **fields: object) -> None:
        """A result that is a table: `Column("KiB", justify="right")` for numbers. Not folded when piped."""
        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*(printable(cell) if self._out.is_terminal else cell for cell in row))
        self.result(table, **fields)

    def write(self, piece: str) -> None:
        """A piece of an answer that is still growing, at once and without a new line; nothing with `--json`."""
        if not self.json:
            sys.stdout.write(printable(piece) if self._out.is_terminal else piece)
            sys.stdout.flush()

    def say(self, text: str, style: str = "") -> None:
        """Talk: what is going on, on stderr. `style` is Rich's, such as "dim"."""
        _print_text(self._err, text, style)

    def warn(self, text: str) -> None:
        """Something the user should know and the command survives."""
        self.say(f"mlxkv: warning: {text}", "yellow")

    def confirm(self, question: str, /, *, yes: bool) -> None:
        """Return when the answer is yes, given by `--yes` or at the terminal; otherwise end the command with code 1.

        Raises:
            UsageError: nobody is there to ask.
        """
        if yes:
            return
        if not self.interactive:
            raise UsageError(f"{question} There is no terminal to answer on; to go ahead, add --yes")
        if not typer.confirm(printable(question), err=True):
            self.say("Nothing was changed.")
            raise typer.Exit(1)

    @contextmanager
    def progress(self, what: str, /, total: float | None = None) -> Iterator[Callable[[float], None]]:
        """A bar on stderr while the body runs; yields the function that moves it on by so much.

        Without `total` the bar only shows that something happens. Nothing is drawn when stderr is no terminal.
        """
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._err, transient=True, disable=not self._err.is_terminal) as bar:
            task = bar.add_task(printable(what), total=total)
            yield lambda amount: bar.advance(task, amount)

    @contextmanager
    def steps(self) -> Iterator[Callable[[str, float], None]]:
        """A bar on stderr that names what goes on; yields the function that tells (what begins, share that is done)."""
        columns = (BarColumn(20), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=self._err, transient=True, disable=not self._err.is_terminal) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda what, done: bar.update(task, description=printable(what), completed=done)

    @contextmanager
    def prefills(self) -> Iterator[Callable[[Sequence[tuple[str, int, int]]], None]]:
        """Bars on stderr for prompts that take long; yields the function that tells (request, tokens done, of all).

        A request that is not told any more loses its bar. Nothing is drawn when stderr is no terminal.
        """
        columns = (
            TextColumn("prefill {task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._err, transient=True, disable=not self._err.is_terminal) as bars:
            tasks: dict[str, TaskID] = {}

            def update(told: Sequence[tuple[str, int, int]]) -> None:
                for request, done, total in told:
                    if request not in tasks:
                        tasks[request] = bars.add_task(printable(request), total=total)
                    bars.update(tasks[request], completed=done)
                for request in tasks.keys() - {request for request, _, _ in told}:
                    bars.remove_task(tasks.pop(request))

            yield update

    @property
    def terminal(self) -> Console:
        """The console of the talk, for what redraws itself."""
        return self._err


def _print_text(console: Console, text: str, style: str = "") -> None:
    console.print(printable(text) if console.is_terminal else text, style=style, soft_wrap=True)


def printable(text: str) -> str:
    r"""The text with control characters spelled out, so that it cannot steer a terminal.

    >>> printable("one\n\ttwo\x1b[2J")
    'one\n\ttwo\\x1b[2J'
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _plain(value: object) -> object:
    """What JSON does not know by itself: a dataclass is an object, a path its text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form; pass plain values to Output.result")
