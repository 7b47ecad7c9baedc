"""`POST /v1/messages`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlxkv.engine.request import Event, Finished, Piece, Request, Started
from mlxkv.server.apis.anthropic.bodies import MessagesBody
from mlxkv.server.apis.anthropic.content import ContentBlocks
from mlxkv.server.apis.anthropic.events import AnthropicErrors, frame, new_id
from mlxkv.server.apis.anthropic.wishes import messages_of, template_of, tools_of, wish_of
from mlxkv.server.generation.life import Reply
from mlxkv.server.generation.service import Service
from mlxkv.server.generation.tool_calls import ToolCalls

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "cancelled": "end_turn"}


def message_requests(service: Service, body: MessagesBody, key_salt: str | None) -> list[Request]:
    """The one request of a message.

    Raises:
        RequestError: names the field.
    """
    tools = tools_of(body)
    wish = wish_of(body, service.settings, service.model, key_salt)
    return service.of_chat(messages_of(body), tools, template_of(body), wish)


class MessageReply(Reply):
    ping = frame("ping")
    errors = AnthropicErrors()

    def __init__(self, service: Service, body: MessagesBody, requests: Sequence[Request]) -> None:
        (self._request,) = requests
        self._service = service
        one_only = body.tool_choice is not None and bool(body.tool_choice.disable_parallel_tool_use)
        self._calls = ToolCalls(service.model, tools_of(body), one_only=one_only)
        self._content = ContentBlocks()
        self._began = False
        self._finished: Finished | None = None

    def take(self, choice: int, event: Event) -> None:
        del choice  # there is one
        if isinstance(event, Piece):
            self._add(event)
        elif isinstance(event, Finished):
            self._finished = event

    def answer(self) -> dict[str, Any]:
        finished = self._finished
        assert finished is not None
        return {
            **self._head(finished.cached_tokens),
            "content": self._content.content,
            **self._stop_reason(finished),
            "usage": self._usage(finished.cached_tokens, finished.output_tokens),
        }

    def frames(self, choice: int, event: Event) -> Iterator[bytes]:
        del choice
        if isinstance(event, Started):
            yield from self._begin(event.held_tokens)
        elif isinstance(event, Piece):
            yield from self._add(event)
        elif isinstance(event, Finished):
            if not self._began:
                yield from self._begin(event.cached_tokens)
            yield from self._content.close()
            told = self._usage(event.cached_tokens, event.output_tokens)
            yield frame("message_delta", delta=self._stop_reason(event), usage=told)
            yield frame("message_stop")

    def _begin(self, held: int) -> Iterator[bytes]:
        self._began = True
        yield frame("message_start", message=self._head(held))

    def _head(self, held: int) -> dict[str, Any]:
        return {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": self._service.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(held, 0),
        }

    def _add(self, piece: Piece) -> list[bytes]:
        frames: list[bytes] = []
        for kind, text, written in piece.segments:
            parsed = self._calls.parse(text) if kind == "tool" else None
            if parsed is None:
                frames += self._content.add(kind, written or text)
            for call in parsed or []:
                frames += self._content.add_call(call)
        return frames

    def _stop_reason(self, finished: Finished) -> dict[str, str | None]:
        if finished.stopped_by is not None:
            reason = "stop_sequence"
        elif self._content.used_tools and finished.reason == "stop":
            reason = "tool_use"
        else:
            reason = STOP_REASONS[finished.reason]
        return {"stop_reason": reason, "stop_sequence": finished.stopped_by}

    def _usage(self, held: int, output_tokens: int) -> dict[str, int]:
        """Tokens in disjoint parts: read from the cache, written to it, and neither; their sum is the prompt.

        Written are those of full blocks that were not there before.
        """
        prompt, stores = len(self._request.prompt), self._service.keeps_blocks and self._request.store
        created = max(prompt // 64 * 64 - held, 0) if stores else 0
        return {
            "input_tokens": prompt - held - created,
            "cache_read_input_tokens": held,
            "cache_creation_input_tokens": created,
            "output_tokens": output_tokens,
        }
