"""The application: the one place where every API of this server is named."""

from __future__ import annotations

from mlxkv.engine.engine import Engine
from mlxkv.server.apis.anthropic.routes import anthropic_api
from mlxkv.server.apis.openai.routes import openai_api
from mlxkv.server.generation.service import Service
from mlxkv.server.http.application import application
from mlxkv.server.http.guard import Guard
from mlxkv.server.monitoring.metrics import Metrics
from mlxkv.server.monitoring.routes import monitoring_api
from mlxkv.server.settings import Settings


def create_app(engine: Engine, settings: Settings, metrics: Metrics) -> Guard:
    """The ASGI application over a running engine, with its guard in front.

    Args:
        metrics: hears every event of the engine's block log.
    """
    service = Service(engine, settings, metrics.between_tokens)
    apis = [openai_api(service), anthropic_api(service), monitoring_api(engine, metrics, service.started)]
    return application(apis, settings)
