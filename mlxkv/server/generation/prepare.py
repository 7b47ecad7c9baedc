"""From messages or prompts to requests of the engine: rendered, made tokens, and held against the context."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from mlxkv.blocklog.outline import Outliner
from mlxkv.core.errors import MlxkvError, UsageError
from mlxkv.engine.request import Record, Request, Sampling
from mlxkv.engine.text import initial_state
from mlxkv.models.chat import render, system_tokens
from mlxkv.models.loader import LoadedModel
from mlxkv.server.generation.wish import Wish
from mlxkv.server.http.errors import RequestError
from mlxkv.server.settings import Settings

RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
"""What a request may not set as a variable of the template: how it is rendered, and the template itself."""
_tokenizing = threading.Lock()  # a Hugging Face tokenizer must not be used by two threads at once


def chat_requests(
    model: LoadedModel,
    settings: Settings,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template: Mapping[str, Any],
    wish: Wish,
    outliner: Outliner,
) -> list[Request]:
    """The requests of a conversation, one a choice; their records in the block log say how the prompt is made up.

    Raises:
        RequestError: the template refuses it, or it does not fit the context.
    """
    tokenizer = model.tokenizer
    _check_length(model, sum(len(message["content"]) for message in messages), "messages")
    with _tokenizing:
        prompt = _rendered(model, messages, tools, template)
        marks = (system_tokens(tokenizer, messages, prompt, tools=list(tools or ()) or None, **template),)
        initial = initial_state(tokenizer, prompt)
    requests = _requests(model, settings, prompt, wish, marks=marks, initial=initial, tools=bool(tools))
    outline = outliner.outline(prompt, messages, tools=tools or (), options=template)
    record = Record(
        lambda reply: outliner.with_reply(outline, reply).to_fields(),
        outliner.text(prompt) if settings.log_text else None,
    )
    return [replace(request, record=record) for request in requests]


def warm_up(model: LoadedModel, settings: Settings, outliner: Outliner) -> None:
    """Do once what the first chat would wait for: compiling the template, the tokenizer's tables."""
    with suppress(MlxkvError):  # a model without a template, or one that refuses this conversation
        wish = Wish(max_tokens=1, sampling=Sampling())
        chat_requests(model, settings, [{"role": "user", "content": "Hello"}], None, {}, wish, outliner)


def text_requests(
    model: LoadedModel, settings: Settings, prompts: Sequence[str | Sequence[int]], wish: Wish
) -> list[Request]:
    """The requests of plain prompts, text or token ids; the choices of one prompt stand together."""
    found: list[Request] = []
    for i, given in enumerate(prompts):
        if isinstance(given, str):
            _check_length(model, len(given), "prompt")
            with _tokenizing:
                prompt = [int(token) for token in model.tokenizer.encode(given)]
        else:
            prompt = list(given)
        if not prompt:
            raise RequestError("the prompt has no tokens; give at least one.", field="prompt")
        try:
            found += _requests(model, settings, prompt, wish, field="prompt")
        except RequestError as error:
            if len(prompts) == 1:
                raise
            raise RequestError(f"prompt {i}: {error}", field="prompt", code=error.code) from error
    return found


def count_tokens(
    model: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template: Mapping[str, Any],
) -> int:
    """Tokens of a conversation as `chat_requests` would send it."""
    with _tokenizing:
        return len(_rendered(model, messages, tools, template))


def _requests(
    model: LoadedModel,
    settings: Settings,
    prompt: list[int],
    wish: Wish,
    *,
    marks: tuple[int, ...] = (),
    initial: str | None = None,
    tools: bool = False,
    field: str = "messages",
) -> list[Request]:
    room = _room(model, prompt, field)
    asked = settings.max_tokens if wish.max_tokens is None else wish.max_tokens
    found = []
    for choice in range(wish.choices):
        sampling = wish.sampling if not choice else wish.sampling.other(choice)
        found.append(
            Request(
                prompt=tuple(prompt),
                max_tokens=asked if room is None else min(asked, room),
                sampling=sampling,
                stop=wish.stop,
                logprobs=wish.logprobs,
                salt=wish.salt,
                store=wish.store,
                pin_s=wish.pin_s,
                marks=marks,
                initial=initial,
                tools=tools,
                processors=wish.processors,
            )
        )
    return found


def _rendered(
    model: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template: Mapping[str, Any],
) -> list[int]:
    taken = sorted(RESERVED & template.keys())
    if taken:
        raise RequestError(
            f"chat_template_kwargs: {taken[0]} is no variable of the template; leave it out.",
            field="chat_template_kwargs",
        )
    try:
        return render(model.tokenizer, messages, tools=tools or (), options=template)
    except UsageError as error:
        raise RequestError(str(error), field="messages") from error


def _check_length(model: LoadedModel, characters: int, field: str) -> None:
    """Raise for a text that is too long whatever its tokens are: tokenising megabytes would keep others waiting."""
    context = model.context_tokens
    if context is not None and characters > context * longest_token(model.tokenizer):
        least = -(-characters // longest_token(model.tokenizer))
        raise RequestError(
            f"the prompt has at least {least:,} tokens and the model's context is {context:,}; shorten it.",
            field=field,
            code="context_length_exceeded",
        )


@lru_cache(maxsize=4)
def longest_token(tokenizer: Any) -> int:
    """Characters of the longest token of a tokenizer's vocabulary, as it is spelled there."""
    return max(map(len, tokenizer.get_vocab()))


def _room(model: LoadedModel, prompt: Sequence[int], field: str) -> int | None:
    """How many tokens a reply may have; None where the model does not state a context."""
    context = model.context_tokens
    if context is None:
        return None
    if len(prompt) >= context:
        raise RequestError(
            f"the prompt has {len(prompt):,} tokens and the model's context is {context:,}; shorten it.",
            field=field,
            code="context_length_exceeded",
        )
    return context - len(prompt)
