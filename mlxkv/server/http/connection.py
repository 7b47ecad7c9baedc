"""One connection: uvicorn's, with a deadline for a request's headers and errors in JSON before any path."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxkv.server.http.errors import ErrorShape


class Connection(H11Protocol):
    """Owner: the event loop.

    The deadline runs from the connection or the first byte of a further request until its headers are complete. It runs
    too while the rest of a body arrives whose request was answered already.
    """

    header_deadline_s: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As uvicorn's; headers have to follow in time."""
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """As uvicorn's; begins or ends the deadline."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE:
            self._forget_deadline()
        elif self._deadline is None:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's; nothing is awaited any more."""
        self._forget_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in JSON, and hang up."""
        self._forget_deadline()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is on its way already
            self.transport.close()
            return
        body = json.dumps(ErrorShape().body(400, f"{msg} Send HTTP/1.1 with headers under 64 KiB.")).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_headers(self) -> None:
        self._deadline = self.loop.call_later(self.header_deadline_s, self.transport.close)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
