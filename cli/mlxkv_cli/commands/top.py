"""`mlxkv top`: a running server in the terminal."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from mlxkv_cli.options import Json
from mlxkv_cli.output import Output

DEFAULT_URL = "http://127.0.0.1:8080"
Url = Annotated[str, typer.Option("--url", metavar="URL", envvar="MLXKV_URL", help="Where the server listens.")]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", envvar="MLXKV_API_KEY", help="The key it asks for.")
]


def top(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", metavar="", help="Show it once and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Watch a running server: tiers, tokens saved, what runs, the last requests. Ctrl-C ends it."""
    from mlxkv_cli.top import Client, screen, show

    output = Output(json=as_json)
    client = Client(url, api_key)
    cache, requests = client.get("/v1/cache"), client.get("/v1/cache/requests")
    client.close()
    if once or as_json:
        output.result(screen(cache, requests), cache=cache, **requests)
        return
    stop = threading.Event()
    try:
        show(output, url, api_key, stop)
    except KeyboardInterrupt:
        stop.set()
