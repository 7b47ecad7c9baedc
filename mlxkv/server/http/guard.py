"""What stands before everything else: who may call, in which form, how much, and how slowly.

A page of another site must not reach this server through the browser of whoever runs it. So the Host must be one of
this server's own names (a foreign name that resolves here is DNS rebinding), an Origin must be its own or allowed by
name, and a body must be JSON, which no form of another page can send without asking first.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterable

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxkv.server.http.body import BodyError
from mlxkv.server.http.errors import ErrorShapes
from mlxkv.server.settings import MOST_HEADER_BYTES, Settings, is_loopback

SALT = "mlxkv.salt"
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_ALLOWED_METHODS = "GET, POST, OPTIONS"
_ALLOWED_HEADERS = "authorization, content-type, x-api-key, anthropic-version, anthropic-beta"


class Guard:
    """ASGI middleware. Puts the salt of the caller's key into the scope under `SALT`."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        shapes: ErrorShapes,
        *,
        open_paths: Iterable[str] = (),
        open_folders: Iterable[str] = (),
    ) -> None:
        """Guard an application.

        Args:
            open_paths, open_folders: answered without a key.
        """
        self._app = app
        self._settings = settings
        self._shapes = shapes
        self._open_paths = frozenset(open_paths)
        self._open_folders = tuple(f"{folder}/" for folder in open_folders)
        own = _bracketed(settings.host)
        names = [*settings.allow_hosts, *((own,) if own not in ("0.0.0.0", "[::]") else ())]
        if is_loopback(settings.host) or own in ("0.0.0.0", "[::]"):
            names += _LOOPBACK_NAMES
        self._hosts = {name.lower() for name in names}
        self._origins = {origin.lower().rstrip("/") for origin in settings.allow_origins}
        self._salts = {
            _digest(key): hashlib.sha256(b"mlxkv key\0" + key.encode()).hexdigest() for key in settings.api_keys
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origin = _only(scope, b"origin")
        refused = self._refuse(scope, origin)
        if refused is None and scope["method"] == "OPTIONS":
            refused = Response(status_code=204)
        if refused is not None:
            await refused(scope, receive, self._with_origin(send, origin))
            return
        await self._app(scope, self._limited(receive), self._with_origin(send, origin))

    def _refuse(self, scope: Scope, origin: str | None) -> Response | None:
        path = scope["path"]
        if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MOST_HEADER_BYTES:
            return self._error(
                path, 431, f"the headers are larger than {MOST_HEADER_BYTES:,} bytes", "headers_too_large"
            )
        host = _only(scope, b"host")
        found = _HOST.fullmatch(host) if host else None
        if found is None or found[1].lower() not in self._hosts:
            return self._error(
                path, 403, "this Host is not one of the server's names; add --allow-host NAME", "host_not_allowed"
            )
        if origin is not None and not self._is_own(origin, host or "", scope) and origin.lower() not in self._origins:
            return self._error(
                path, 403, "pages of this Origin may not call; add --allow-origin ORIGIN", "origin_not_allowed"
            )
        if origin is None and _only(scope, b"sec-fetch-site") in ("cross-site", "same-site"):
            return self._error(path, 403, "a page of another site may not call", "origin_not_allowed")
        if scope["method"] == "OPTIONS":
            return None
        if scope["method"] == "POST":
            kind = (_only(scope, b"content-type") or "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return self._error(path, 415, "the body must be JSON; send Content-Type: application/json", "not_json")
            length = _only(scope, b"content-length") or "0"
            if not (length.isascii() and length.isdigit()):
                return self._error(path, 400, "Content-Length is no number", "bad_content_length")
            if len(length) > 12 or int(length) > self._settings.most_body_bytes:
                return self._too_large(path)
        if self._salts and path not in self._open_paths and not path.startswith(self._open_folders):
            salt = self._salt_of(scope)
            if salt is None:
                return self._error(
                    path, 401, "the API key is missing or wrong; send Authorization: Bearer KEY", "invalid_api_key"
                )
            scope[SALT] = salt
        return None

    def _is_own(self, origin: str, host: str, scope: Scope) -> bool:
        return origin.lower() == f"{scope.get('scheme', 'http')}://{host.lower()}"

    def _salt_of(self, scope: Scope) -> str | None:
        """The salt of the key that came with a request; every known key is compared, each in constant time.

        Digests are compared, so that a key's length does not show either.
        """
        bearer = _only(scope, b"authorization") or ""
        scheme, _, value = bearer.partition(" ")
        given = value.strip() if scheme.lower() == "bearer" else _only(scope, b"x-api-key") or ""
        match, digest = None, _digest(given)
        for known, salt in self._salts.items():
            if hmac.compare_digest(known, digest):
                match = salt
        return match

    def _limited(self, receive: Receive) -> Receive:
        """`receive` with a cap on the body's bytes and a deadline for its end."""
        end = asyncio.get_running_loop().time() + self._settings.read_deadline_s
        seen = 0
        done = False

        async def limited() -> Message:
            nonlocal seen, done
            if done:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(end - asyncio.get_running_loop().time(), 0))
            except TimeoutError:
                raise BodyError(408, "the body did not arrive in time", "timeout") from None
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                done = not message.get("more_body", False)
                if seen > self._settings.most_body_bytes:
                    raise BodyError(413, _large(self._settings.most_body_bytes), "too_large")
            return message

        return limited

    def _too_large(self, path: str) -> Response:
        return self._error(path, 413, _large(self._settings.most_body_bytes), "too_large")

    def _error(self, path: str, status: int, message: str, code: str) -> Response:
        headers = {"connection": "close"} if status in (408, 413) else {}
        return JSONResponse(self._shapes.of(path).body(status, message, code=code), status, headers=headers)

    def _with_origin(self, send: Send, origin: str | None) -> Send:
        """`send` that lets a page of an allowed origin read the answer, and that tells browsers what a page may do."""
        allowed = origin is not None and origin.lower() in self._origins

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                headers.append((b"x-content-type-options", b"nosniff"))
                if allowed and origin is not None:
                    headers += [
                        (b"access-control-allow-origin", origin.encode("latin-1")),
                        (b"vary", b"Origin"),
                        (b"access-control-allow-methods", _ALLOWED_METHODS.encode()),
                        (b"access-control-allow-headers", _ALLOWED_HEADERS.encode()),
                        (b"access-control-max-age", b"600"),
                    ]
                message = {**message, "headers": headers}
            await send(message)

        return sending


def _only(scope: Scope, name: bytes) -> str | None:
    """The header's value; several of one name are joined, so that none of them can be the one that is checked."""
    values: Iterable[bytes] = (value for key, value in scope["headers"] if key == name)
    found = b",".join(values)
    return found.decode("latin-1") if found or any(key == name for key, _ in scope["headers"]) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _large(most: int) -> str:
    return f"the body is larger than {most:,} bytes; shorten the request"
