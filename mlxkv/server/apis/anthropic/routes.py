"""Anthropic's paths."""

from __future__ import annotations

from anyio import to_thread
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from mlxkv.server.apis.anthropic.bodies import CountBody, MessagesBody
from mlxkv.server.apis.anthropic.events import AnthropicErrors
from mlxkv.server.apis.anthropic.messages import MessageReply, message_requests
from mlxkv.server.apis.anthropic.wishes import messages_of, template_of, tools_of
from mlxkv.server.generation.life import respond
from mlxkv.server.generation.service import Service
from mlxkv.server.http.api import Api, Route
from mlxkv.server.http.body import read

MESSAGES = "/v1/messages"


def anthropic_api(service: Service) -> Api:
    """Anthropic's API over a service."""
    paths = _Paths(service)
    return Api(
        routes=[
            Route(method="POST", path=MESSAGES, handler=paths.messages, body=MessagesBody),
            Route(method="POST", path=f"{MESSAGES}/count_tokens", handler=paths.count, body=CountBody),
        ],
        errors={MESSAGES: AnthropicErrors()},
    )


class _Paths:
    """What every path does."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def messages(self, request: Request) -> Response:
        """A message, as Anthropic's API has it."""
        return await respond(self._service, request, await read(request, MessagesBody), message_requests, MessageReply)

    async def count(self, request: Request) -> JSONResponse:
        """How many tokens a message would have."""
        body = await read(request, CountBody)
        self._service.check_model(body.model)
        messages, tools = messages_of(body), tools_of(body)
        template = template_of(body)
        tokens = await to_thread.run_sync(self._service.count_tokens, messages, tools, template)
        return JSONResponse({"input_tokens": tokens})
