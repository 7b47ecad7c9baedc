"""Run the server until a signal ends it: drain, commit, leave."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from mlxkv.core.errors import UsageError
from mlxkv.engine.engine import Engine
from mlxkv.server.http.connection import Connection
from mlxkv.server.settings import MOST_HEADER_BYTES, Settings

KEEP_ALIVE_S = 30


@contextmanager
def bound(settings: Settings) -> Iterator[socket.socket]:
    """A socket on the server's address; taken before a model is loaded, so that a taken port is told at once.

    Raises:
        UsageError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((settings.host, settings.port))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot listen on {settings.host}:{settings.port} ({error}); choose another --port or --host."
            ) from error
        listening.set_inheritable(False)
        yield listening


def serve(
    app: ASGIApp,
    engine: Engine,
    settings: Settings,
    listening: socket.socket,
    *,
    drain_s: float,
    on_listening: Callable[[], None] = lambda: None,
) -> int:
    """Answer requests until SIGINT or SIGTERM, then let what runs finish; a second signal leaves at once.

    Args:
        on_listening: called once a client can connect.

    Returns:
        How many blocks did not reach the SSD.
    """
    server_of(app, engine, settings, drain_s=drain_s, on_listening=on_listening).run(sockets=[listening])
    return engine.close(drain_s=drain_s)


def server_of(
    app: ASGIApp,
    engine: Engine,
    settings: Settings,
    *,
    drain_s: float,
    on_listening: Callable[[], None] = lambda: None,
) -> uvicorn.Server:
    """The server that `serve` runs; it takes signals where it runs in the main thread."""
    connection = type("Connection", (Connection,), {"header_deadline_s": settings.read_deadline_s})
    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(int(drain_s), 1),
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
    )
    return _Server(config, engine, on_listening)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: Engine, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine = engine
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second leaves at once; what was committed is on the SSD or comes again."""
        if self.should_exit:
            os._exit(128 + sig)
        self._engine.refuse()
        self.should_exit = True
        del frame

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was answered is not raised again at the end: leaving was the answer."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)
