"""Errors in the shape of the API that was called."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from mlxkv.core.errors import BudgetError, DeviceError, MlxkvError
from mlxkv.engine.engine import EngineStoppedError, QueueFullError

ANTHROPIC_PATH = "/v1/messages"
RETRY_AFTER_S = 2
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class RequestError(MlxkvError):
    """Something in a request cannot be; names the field, and has OpenAI's code where there is one."""

    http_status = 400

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.code = code
        self.http_status = status


def error_body(
    path: str, status: int, message: str, *, code: str | None = None, field: str | None = None
) -> dict[str, Any]:
    """The body of an error: OpenAI's object, or Anthropic's for a path of its API."""
    if path.startswith(ANTHROPIC_PATH):
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def status_of(error: Exception) -> int:
    """The HTTP status of what a request raised; 500 for what nobody foresaw."""
    return error.http_status if isinstance(error, MlxkvError) else 500


def describe(error: Exception) -> tuple[int, str, str | None, str | None]:
    """Status, message, code and field of an error. What nobody foresaw keeps its details to the log."""
    status = status_of(error)
    if isinstance(error, RequestError):
        return status, str(error), error.code, error.field
    if isinstance(error, BudgetError):  # it can never fit, so asking again would not help
        return 400, str(error), "context_length_exceeded", None
    if isinstance(error, QueueFullError):
        return status, str(error), "queue_full", None
    if isinstance(error, DeviceError):
        return status, str(error), f"device_{error.kind}", None
    if isinstance(error, MlxkvError):
        return status, str(error), None, None
    return 500, f"an unexpected {type(error).__name__} ended this request; others are not touched.", "internal", None


def headers_of(error: Exception) -> dict[str, str]:
    """When to come again, where that helps. Both official clients send a 503 again by themselves unless told not to."""
    if isinstance(error, DeviceError) and not error.may_pass:
        return {"x-should-retry": "false"}
    return {"retry-after": str(RETRY_AFTER_S)} if describe(error)[0] in (429, 503) else {}


def is_unforeseen(error: Exception) -> bool:
    """Whether the log must have an error's traceback: not that of an engine that stops or a device that failed."""
    return describe(error)[0] >= 500 and not isinstance(error, (EngineStoppedError, DeviceError))


def from_validation(error: ValidationError) -> RequestError:
    """The first thing that is wrong, with the field's name; never the value, which may be no JSON.

    Where a field can have several forms, the form that went furthest is meant: a list of parts with one unknown part.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    top = errors[0]["loc"][:1]
    of_field = (one for one in errors if one["loc"][:1] == top)
    first = max(of_field, key=lambda one: (one["type"] == "too_long", len(one["loc"])))
    field = ".".join(str(part) for part in first["loc"] if not _is_tag(part))
    said = first["msg"]
    if first["type"] == "json_invalid":
        return RequestError(f"the body is no JSON ({said}).", code="invalid_json")
    return RequestError(f"{field or 'the body'}: {said}.", field=field or None)


def _is_tag(part: object) -> bool:
    """Whether a part of a location names a type of a union, and not a field."""
    return isinstance(part, str) and (
        not part.isidentifier() or part in ("str", "int", "float", "bool") or part[0].isupper()
    )
