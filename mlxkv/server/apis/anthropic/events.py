"""Anthropic's events, and its errors in them."""

from __future__ import annotations

import json
import uuid
from typing import Any

from mlxkv.server.http.errors import ErrorShape

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def frame(event: str, **fields: Any) -> bytes:
    """One server-sent event; its type is in the data too."""
    data = json.dumps({"type": event, **fields}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"event: {event}\ndata: {data}\n\n".encode()


class AnthropicErrors(ErrorShape):
    """An error with the type of its status; there is no place for a field or a code."""

    def body(self, status: int, message: str, *, code: str | None = None, field: str | None = None) -> dict[str, Any]:
        del code, field
        kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def event(self, body: dict[str, Any]) -> bytes:
        return frame("error", error=body["error"])
