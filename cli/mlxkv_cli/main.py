"""The `mlxkv` command: the tree of commands, and the one place where an error becomes a sentence and an exit code.

0    done
1    a negative answer, or it could not be done
2    wrong usage
130  stopped with Ctrl-C
"""

from __future__ import annotations

import copy
import importlib.metadata
import os
import sys
from types import TracebackType
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from mlxkv.core.errors import MlxkvError
from mlxkv_cli.commands import (
    bench,
    budget,
    cache,
    chat,
    demo,
    doctor,
    explain,
    lint,
    log,
    mlx_lm_server,
    models,
    serve,
    top,
    why,
)
from mlxkv_cli.options import examples
from mlxkv_cli.output import Output


class Tree(typer.core.TyperGroup):
    """A group whose help lists what is inside its groups too, so that the whole tree is on one screen."""

    def list_commands(self, ctx: Any) -> list[str]:
        names: list[str] = []
        for name in super().list_commands(ctx):
            command = super().get_command(ctx, name)
            inner = command.list_commands(ctx) if isinstance(command, typer.core.TyperGroup) else []
            names += [f"{name} {verb}" for verb in inner] or [name]
        return names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        name, _, verb = cmd_name.partition(" ")
        command = super().get_command(ctx, name)
        if not verb or not isinstance(command, typer.core.TyperGroup):
            return command
        inner = copy.copy(command.get_command(ctx, verb))
        if inner is not None:
            inner.name = cmd_name
        return inner


app = typer.Typer(
    cls=Tree,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("mlxkv demo", "mlxkv doctor", "mlxkv COMMAND --help"),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        Output().result(f"mlxkv {importlib.metadata.version('mlxkv')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """A KV cache for language models on Apple silicon that never computes the same prompt twice."""


# The order here is the order on the screen.
app.command(epilog=examples("mlxkv demo", "mlxkv demo --json"))(demo.demo)
app.command(
    epilog=examples(
        "mlxkv budget Qwen2.5-0.5B-Instruct",
        "mlxkv budget Qwen3-8B --weights 4 --context 8k,32k --ram 24GB --json",
        "mlxkv budget compare Llama-3.1-8B Qwen3-8B --weights 4 --context 32k",
    )
)(budget.budget)
app.command(epilog=examples("mlxkv models", "mlxkv models --json"))(models.models)
app.command(
    epilog=examples(
        "mlxkv chat smollm2-135m", 'mlxkv chat smollm2-135m --prompt "What is the capital of France?" --json'
    )
)(chat.chat)
app.command(
    epilog=examples(
        "mlxkv serve smollm2-135m", "mlxkv serve mlx-community/Qwen2.5-0.5B-Instruct-4bit --port 9000 --hot 4GiB"
    )
)(serve.serve)
app.command(epilog=examples("mlxkv top", "mlxkv top --url http://127.0.0.1:9000 --once --json"))(top.top)
app.command(epilog=examples("mlxkv bench smollm2-135m", "mlxkv bench smollm2-135m --url http://127.0.0.1:8080 --json"))(
    bench.bench
)
app.command(
    "mlx-lm-server",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=examples("mlxkv mlx-lm-server --model mlx-community/Qwen2.5-0.5B-Instruct-4bit --port 8081"),
)(mlx_lm_server.mlx_lm_server)
app.add_typer(cache.app, name="cache")
app.add_typer(log.app, name="log")
app.command(
    epilog=examples("mlxkv why blocks.jsonl 6b1f0c52a9d4", "mlxkv why --url http://127.0.0.1:8000 6b1f0c52a9d4")
)(why.why)
app.command(
    epilog=examples(
        "mlxkv lint chats.jsonl --model smollm2-135m", "mlxkv lint chats.jsonl --model ./my-model --min 0.8"
    )
)(lint.lint)
app.add_typer(explain.app, name="explain")
app.command(epilog=examples("mlxkv doctor", "mlxkv doctor --json", "mlxkv doctor --prove --report proof.md"))(
    doctor.doctor
)


def main() -> int:
    """The entry point: an error nobody foresaw is one sentence too, unless MLXKV_DEBUG=1."""
    if not _debugging():
        sys.excepthook = _one_sentence
    return run(sys.argv[1:])


def run(arguments: list[str]) -> int:
    """Run the command line; `arguments` are those after `mlxkv`. Returns the exit code."""
    output = Output()
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="mlxkv", standalone_mode=False)
    except MlxkvError as error:
        if _debugging():
            raise
        output.say(f"mlxkv: {error}")
        return error.exit_code
    except typer.TyperException as error:  # wrong usage; the message is empty when the help was the answer
        if message := error.format_message().rstrip():
            stop = "" if message.endswith((".", "?", "!")) else "."
            output.say(f"mlxkv: {message}{stop} To see what is possible, add --help")
        return error.exit_code
    except typer.Abort:  # Ctrl-C or Ctrl-D at a question
        output.say("Nothing was changed.")
        return 1
    return code if isinstance(code, int) else 0


def _debugging() -> bool:
    return os.environ.get("MLXKV_DEBUG") == "1"


def _one_sentence(kind: type[BaseException], error: BaseException, _where: TracebackType | None) -> None:
    """What a user sees of an error nobody foresaw, in place of the traceback."""
    if not issubclass(kind, KeyboardInterrupt):
        Output().say(f"mlxkv: unexpected {kind.__name__}: {error}. To see where, set MLXKV_DEBUG=1 and run it again")


if __name__ == "__main__":
    sys.exit(main())
