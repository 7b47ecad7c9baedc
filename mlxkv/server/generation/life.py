"""The life of a request in the server, from the socket to the answer; read it from top to bottom.

What comes before `respond` is the same for every path:

1. **Connect.** `http.connection` gives the headers a deadline.
2. **Guard.** `http.guard` asks who calls, from where, in which form, how much and how slowly. What it refuses reaches
   no API; the salt of the caller's key goes into the scope.
3. **Read.** `http.application` finds the API's route, whose handler reads and checks the body with `http.body`.

`respond` is the rest. An error of any step is told in its API's shape: by `http.application` before the answer has
begun, by `with_errors` afterwards. However a request ends, its call is closed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol, TypeVar

from anyio import to_thread
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from mlxkv.engine.request import Event, Request
from mlxkv.server.generation.call import Call
from mlxkv.server.generation.service import Service
from mlxkv.server.http.errors import ErrorShape, with_errors
from mlxkv.server.http.guard import SALT
from mlxkv.server.http.stream import EventStream


class Body(Protocol):
    """What the body of every API says."""

    @property
    def model(self) -> str | None: ...
    @property
    def stream(self) -> bool | None: ...


B = TypeVar("B", bound=Body)


class Reply(ABC):
    """An answer in an API's form as it grows, whole or as frames of a stream. Owner: the event loop."""

    ping: bytes
    """The frame that says: still here."""
    errors = ErrorShape()

    @abstractmethod
    def take(self, choice: int, event: Event) -> None:
        """Keep what an event says, for `answer`."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """The whole answer, after the last event."""

    def begin(self) -> Iterable[bytes]:
        """Frames before the first event."""
        return ()

    @abstractmethod
    def frames(self, choice: int, event: Event) -> Iterable[bytes]:
        """The frames of an event."""

    def end(self) -> Iterable[bytes]:
        """Frames after the last event."""
        return ()


async def respond(
    service: Service,
    http: HttpRequest,
    body: B,
    requests_of: Callable[[Service, B, str | None], list[Request]],
    reply_of: Callable[[Service, B, list[Request]], Reply],
) -> Response:
    """Answer a checked body.

    Args:
        requests_of: from a body and the salt of the caller's key to requests of the engine, one a choice.
        reply_of: the answer that is to grow.
    """
    # 4. Tokens. The name of the model is checked, and the body becomes requests with prompts of tokens, off the loop.
    service.check_model(body.model)
    requests = await to_thread.run_sync(requests_of, service, body, http.scope.get(SALT))
    reply = reply_of(service, body, requests)

    # 5. Queue. The engine takes all choices or none: its queue may be full, and some requests can never fit.
    call = service.queue(requests)

    # 6. Engine. On its thread each choice waits for memory, a place, or blocks that another request will publish; then
    #    come names, match, plan, restore, prefill, decode and finish: docs/architecture.md says what each does.

    # 7. Answer. What the engine says of a choice becomes frames of a stream at once, or one body at the end.
    if body.stream:
        return EventStream(with_errors(_frames(call, reply), reply.errors), on_end=call.close)
    async for choice, event in call.collect(http):
        reply.take(choice, event)
    return JSONResponse(reply.answer())


async def _frames(call: Call, reply: Reply) -> AsyncIterator[bytes]:
    for frame in reply.begin():
        yield frame
    async for found in call.events():
        for frame in (reply.ping,) if found is None else reply.frames(*found):
            yield frame
    for frame in reply.end():
        yield frame
