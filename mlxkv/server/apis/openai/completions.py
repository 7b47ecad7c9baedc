"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxkv.engine.request import Event, Finished, Piece, Request, TokenLogprob
from mlxkv.models.loader import LoadedModel
from mlxkv.server.apis.openai.bodies import CompletionBody
from mlxkv.server.apis.openai.replies import Choice, ChoicesReply, completion_logprobs
from mlxkv.server.apis.openai.wishes import completion_wish, prompts_of
from mlxkv.server.generation.service import Service


def completion_requests(service: Service, body: CompletionBody, key_salt: str | None) -> list[Request]:
    """The requests of one prompt or several, the choices of one together.

    Raises:
        RequestError: names the field.
    """
    wish = completion_wish(body, service.settings, service.model, key_salt)
    return service.of_prompts(prompts_of(body, service.model), wish)


class CompletionReply(ChoicesReply):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, service: Service, body: CompletionBody, requests: Sequence[Request]) -> None:
        super().__init__(service.model, body, [TextChoice(service.model, i) for i in range(len(requests))])


class TextChoice(Choice):
    def __init__(self, model: LoadedModel, index: int) -> None:
        super().__init__(model, index)
        self._text = ""
        self._told_characters = 0

    def take(self, event: Event) -> list[tuple[str, list[TokenLogprob]]]:
        """The text of an event and its log-probabilities; kept for the whole answer as well."""
        if isinstance(event, Finished):
            self.reason = event.reason
        if not isinstance(event, Piece):
            return []
        text = "".join(segment.text for segment in event.segments)
        told = [] if event.logprob is None else [event.logprob]
        self._text += text
        self._logprobs += told
        return [(text, told)] if text or told else []

    def chunk(self, delta: str, logprobs: Sequence[TokenLogprob] = (), *, reason: str | None = None) -> dict[str, Any]:
        told = self._told(logprobs, self._told_characters)
        self._told_characters += sum(map(len, told["tokens"])) if told else 0
        return {"index": self._index, "text": delta, "logprobs": told, "finish_reason": reason}

    def last(self) -> dict[str, Any]:
        return self.chunk("", reason=self.reason)

    def answer(self) -> dict[str, Any]:
        logprobs = self._told(self._logprobs, 0)
        return {"index": self._index, "text": self._text, "logprobs": logprobs, "finish_reason": self.reason}

    def _told(self, entries: Sequence[TokenLogprob], at: int) -> dict[str, Any] | None:
        return completion_logprobs(self._model, entries, at) if entries else None
