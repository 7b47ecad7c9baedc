"""What an API brings: its routes, the shape of its errors, and files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from mlxkv.server.http.errors import ErrorShape


@dataclass(frozen=True, kw_only=True)
class Route:
    """A path and what answers it; the handler's name and docstring stand in /openapi.json.

    Args:
        body: the form of the body, which the handler reads with `read`.
        gives: the kind of response.
        listed: whether it stands in /openapi.json.
        needs_key: whether an API key is asked for where the server has one.
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[Response]]
    body: type[BaseModel] | None = None
    gives: type[Response] = JSONResponse
    listed: bool = True
    needs_key: bool = True


@dataclass(frozen=True, kw_only=True)
class Api:
    """A room of routes.

    Args:
        errors: shapes of its own, by how the paths begin that they are for.
        files: folders of files by path. They are open to everybody: what needs a key is not in a file.
    """

    routes: Sequence[Route]
    errors: Mapping[str, ErrorShape] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
