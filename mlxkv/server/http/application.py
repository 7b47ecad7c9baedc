"""The ASGI application of some APIs: their routes, files, errors and schemas, with the guard in front."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mlxkv.core.errors import MlxkvError
from mlxkv.server.http.api import Api, Route
from mlxkv.server.http.body import BodyError
from mlxkv.server.http.errors import ErrorShapes, RequestError, headers_of, tell
from mlxkv.server.http.guard import Guard
from mlxkv.server.http.stream import ClientGoneError
from mlxkv.server.settings import Settings

NOT_STALE = {"cache-control": "no-cache"}
"""A browser asks each time whether a file is still the same: page and scripts are then of one version."""
_CLIENT_GONE = 499


def application(apis: Sequence[Api], settings: Settings) -> Guard:
    """The application over these APIs."""
    app = FastAPI(title="mlxkv", version=version("mlxkv"), docs_url=None, redoc_url=None)
    routes = [route for api in apis for route in api.routes]
    for route in routes:
        app.add_api_route(
            route.path,
            route.handler,
            methods=[route.method],
            include_in_schema=route.listed,
            response_class=route.gives,
        )
    files = {path: folder for api in apis for path, folder in api.files.items()}
    for path, folder in files.items():
        app.mount(path, _Static(directory=folder), name=path.strip("/"))
    shapes = ErrorShapes({start: shape for api in apis for start, shape in api.errors.items()})
    _answer_errors(app, _Failures(shapes))
    app.openapi = lambda: _openapi(app, routes)  # type: ignore[method-assign]
    open_paths = {route.path for route in routes if not route.needs_key}
    return Guard(app, settings, shapes, open_paths=open_paths, open_folders=files)


def _answer_errors(app: FastAPI, failures: _Failures) -> None:
    app.add_exception_handler(HTTPException, failures.of_http)
    app.add_exception_handler(Exception, failures.of_any)  # answered as well, and raised again for the log
    for known in (MlxkvError, BodyError, ClientGoneError, ClientDisconnect, RequestValidationError):
        app.add_exception_handler(known, failures.of_any)


class _Failures:
    """The responses to what was raised, each in the shape of its path's API."""

    def __init__(self, shapes: ErrorShapes) -> None:
        self._shapes = shapes

    async def of_any(self, request: Request, error: Exception) -> Response:
        if isinstance(error, (ClientGoneError, ClientDisconnect)):
            return Response(status_code=_CLIENT_GONE)
        shape = self._shapes.of(request.url.path)
        if isinstance(error, BodyError):
            body = shape.body(error.status, str(error), code=error.code)
            return JSONResponse(body, error.status, {"connection": "close"})
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            error = RequestError(f"{first['loc'][-1]}: {first['msg']}.", field=str(first["loc"][-1]))
        told = tell(error)
        body = shape.body(told.status, told.message, code=told.code, field=told.field)
        return JSONResponse(body, told.status, headers_of(error))

    async def of_http(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = {404: "there is nothing at this path; /openapi.json lists them.", 405: "this path takes another method."}
        message = said.get(error.status_code, str(error.detail))
        body = self._shapes.of(request.url.path).body(error.status_code, message)
        return JSONResponse(body, error.status_code, error.headers)


class _Static(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(NOT_STALE)
        return response


def _openapi(app: FastAPI, routes: Sequence[Route]) -> dict[str, Any]:
    """The routes with the schemas of their bodies, which are read by `read` and not by FastAPI."""
    if app.openapi_schema is None:
        bodies = [(route, route.body) for route in routes if route.body is not None]
        names, schemas = models_json_schema(
            [(body, "validation") for _, body in bodies], ref_template="#/components/schemas/{model}"
        )
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for route, body in bodies:
            content = {"application/json": {"schema": names[body, "validation"]}}
            found["paths"][route.path][route.method.lower()]["requestBody"] = {"required": True, "content": content}
        found.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        app.openapi_schema = found
    return app.openapi_schema
