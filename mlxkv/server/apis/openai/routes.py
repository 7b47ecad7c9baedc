"""OpenAI's paths."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from mlxkv.server.apis.openai.bodies import ChatBody, CompletionBody
from mlxkv.server.apis.openai.chat import ChatReply, chat_requests
from mlxkv.server.apis.openai.completions import CompletionReply, completion_requests
from mlxkv.server.generation.life import respond
from mlxkv.server.generation.service import Service
from mlxkv.server.http.api import Api, Route
from mlxkv.server.http.body import read


def openai_api(service: Service) -> Api:
    """OpenAI's API over a service. Its errors have the shape that HTTP knows already."""
    paths = _Paths(service)
    return Api(
        routes=[
            Route(method="POST", path="/v1/chat/completions", handler=paths.chat, body=ChatBody),
            Route(method="POST", path="/v1/completions", handler=paths.completions, body=CompletionBody),
            Route(method="GET", path="/v1/models", handler=paths.models),
            Route(method="GET", path="/v1/models/{name:path}", handler=paths.model),
        ]
    )


class _Paths:
    """What every path does."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        """A chat, as OpenAI's API has it."""
        return await respond(self._service, request, await read(request, ChatBody), chat_requests, ChatReply)

    async def completions(self, request: Request) -> Response:
        """A completion of plain text or token ids, as OpenAI's API has it."""
        body = await read(request, CompletionBody)
        return await respond(self._service, request, body, completion_requests, CompletionReply)

    async def models(self) -> JSONResponse:
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def model(self, name: str) -> JSONResponse:
        """The model of that name, when it is the one that is served."""
        self._service.check_model(name)
        return JSONResponse(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        model = self._service.model
        return {
            "id": model.name,
            "object": "model",
            "created": int(self._service.started),
            "owned_by": "mlxkv",
            "context_length": model.context_tokens,
        }
