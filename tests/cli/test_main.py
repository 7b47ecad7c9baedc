"""The command line as a user meets it: what is on which stream, with which exit code."""

import os
import subprocess
import sys

import pytest
import typer
import typer.main

from mlxkv.core.errors import BudgetError, UsageError
from mlxkv_cli.main import Tree, app, run
from mlxkv_cli.options import Cold, Hot, NoCold

MLXKV = [sys.executable, "-m", "mlxkv_cli.main"]


@pytest.fixture
def command():
    """Adds functions to the command tree for one test; they are called `probe`."""
    before = list(app.registered_commands)
    yield app.command("probe")
    app.registered_commands[:] = before


def test_help_imports_neither_mlx_nor_what_stands_on_it():
    code = """
import sys
from mlxkv_cli.main import run
assert run(["--help"]) == 0
assert run(["doctor", "--help"]) == 0
rooms = ("mlxkv.models", "mlxkv.sizing", "mlxkv.prompt_cache", "mlxkv.engine")
heavy = ("mlx", "mlx.core", "mlx_lm", "transformers", "numpy", *rooms)
print("imported:", *(name for name in heavy if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "imported:"


def test_the_help_shows_every_command_and_an_example(capsys):
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "Example" in shown
    group = typer.main.get_command(app)
    context = typer.Context(group)
    names = group.list_commands(context)
    assert "doctor" in names
    assert [name for name in names if f" {name} " not in shown] == []


def test_every_command_has_an_example_in_its_help(capsys):
    group = typer.main.get_command(app)
    for name in group.list_commands(typer.Context(group)):
        assert run([*name.split(), "--help"]) == 0
        shown = capsys.readouterr().out
        assert "Example" in shown, name
        assert f"mlxkv {name}" in shown.split("Example")[1], name
        assert shown.count("<bool>") == 1, f"{name}: an option that takes no value shows one (--help is Typer's own)"


def test_the_tree_lists_what_is_inside_a_group_and_runs_it(capsys):
    tree, cache = typer.Typer(cls=Tree, add_completion=False), typer.Typer()
    tree.command()(lambda: None)
    cache.command("ls", help="List the blocks.")(lambda: typer.echo("three blocks"))
    cache.command("show", help="Show one block.")(lambda: None)
    tree.add_typer(cache, name="cache")
    group = typer.main.get_command(tree)
    group.main(["--help"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "cache ls " in shown
    assert "Show one block." in shown
    group.main(["cache", "ls"], standalone_mode=False)
    assert capsys.readouterr().out == "three blocks\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["docto"], "Did you mean 'doctor'?"), (["doctor", "--wrong"], "--wrong"), (["doctor", "more"], "more")],
)
def test_wrong_usage_is_one_sentence_on_stderr_and_exit_code_2(arguments, said, capsys):
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mlxkv: ")
    assert said in err
    assert err.endswith("add --help\n")
    assert err.count("\n") == 1


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_2(capsys):
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert "Usage: mlxkv" in out
    assert err == ""


@pytest.mark.parametrize("error", [UsageError("No such block. Look at mlxkv cache ls"), BudgetError("too big")])
def test_an_error_of_ours_is_its_own_sentence_and_exit_code(error, command, capsys):
    @command
    def probe() -> None:
        raise error

    assert run(["probe"]) == error.exit_code
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"mlxkv: {error}\n")


def test_an_error_of_ours_shows_where_it_was_raised_when_debugging(command, monkeypatch):
    @command
    def probe() -> None:
        raise BudgetError("too big")

    monkeypatch.setenv("MLXKV_DEBUG", "1")
    with pytest.raises(BudgetError):
        run(["probe"])


def test_ctrl_c_is_exit_code_130_and_silent(command, capsys):
    @command
    def probe() -> None:
        raise KeyboardInterrupt

    assert run(["probe"]) == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_is_silent_before_the_commands_are_imported():
    code = """
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from mlxkv_cli.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "mlxkv_cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mlxkv ")


def test_a_negative_answer_is_exit_code_1(command):
    @command
    def probe() -> None:
        raise typer.Exit(1)

    assert run(["probe"]) == 1


UNFORESEEN = """
import sys
from mlxkv_cli.main import app, main
@app.command()
def probe() -> None:
    raise KeyError("no such thing")
sys.argv = ["mlxkv", "probe"]
sys.exit(main())
"""


def test_an_error_nobody_foresaw_is_a_sentence_that_says_how_to_see_more():
    quiet, loud = (
        subprocess.run(
            [sys.executable, "-c", UNFORESEEN],
            env={**os.environ, "MLXKV_DEBUG": debug},
            capture_output=True,
            text=True,
            check=False,
        )
        for debug in ("0", "1")
    )
    assert (quiet.returncode, quiet.stdout) == (1, "")
    assert "unexpected KeyError: 'no such thing'" in quiet.stderr
    assert "MLXKV_DEBUG=1" in quiet.stderr
    assert "Traceback" not in quiet.stderr
    assert loud.returncode == 1
    assert "Traceback" in loud.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"], ["doctor", "--json"]])
def test_a_reader_that_went_away_is_no_error(arguments):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as gone:
        done = subprocess.run([*MLXKV, *arguments], stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 1


def test_no_colour_when_not_on_a_terminal(capsys):
    run(["--help"])
    run(["docto"])
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err


@pytest.fixture
def settings(command):
    """What the size options became, in a command that takes them."""
    seen = {}

    @command
    def probe(hot: Hot = None, cold: Cold = None, no_cold: NoCold = False) -> None:
        seen.update(hot=hot, cold=cold, no_cold=no_cold)

    return seen


def test_sizes_are_read_from_options_and_from_the_environment(settings, monkeypatch):
    monkeypatch.setenv("MLXKV_COLD", "50 GB")
    monkeypatch.setenv("MLXKV_NO_COLD", "1")
    assert run(["probe", "--hot", "1.5GiB"]) == 0
    assert settings == {"hot": 3 * 2**29, "cold": 50 * 10**9, "no_cold": True}


def test_a_size_not_given_is_none(settings):
    assert run(["probe"]) == 0
    assert settings == {"hot": None, "cold": None, "no_cold": False}


def test_a_size_that_has_two_meanings_names_the_option_and_what_to_write(settings, capsys):
    assert run(["probe", "--hot", "8"]) == 2
    said = capsys.readouterr().err
    assert "--hot" in said
    assert "write 8GiB, 8MiB or 8B" in said
    assert settings == {}
