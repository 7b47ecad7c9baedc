"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mlxkv.engine.request import Event, Finished, Piece, Request, TokenLogprob
from mlxkv.models.loader import LoadedModel
from mlxkv.server.apis.openai.bodies import ChatBody
from mlxkv.server.apis.openai.replies import Choice, ChoicesReply, chat_logprob
from mlxkv.server.apis.openai.wishes import chat_wish, messages_of, tools_of
from mlxkv.server.generation.service import Service
from mlxkv.server.generation.tool_calls import ToolCalls


def chat_requests(service: Service, body: ChatBody, key_salt: str | None) -> list[Request]:
    """The requests of a chat, one a choice.

    Raises:
        RequestError: names the field.
    """
    tools, messages = tools_of(body), messages_of(body)
    wish = chat_wish(body, service.settings, service.model, key_salt)
    return service.of_chat(messages, tools, body.chat_template_kwargs or {}, wish)


class ChatReply(ChoicesReply):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, service: Service, body: ChatBody, requests: Sequence[Request]) -> None:
        model, tools, one_only = service.model, tools_of(body), body.parallel_tool_calls is False
        calls = [ToolCalls(model, tools, one_only=one_only) for _ in requests]
        super().__init__(model, body, [ChatChoice(model, i, each) for i, each in enumerate(calls)])

    def begin(self) -> Iterable[bytes]:
        super().begin()
        return [self._framed(choice.chunk({"role": "assistant", "content": ""})) for choice in self._choices]


class ChatChoice(Choice):
    def __init__(self, model: LoadedModel, index: int, calls: ToolCalls) -> None:
        super().__init__(model, index)
        self._calls = calls
        self._texts = {"content": "", "reasoning_content": ""}
        self._tool_calls: list[dict[str, Any]] = []

    def take(self, event: Event) -> list[tuple[dict[str, Any], list[TokenLogprob]]]:
        """The deltas of an event; what they say is kept for the whole answer as well."""
        if isinstance(event, Finished):
            self.reason = "tool_calls" if self._tool_calls and event.reason == "stop" else event.reason
        if not isinstance(event, Piece):
            return []
        deltas: list[dict[str, Any]] = []
        for kind, text, written in event.segments:
            calls = self._calls.parse(text) if kind == "tool" else None
            if calls is not None:
                self._tool_calls += calls
                deltas += [{"tool_calls": [call]} for call in calls]
            else:
                field = "reasoning_content" if kind == "reasoning" else "content"
                self._texts[field] += written or text
                deltas.append({field: written or text})
        told = [] if event.logprob is None else [event.logprob]
        self._logprobs += told
        if told and not deltas:
            deltas = [{"content": ""}]
        return [(delta, told if i == 0 else []) for i, delta in enumerate(deltas)]

    def chunk(
        self, delta: dict[str, Any], logprobs: Sequence[TokenLogprob] = (), *, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": self._told(logprobs), "finish_reason": reason}

    def last(self) -> dict[str, Any]:
        return self.chunk({}, reason=self.reason)

    def answer(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._texts["content"]}
        if self._texts["reasoning_content"]:
            message["reasoning_content"] = self._texts["reasoning_content"]
        if self._tool_calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in self._tool_calls]
            message["content"] = self._texts["content"] or None
        logprobs = self._told(self._logprobs)
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self.reason}

    def _told(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not entries:
            return None
        return {"content": [chat_logprob(self._model, entry) for entry in entries]}
