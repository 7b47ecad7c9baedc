"""Server-sent events, and a response of them that ends with its client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def data_event(value: dict[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


class EventStream(Response):
    """A response of server-sent events. However it ends, `on_end` is called."""

    def __init__(self, frames: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        self._frames = frames
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _first_of(self._send_all(send), until_gone(receive))
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive) -> None:
    """Wait until the client hangs up; for a request whose body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(*work: Awaitable[None]) -> None:
    """Run all until the first is done; end the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
