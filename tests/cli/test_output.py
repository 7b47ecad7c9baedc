"""Output: data on stdout, talk on stderr, nothing that steers a terminal, nobody asked who is not there."""

import dataclasses
import doctest
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Column

from mlxkv.core.errors import UsageError
from mlxkv_cli import options, output
from mlxkv_cli.output import Output


@dataclasses.dataclass(frozen=True)
class Block:
    name: str
    path: Path


def on_a_terminal(code: str, typed: bytes = b"", **environment: str) -> str:
    """What a person sees when `code` runs on a terminal of 80 columns and `typed` is what they type."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", **environment}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env=environment
    ) as process:
        os.close(slave)
        os.write(master, typed)
        seen = b""
        try:
            while piece := os.read(master, 4096):
                seen += piece
        except OSError:  # Linux says so when the other side is closed
            pass
        process.wait()
    os.close(master)
    return seen.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("module", [output, options])
def test_the_examples_in_the_docstrings_hold(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_a_result_is_text_for_a_person_and_one_object_with_json(capsys):
    for as_json in (False, True):
        Output(json=as_json).result("3 blocks [all] :smile:", text="hi", blocks=[Block("ab", Path("/x"))])
    text, data = capsys.readouterr().out.splitlines()
    assert text == "3 blocks [all] :smile:"
    assert json.loads(data) == {"text": "hi", "blocks": [{"name": "ab", "path": "/x"}]}


def test_a_value_without_a_json_form_is_an_error_and_not_a_guess():
    with pytest.raises(TypeError, match="object has no JSON form"):
        Output(json=True).result("", thing=object())


def test_a_long_line_is_not_folded_when_piped(capsys):
    Output().result("x" * 500)
    assert capsys.readouterr().out == "x" * 500 + "\n"


def test_a_table_is_not_folded_when_piped(capsys):
    Output().table(["block", Column("KiB", justify="right")], [["n" * 200, "768.00"], ["[b]", "1.00"]])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["block", "KiB"], ["n" * 200, "768.00"], ["[b]", "1.00"]]


def test_talk_goes_to_stderr_with_and_without_json(capsys):
    for as_json in (False, True):
        out = Output(json=as_json)
        out.say("loading [model]", "dim")
        out.warn("no BLAS")
        with out.progress("verifying", total=2) as advance:
            advance(1)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "loading [model]\nmlxkv: warning: no BLAS\n" * 2


def test_a_growing_answer_is_written_as_it_is_and_not_at_all_with_json(capsys):
    for as_json in (False, True):
        out = Output(json=as_json)
        out.write("Par")
        out.write("is\x1b[0m")
    assert capsys.readouterr().out == "Paris\x1b[0m"


def test_on_a_terminal_nothing_can_steer_it():
    code = (
        "from mlxkv_cli.output import Output; o = Output(); o.write('a\\x1b[2J'); o.result('b\\x07'); o.say('c\\x9b')"
    )
    assert on_a_terminal(code) == "a\\x1b[2Jb\\x07\nc\\x9b\n"


def test_colour_on_a_terminal_and_none_with_no_color():
    code = "from mlxkv_cli.output import Output; Output().warn('careful')"
    assert "\x1b[33m" in on_a_terminal(code, NO_COLOR="")
    assert "\x1b" not in on_a_terminal(code, NO_COLOR="1")


def test_where_nobody_can_be_asked_a_question_is_wrong_usage(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match=r"add --yes$"):
        Output().confirm("Delete 3 blocks?", yes=False)


def test_yes_beforehand_asks_nothing(capsys):
    Output().confirm("Delete 3 blocks?", yes=True)
    assert capsys.readouterr() == ("", "")


CONFIRM = """
import typer
from mlxkv_cli.output import Output
try:
    Output().confirm("Delete 3 blocks?", yes=False)
    print("deleted")
except typer.Exit as ended:
    print("exit code", ended.exit_code)
"""


@pytest.mark.parametrize(("typed", "end"), [(b"y\n", "deleted\n"), (b"n\n", "exit code 1\n"), (b"\n", "exit code 1\n")])
def test_the_person_at_the_terminal_decides_and_no_is_the_default(typed, end):
    seen = on_a_terminal(CONFIRM, typed)
    assert "Delete 3 blocks? [y/N]:" in seen
    assert seen.endswith(end)
    assert ("Nothing was changed." in seen) == (end != "deleted\n")
