"""The paths that say what the cache and the process are doing."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from anyio import to_thread
from fastapi.responses import FileResponse, JSONResponse, Response

from mlxkv.engine.engine import Engine
from mlxkv.server.http.api import Api, Route
from mlxkv.server.http.application import NOT_STALE
from mlxkv.server.http.errors import RETRY_AFTER_S
from mlxkv.server.monitoring.blocks import cold_use, held_blocks, hot_blocks, hot_use
from mlxkv.server.monitoring.metrics import Metrics

DASHBOARD = Path(__file__).parent / "dashboard"
MOST_LISTED_BLOCKS = 20_000
_POLICY = "default-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"


def monitoring_api(engine: Engine, metrics: Metrics, started: float) -> Api:
    """The paths over an engine and its figures; `started` is when the server did, in seconds since 1970."""
    paths = _Paths(engine, metrics, started)
    routes = [
        Route(method="GET", path="/v1/cache", handler=paths.cache),
        Route(method="GET", path="/v1/cache/blocks", handler=paths.blocks),
        Route(method="GET", path="/v1/cache/requests", handler=paths.requests),
        Route(method="GET", path="/health", handler=paths.health, needs_key=False),
        Route(method="GET", path="/ready", handler=paths.ready, needs_key=False),
        Route(method="GET", path="/metrics", handler=paths.metrics_page, gives=Response),
    ]
    if not DASHBOARD.is_dir():
        return Api(routes=routes)
    # the page is a file of the package and asks for the key it needs
    page = Route(method="GET", path="/", handler=paths.dashboard, listed=False, needs_key=False)
    return Api(routes=[*routes, page], files={"/static": DASHBOARD})


class _Paths:
    """What every path does. Owner: the event loop; only `Engine`'s own methods reach the engine's thread."""

    def __init__(self, engine: Engine, metrics: Metrics, started: float) -> None:
        self._engine = engine
        self._metrics = metrics
        self._started = started

    async def cache(self) -> JSONResponse:
        """The tiers against their budgets, tokens by source, what runs, and how it went lately."""
        engine, metrics = self._engine, self._metrics
        status, layout = engine.status, engine.cache.layout
        store = engine.cache.store
        return JSONResponse(
            {
                "model": engine.model.name,
                "version": version("mlxkv"),
                "ready": engine.alive,
                "uncached": engine.cache.uncached,
                "block_bytes": layout.block_bytes,
                "checkpoint_bytes": layout.checkpoint_bytes,
                "hot": hot_use(store),
                "cold": cold_use(store),
                "tokens": asdict(metrics.tokens),
                "requests": {
                    "running": len(status.running),
                    "queued": status.queued,
                    "finished": metrics.finished,
                    "limit": engine.limits.sequences,
                },
                "live_bytes": status.live_bytes,
                "saved_bytes": status.saved_bytes,
                "live_budget_bytes": engine.limits.memory_bytes,
                "wired": asdict(engine.opened.wiring),
                "evicted": dict(metrics.evicted),
                "quarantined": metrics.quarantined,
                "history": list(metrics.history),
                "started": self._started,
                "time": time.time(),
            }
        )

    async def blocks(self, limit: int = MOST_LISTED_BLOCKS) -> JSONResponse:
        """The blocks and checkpoints that the tiers hold, the last used first."""
        return await to_thread.run_sync(self._blocks, max(0, min(limit, MOST_LISTED_BLOCKS)))

    def _blocks(self, most: int) -> JSONResponse:
        cache = self._engine.cache
        hot, root = self._engine.call(lambda: (hot_blocks(cache.store), cache.root()))
        return JSONResponse({**held_blocks(cache.store, hot, most), "root": root.hex()})

    async def requests(self) -> JSONResponse:
        """What runs now, and the last requests with their lines, newest first."""
        running = [asdict(one) for one in self._engine.status.running]
        return JSONResponse({"running": running, "requests": list(self._metrics.requests)})

    async def health(self) -> JSONResponse:
        """The process is alive."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> JSONResponse:
        """The engine runs and its model is loaded."""
        if self._engine.alive:
            return JSONResponse({"status": "ready", "model": self._engine.model.name})
        reason = "the engine stopped" if self._engine.error else "the server is stopping"
        return JSONResponse({"status": reason}, 503, {"retry-after": str(RETRY_AFTER_S)})

    async def metrics_page(self) -> Response:
        """Counters and gauges for Prometheus."""
        engine, store, status = self._engine, self._engine.cache.store, self._engine.status
        tiers = {"hot": (store.hot.used_bytes, store.hot.budget_bytes)}
        if store.cold is not None:
            tiers["cold"] = (store.cold.used_bytes, store.cold.budget_bytes)
        text = self._metrics.text(tiers, status.queued, len(status.running), engine.status.live_bytes)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def dashboard(self) -> FileResponse:
        """The dashboard."""
        return FileResponse(DASHBOARD / "index.html", headers={"content-security-policy": _POLICY, **NOT_STALE})
