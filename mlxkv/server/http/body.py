"""The body of a request: read, checked, and what is wrong with it said by the field's name."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from mlxkv.server.http.errors import RequestError

B = TypeVar("B", bound=BaseModel)


class BodyError(Exception):
    """The body is too large or too slow."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


async def read(request: Request, body: type[B]) -> B:
    """The body, checked.

    Raises:
        RequestError: what is wrong and in which field.
    """
    try:
        return body.model_validate_json(await request.body())
    except ValidationError as error:
        raise _first_wrong(error) from error


def _first_wrong(error: ValidationError) -> RequestError:
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
