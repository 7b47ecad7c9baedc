"""OpenAI's answers and chunks: what both paths share."""

from __future__ import annotations

import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlxkv.engine.request import Event, Finished, TokenLogprob
from mlxkv.models.detokenizer import token_bytes
from mlxkv.models.loader import LoadedModel
from mlxkv.server.apis.openai.bodies import Common
from mlxkv.server.generation.life import Reply
from mlxkv.server.http.stream import data_event

LEAST_LOGPROB = -9999.0  # what OpenAI writes for "impossible", which JSON has no number for
_DONE = b"data: [DONE]\n\n"


class Choice(ABC):
    """One choice of an answer, streamed or not."""

    def __init__(self, model: LoadedModel, index: int) -> None:
        self._model = model
        self._index = index
        self._logprobs: list[TokenLogprob] = []
        self.reason: str | None = None

    @abstractmethod
    def take(self, event: Event) -> list[tuple[Any, list[TokenLogprob]]]:
        """What an event adds, with its log-probabilities; it is kept for the whole answer as well."""

    @abstractmethod
    def chunk(self, delta: Any, logprobs: Sequence[TokenLogprob] = (), *, reason: str | None = None) -> dict[str, Any]:
        """What was added, as a chunk has it; `delta` is of `take`."""

    @abstractmethod
    def last(self) -> dict[str, Any]:
        """The chunk that says why it ends."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """All of it."""


class ChoicesReply(Reply):
    """Choices side by side, each ended by its reason; then the usage, and in a stream [DONE]."""

    ping = b": ping\n\n"
    kind: str
    """The `object` of an answer."""
    chunk_kind: str
    prefix: str
    """What ids begin with."""

    def __init__(self, model: LoadedModel, body: Common, choices: Sequence[Choice]) -> None:
        self._model = model
        self._body = body
        self._choices = choices
        self._finished: dict[int, Finished] = {}
        self._head: dict[str, Any] = {}

    def take(self, choice: int, event: Event) -> None:
        self._choices[choice].take(event)
        self._note(choice, event)

    def answer(self) -> dict[str, Any]:
        choices = [choice.answer() for choice in self._choices]
        return {**_envelope(self.kind, self.prefix, self._model.name), "choices": choices, "usage": self._usage()}

    def begin(self) -> Iterable[bytes]:
        self._head = _envelope(self.chunk_kind, self.prefix, self._model.name)
        return ()

    def frames(self, choice: int, event: Event) -> Iterator[bytes]:
        one = self._choices[choice]
        for delta, logprobs in one.take(event):
            yield self._framed(one.chunk(delta, logprobs))
        if self._note(choice, event):
            yield self._framed(one.last())

    def end(self) -> Iterator[bytes]:
        if self._body.wants_usage:
            yield data_event({**self._head, "choices": [], "usage": self._usage()})
        yield _DONE

    def _note(self, choice: int, event: Event) -> bool:
        """Whether a choice ends here."""
        if isinstance(event, Finished):
            self._finished[choice] = event
        return isinstance(event, Finished)

    def _framed(self, chunk: dict[str, Any]) -> bytes:
        return data_event({**self._head, "choices": [chunk]})

    def _usage(self) -> dict[str, Any]:
        """Tokens of all prompts, each counted once however many choices it has."""
        finished = [self._finished[i] for i in sorted(self._finished)]
        each = [_usage(finished[i : i + (self._body.n or 1)]) for i in range(0, len(finished), self._body.n or 1)]
        total = {key: sum(one[key] for one in each) for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
        cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in each)
        return {**total, "prompt_tokens_details": {"cached_tokens": cached}}


def chat_logprob(model: LoadedModel, entry: TokenLogprob) -> dict[str, Any]:
    """One token of `logprobs.content`."""
    top = [_logprob(model, token, value) for token, value in entry.top]
    return {**_logprob(model, entry.token, entry.logprob), "top_logprobs": top}


def completion_logprobs(model: LoadedModel, entries: Sequence[TokenLogprob], at: int) -> dict[str, Any]:
    """`logprobs` of a completion, in its older form; `at` is how many characters came before."""
    texts = [_text(model, entry.token) for entry in entries]
    offsets = []
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [{_text(model, token): _finite(value) for token, value in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def _envelope(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """What every answer and chunk of one request begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(finished: Sequence[Finished]) -> dict[str, Any]:
    """Tokens of one prompt and its choices."""
    first = finished[0]
    output = sum(one.output_tokens for one in finished)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": first.prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
    }


def _logprob(model: LoadedModel, token: int, value: float) -> dict[str, Any]:
    raw = token_bytes(model.tokenizer, token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(value), "bytes": list(raw)}


def _text(model: LoadedModel, token: int) -> str:
    return token_bytes(model.tokenizer, token).decode("utf-8", "replace")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST_LOGPROB
