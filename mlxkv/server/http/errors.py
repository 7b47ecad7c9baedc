"""From what went wrong to what the client reads: status, words, and the shape in which an API writes them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from mlxkv.core.errors import BudgetError, DeviceError, MlxkvError
from mlxkv.engine.engine import EngineStoppedError, QueueFullError
from mlxkv.server.http.stream import data_event

RETRY_AFTER_S = 2

logger = logging.getLogger("mlxkv")


class RequestError(MlxkvError):
    """Something in a request cannot be; names the field, and has OpenAI's code where there is one."""

    http_status = 400

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.code = code
        self.http_status = status


class ErrorShape:
    """How an error is written, as a body and as an event of a stream that has begun. An API may bring another.

    This one is OpenAI's, which every path has that belongs to no API.
    """

    def body(self, status: int, message: str, *, code: str | None = None, field: str | None = None) -> dict[str, Any]:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return {"error": {"message": message, "type": kind, "param": field, "code": code}}

    def event(self, body: dict[str, Any]) -> bytes:
        return data_event(body)


class ErrorShapes:
    """The shape of errors by path. `own` has those of APIs that bring one, by how their paths begin."""

    def __init__(self, own: Mapping[str, ErrorShape]) -> None:
        self._own = dict(own)
        self._other = ErrorShape()

    def of(self, path: str) -> ErrorShape:
        return next((shape for start, shape in self._own.items() if path.startswith(start)), self._other)


class Told(NamedTuple):
    """What a client is told of an error."""

    status: int
    message: str
    code: str | None = None
    field: str | None = None


def tell(error: Exception) -> Told:
    """What to say of an error. What nobody foresaw keeps its details to the log, which hears of it here."""
    told = _told(error)
    if told.status >= 500 and not isinstance(error, (EngineStoppedError, DeviceError)):  # these have their own lines
        logger.error("a request failed", exc_info=error)
    return told


def headers_of(error: Exception) -> dict[str, str]:
    """When to come again, where that helps. Both official clients send a 503 again by themselves unless told not to."""
    if isinstance(error, DeviceError) and not error.may_pass:
        return {"x-should-retry": "false"}
    return {"retry-after": str(RETRY_AFTER_S)} if _told(error).status in (429, 503) else {}


def _told(error: Exception) -> Told:
    if not isinstance(error, MlxkvError):
        said = f"an unexpected {type(error).__name__} ended this request; others are not touched."
        return Told(500, said, "internal")
    if isinstance(error, RequestError):
        return Told(error.http_status, str(error), error.code, error.field)
    if isinstance(error, BudgetError):  # it can never fit, so asking again would not help
        return Told(400, str(error), "context_length_exceeded")
    if isinstance(error, DeviceError):
        return Told(error.http_status, str(error), f"device_{error.kind}")
    return Told(error.http_status, str(error), "queue_full" if isinstance(error, QueueFullError) else None)


async def with_errors(frames: AsyncIterator[bytes], shape: ErrorShape) -> AsyncIterator[bytes]:
    """A stream in which an error is an event: after the headers it can have no status any more."""
    try:
        async for frame in frames:
            yield frame
    except Exception as error:  # noqa: BLE001 - whatever ended the request, its client hears of it
        told = tell(error)
        yield shape.event(shape.body(told.status, told.message, code=told.code, field=told.field))
