"""One HTTP request's way through the engine: events of its choices in one queue, and cancelled when nobody listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial

from starlette.requests import Request as HttpRequest

from mlxkv.engine.engine import Engine
from mlxkv.engine.request import Event, Failed, Finished, Piece, Request
from mlxkv.server.http.stream import ClientGoneError, until_gone
from mlxkv.server.settings import FIRST_PING_S, PING_S


class Call:
    """Owner: the task of the HTTP request."""

    def __init__(self, engine: Engine, requests: Sequence[Request], between_tokens: Callable[[float], None]) -> None:
        """Queue every choice; `between_tokens` hears of the seconds between two tokens of one.

        Raises:
            MlxkvError: the engine takes none of them.
        """
        self.requests = requests
        self._engine = engine
        self._between_tokens = between_tokens
        self._last_token = [0.0] * len(requests)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._open: set[int] = set()
        try:
            for choice, request in enumerate(requests):
                engine.submit(request, partial(self._emit, choice))
                self._open.add(choice)
        except Exception:
            self.close()
            raise

    def _emit(self, choice: int, event: Event) -> None:
        """Take an event on the engine's thread."""
        if isinstance(event, Piece) and event.token is not None:
            before, now = self._last_token[choice], time.perf_counter()
            if before:
                self._between_tokens(now - before)
            self._last_token[choice] = now
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, (choice, event))

    @property
    def is_open(self) -> bool:
        """Whether a choice has not ended yet."""
        return bool(self._open)

    async def next(self, timeout_s: float | None = None) -> tuple[int, Event] | None:
        """The next event of any choice; None when there was none in time."""
        try:
            choice, event = await asyncio.wait_for(self._events.get(), timeout_s)
        except TimeoutError:
            return None
        if isinstance(event, (Finished, Failed)):
            self._open.discard(choice)
        return choice, event

    async def events(self) -> AsyncIterator[tuple[int, Event] | None]:
        """Every event until all choices have ended; None when a ping is due.

        Raises:
            Exception: what a choice failed with; the others are cancelled.
        """
        clock = self._loop.time
        due = clock() + FIRST_PING_S
        while self.is_open:
            found = await self.next(max(due - clock(), 0))
            if found is None:
                due = clock() + PING_S
                yield None
                continue
            if isinstance(found[1], Failed):
                self.close()
                raise found[1].error
            yield found

    async def collect(self, http: HttpRequest) -> AsyncIterator[tuple[int, Event]]:
        """`events` without pings, ended by `ClientGoneError` when the client hangs up."""
        gone = asyncio.ensure_future(until_gone(http.receive))
        try:
            while self.is_open:
                event = asyncio.ensure_future(self.next())
                await asyncio.wait((event, gone), return_when=asyncio.FIRST_COMPLETED)
                if not event.done():
                    event.cancel()
                    raise ClientGoneError
                found = event.result()
                assert found is not None
                if isinstance(found[1], Failed):
                    raise found[1].error
                yield found
        finally:
            gone.cancel()
            self.close()

    def close(self) -> None:
        """End what has not ended; a second call does nothing."""
        for choice in self._open:
            self._engine.cancel(self.requests[choice].id)
        self._open.clear()
