"""Chat templates: messages to tokens, exactly as the model's own template gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from mlxkv.core.errors import ModelError, UsageError

Message = Mapping[str, Any]
"""`role` and `content`, as the OpenAI API has them."""


def render(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, ending where the model's reply begins. No token is added that the template lacks.

    Raises:
        ModelError: the model has no chat template.
        UsageError: the template refuses these messages; its own words are in the sentence.
    """
    if not tokenizer.has_chat_template:
        raise ModelError("this model has no chat template; choose an instruct or chat version of it.")
    try:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
    except TemplateError as error:
        raise UsageError(f"the chat template refuses these messages ({error}); check roles and their order.") from error
    return [int(token) for token in ids]
