"""Chat templates: messages to tokens, exactly as the model's own template gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from mlxkv.core.errors import ModelError, UsageError

Message = Mapping[str, Any]
"""`role` and `content`, as the OpenAI API has them."""


def system_tokens(tokenizer: Any, messages: Sequence[Message], prompt: Sequence[int], **template: Any) -> int:
    """How many leading tokens of `prompt` its system message alone gives; 0 without one.

    Other conversations with the same system message share them, so a model with states is checkpointed there.
    """
    if not messages or messages[0].get("role") != "system":
        return 0
    try:
        alone = tokenizer.apply_chat_template([messages[0]], add_generation_prompt=False, **template)
    except TemplateError:
        return 0  # a template that wants a user message first
    return next(
        (i for i, (a, b) in enumerate(zip(alone, prompt, strict=False)) if a != b), min(len(alone), len(prompt))
    )


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, ending where the model's reply begins. No token is added that the template lacks.

    Args:
        tools: as the OpenAI API has them.
        options: what else the template is given, such as `enable_thinking`.

    Raises:
        ModelError: the model has no chat template.
        UsageError: the template refuses these messages; its own words are in the sentence.
    """
    if not tokenizer.has_chat_template:
        raise ModelError("this model has no chat template; choose an instruct or chat version of it.")
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=True, **(options or {})
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise UsageError(f"the chat template refuses these messages ({error}); check roles and their order.") from error
    return [int(token) for token in ids]
