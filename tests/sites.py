"""A server over a tiny model on a real socket, that can go away and come back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from serving import running, tiny_model

from mlxkv.engine.engine import Engine
from mlxkv.server.app import create_app
from mlxkv.server.http.run import bound
from mlxkv.server.monitoring.metrics import Metrics
from mlxkv.server.settings import Settings


class Site:
    """Owner: the test. The engine stays when the server goes, and so do the blocks."""

    def __init__(self, engine: Engine, metrics: Metrics, keys: tuple[str, ...]) -> None:
        self.engine = engine
        self.metrics = metrics
        self.keys = keys
        self.port = 0
        self._running: ExitStack | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        headers = {"authorization": f"Bearer {self.keys[0]}"} if self.keys else {}
        return httpx.get(self.url + path, headers=headers, timeout=60).raise_for_status().json()

    def start(self) -> None:
        """Listen, on the same port as before when there was one."""
        settings = Settings(port=self.port, api_keys=self.keys)
        running = ExitStack()
        listening = running.enter_context(bound(settings))
        self.port = listening.getsockname()[1]
        app = create_app(self.engine, settings, self.metrics)
        config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        running.callback(thread.join)
        running.callback(setattr, server, "should_exit", True)
        self._running = running

    def stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


@contextmanager
def site(model: str, directory: Path, *, keys: tuple[str, ...] = (), **options: Any) -> Iterator[Site]:
    """A server over a tiny model, for as long as the body runs."""
    metrics = Metrics()
    with running(lambda: tiny_model(model), directory, listener=metrics.on_event, **options) as engine:
        made = Site(engine, metrics, keys)
        made.start()
        try:
            yield made
        finally:
            made.stop()
