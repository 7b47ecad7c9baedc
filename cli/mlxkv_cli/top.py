"""What the dashboard shows, in a terminal: tiers, tokens by source, what runs, the last requests."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from mlxkv.core.errors import UsageError
from mlxkv.core.units import format_bytes
from mlxkv_cli.output import Output

REFRESH_S = 1.0
TIMEOUT_S = 10.0
SHOWN_REQUESTS = 8
SPARKS = " ▁▂▃▄▅▆▇█"


class Client:
    """A server's own account of itself."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url.rstrip("/")
        self._http = httpx.Client(base_url=self._url, headers=headers, timeout=TIMEOUT_S)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON at a path.

        Raises:
            UsageError: nobody answers there, or it is no mlxkv server.
        """
        try:
            answer = self._http.get(path)
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
        except httpx.HTTPStatusError as error:
            raise UsageError(
                f"{self._url} answers {error.response.status_code}; is the --api-key right, and is it mlxkv?"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise UsageError(
                f"no mlxkv server answers at {self._url} ({error}); start one, or give its --url."
            ) from error
        return found

    def close(self) -> None:
        self._http.close()


def show(output: Output, url: str, api_key: str | None, stop: threading.Event) -> None:
    """Redraw until `stop` is set; a server that does not answer yet is waited for."""
    client = Client(url, api_key)
    try:
        with Live(console=output.terminal, auto_refresh=False, screen=output.terminal.is_terminal) as live:
            while not stop.is_set():
                try:
                    page: RenderableType = screen(client.get("/v1/cache"), client.get("/v1/cache/requests"))
                except UsageError as error:
                    page = Text(str(error))
                live.update(page, refresh=True)
                stop.wait(REFRESH_S)
    finally:
        client.close()


def screen(cache: dict[str, Any], requests: dict[str, Any]) -> RenderableType:
    """The whole picture from two answers of a server."""
    tokens = cache["tokens"]
    total = sum(tokens.values())
    saved = tokens["hot"] + tokens["cold"]
    head = Text.assemble(
        (cache["model"], "bold"),
        f"   {cache['requests']['finished']:,} requests, {cache['requests']['running']} running,"
        f" {cache['requests']['queued']} waiting",
    )
    share = f"{saved / total:.0%}" if total else "n/a"
    told = Text(
        f"prompt tokens {total:,} = hot {tokens['hot']:,} + cold {tokens['cold']:,} + computed {tokens['computed']:,}"
        f"   saved {share}"
    )
    if cache["saved_bytes"]:
        told.append(f"\n{format_bytes(cache['saved_bytes'])} saved by running sequences that share a prefix")
    return Group(head, _tiers(cache), told, _history(cache["history"]), _running(requests["running"]),
                 _requests(requests["requests"]))  # fmt: skip


def _tiers(cache: dict[str, Any]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for name in ("hot", "cold"):
        tier = cache[name]
        if tier is None:
            table.add_row(name, "off")
            continue
        used, budget = tier["used_bytes"], tier["budget_bytes"]
        bar = ProgressBar(total=max(budget, 1), completed=used, width=24)
        count = f"{tier['blocks']:,} block{'' if tier['blocks'] == 1 else 's'}"
        table.add_row(name, bar, f"{format_bytes(used)} of {format_bytes(budget)}, {count}")
    return table


def _history(history: list[dict[str, Any]]) -> RenderableType:
    """The share of prompt tokens that was not computed, ten seconds a character."""
    if not history:
        return Text("")
    shares = []
    for step in history[-60:]:
        total = step["hot"] + step["cold"] + step["computed"]
        shares.append((step["hot"] + step["cold"]) / total if total else 0.0)
    line = "".join(SPARKS[round(share * (len(SPARKS) - 1))] for share in shares)
    return Text(f"saved over time {line}")


def _running(running: list[dict[str, Any]]) -> RenderableType:
    if not running:
        return Text("nothing runs", style="dim")
    table = Table("request", "phase", *(Column(c, justify="right") for c in ("prompt", "done", "held", "reply", "s")),
                  box=None, pad_edge=False, header_style="bold")  # fmt: skip
    for one in running:
        table.add_row(one["request"], one["phase"], f"{one['prompt_tokens']:,}", f"{one['done_tokens']:,}",
                      f"{one['held_tokens']:,}", f"{one['output_tokens']:,}",
                      f"{time.time() - one['since']:.0f}")  # fmt: skip
    return table


def _requests(requests: list[dict[str, Any]]) -> RenderableType:
    lines = [
        Text(f"{time.strftime('%H:%M:%S', time.localtime(one['time']))}  {one['line']}", overflow="fold")
        for one in requests[:SHOWN_REQUESTS]
    ]
    return Panel(
        Group(*lines) if lines else Text("no request yet", style="dim"), title="last requests", title_align="left"
    )
