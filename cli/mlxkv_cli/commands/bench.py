"""`mlxkv bench`: what a server gives its clients, measured."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from mlxkv_cli.commands.top import ApiKey
from mlxkv_cli.options import Json
from mlxkv_cli.output import Output

if TYPE_CHECKING:
    from mlxkv.server.bench import Client, Figure


def bench(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, a hub id, or smollm2-135m.")],
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Ask this server; without it, one is started.")
    ] = None,
    api_key: ApiKey = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=64, help="Length of the long prompts.")] = 1024,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="Samples of each figure.")] = 3,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Another seed makes other prompts.")] = 0,
    write: Annotated[Path | None, typer.Option("--write", metavar="FILE", help="Write every sample as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a server: first token cold, hot and from the SSD, decode, four clients with one prompt, restores.

    Medians and p90 of one run on one machine; other runs on a busy machine differ.
    """
    from importlib.metadata import version

    from mlxkv.core.platform import machine_description
    from mlxkv.server.bench import Client, measure, own_server

    output = Output(json=as_json)
    with ExitStack() as open_things:
        if url is not None:
            client, restart = Client(url, api_key), None
        else:
            directory = Path(open_things.enter_context(tempfile.TemporaryDirectory(prefix="mlxkv-bench-")))
            servers = open_things.enter_context(ExitStack())

            def start() -> Client:
                servers.close()
                output.say(f"mlxkv: starting a server for {model} ...", "dim")
                return Client(servers.enter_context(own_server(model, directory)), None)

            client, restart = start(), start
        figures = measure(
            client, tokens=tokens, rounds=rounds, seed=seed, restart=restart,
            on_progress=lambda what: output.say(f"mlxkv: {what} ...", "dim"),
        )  # fmt: skip
    machine = machine_description()
    versions = {name: version(name) for name in ("mlxkv", "mlx", "mlx-lm")}
    told: dict[str, Any] = {
        "model": model, "url": url, "machine": str(machine), "versions": versions, "tokens": tokens, "rounds": rounds,
        "figures": [_fields(figure) for figure in figures],
    }  # fmt: skip
    if write is not None:
        write.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    output.say(f"{machine}; {', '.join(f'{name} {number}' for name, number in versions.items())}")
    table = Table("what", Column("median", justify="right"), Column("p90", justify="right"), "unit", "of", box=None,
                  pad_edge=False, header_style="bold")  # fmt: skip
    for figure in figures:
        table.add_row(figure.name, f"{figure.median:,.3g}", f"{figure.p90:,.3g}", figure.unit, figure.detail)
    output.result(table, **told)


def _fields(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name, "unit": figure.unit, "median": figure.median, "p90": figure.p90,
        "samples": list(figure.samples), "detail": figure.detail,
    }  # fmt: skip
