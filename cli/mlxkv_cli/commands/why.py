"""`mlxkv why`: where one prompt left what was held, in which message, and what likely did it."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from mlxkv.core.errors import MlxkvError, UsageError
from mlxkv_cli.options import Json
from mlxkv_cli.output import Output

TIMEOUT_S = 10.0


def why(
    targets: Annotated[
        list[str], typer.Argument(metavar="[FILE...] ID", help="The log, then the request's id or how it begins.")
    ],
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Ask a running `mlxkv serve` instead of a log.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar="MLXKV_API_KEY", help="The server's key, if it has one."),
    ] = None,
    text: Annotated[
        bool,
        typer.Option(
            "--text", metavar="", help="Show the words around the difference; needs a log made with --log-text."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say why a prompt was not reused further: the nearest one, the first token that differs, the likely cause."""
    from mlxkv.blocklog.history import read_history
    from mlxkv.blocklog.sources import find_files, total_bytes
    from mlxkv.blocklog.why import explain, words_around
    from mlxkv_cli.log_page import why_page

    output = Output(json=as_json)
    *files, request = targets
    if url is not None:
        if files:
            raise UsageError("--url takes one request id; leave the files out.")
        record, earlier = _from_server(url, request, key)
        found = explain(record, earlier)
    else:
        if not files:
            raise UsageError("name the log before the request: mlxkv why FILE ID, or a server with --url.")
        with output.progress("reading", total=total_bytes(find_files(files))) as advance:
            history = read_history(files, request, advance)
        record, earlier = history.record, list(history.earlier)
        found = explain(record, earlier, history.gone)
    near = next((each for each in earlier if each.request == found.nearest), None)
    words = words_around(record, near) if text and near is not None else None
    if text and words is None:
        output.warn("no text of both prompts is there; run the server or the chat with --log-text")
    fields: dict[str, Any] = dataclasses.asdict(found)
    output.result(why_page(found, words), **fields, **({"words": list(words)} if words else {}))


def _from_server(url: str, request: str, key: str | None) -> tuple[Any, list[Any]]:
    """The request's record and those before it, from the records the server keeps."""
    import httpx

    from mlxkv.blocklog.why import Record

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/cache/requests", headers=headers, timeout=TIMEOUT_S)
        answer.raise_for_status()
        found = answer.json()["requests"]
        records = [Record.of(each) for each in reversed(found)]  # the server has the newest first
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise MlxkvError(f"{url} did not give its requests ({error}); check the address and the key.") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise MlxkvError(f"{url} answers, but is no `mlxkv serve`; check the address.") from error
    chosen = [i for i, record in enumerate(records) if record.request.startswith(request)]
    exact = [i for i in chosen if records[i].request == request]
    if len(exact or chosen) != 1:
        raise UsageError(f"the server remembers {len(chosen)} requests that begin with {request}; give the whole id.")
    at = (exact or chosen)[0]
    return records[at], records[:at]
