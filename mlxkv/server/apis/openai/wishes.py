"""From OpenAI's bodies to what they wish for: sampling, format, messages and tools as chat templates want them."""

from __future__ import annotations

import json
from typing import Any

from mlxkv.core.errors import UsageError
from mlxkv.engine.request import Sampling
from mlxkv.engine.structured import processors_for
from mlxkv.models.loader import LoadedModel
from mlxkv.server.apis.openai.bodies import ChatBody, Common, CompletionBody, ResponseFormat, ToolCall
from mlxkv.server.generation.wish import CacheOptions, Wish, checked_stops, salt_of, vocabulary
from mlxkv.server.http.errors import RequestError
from mlxkv.server.settings import MOST_CHOICES, Settings


def chat_wish(body: ChatBody, settings: Settings, model: LoadedModel, key_salt: str | None) -> Wish:
    """What a chat asks of the engine.

    Raises:
        RequestError: names the field.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs: needs logprobs true.", field="top_logprobs")
    cache = body.cache or CacheOptions()
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Wish(
        max_tokens=most,
        sampling=_sampling(body, settings, vocabulary(model)),
        stop=_stops(body),
        choices=body.n or 1,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        salt=salt_of(key_salt, cache.salt),
        store=cache.store,
        pin_s=cache.pin_s,
        processors=_format(body.response_format, model),
    )


def completion_wish(body: CompletionBody, settings: Settings, model: LoadedModel, key_salt: str | None) -> Wish:
    """What a completion asks of the engine; raises as `chat_wish`."""
    if body.echo:
        raise RequestError("echo: is not supported; leave it out.", field="echo")
    cache = body.cache or CacheOptions()
    return Wish(
        max_tokens=body.max_tokens,
        sampling=_sampling(body, settings, vocabulary(model)),
        stop=_stops(body),
        choices=body.n or 1,
        logprobs=body.logprobs,
        salt=salt_of(key_salt, cache.salt),
        store=cache.store,
        pin_s=cache.pin_s,
    )


def prompts_of(body: CompletionBody, model: LoadedModel) -> list[str | list[int]]:
    """The prompts of a completion: one text, several, token ids, or several lists of them."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("prompt: is empty.", field="prompt")
    prompts: list[str | list[int]] = [given] if isinstance(given[0], int) else list(given)
    if len(prompts) * (body.n or 1) > MOST_CHOICES:
        raise RequestError(f"prompt: at most {MOST_CHOICES} choices in one request, n included.", field="prompt")
    most = vocabulary(model)
    for ids in prompts:
        if not isinstance(ids, str) and any(not 0 <= token < most for token in ids):
            raise RequestError(f"prompt: token ids go from 0 to {most - 1:,}.", field="prompt")
    return prompts


def messages_of(body: ChatBody) -> list[dict[str, Any]]:
    """Messages as chat templates want them: plain text, arguments of calls as objects, `developer` as `system`."""
    found = []
    for i, message in enumerate(body.messages):
        content = message.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        one: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
        if message.name is not None:
            one["name"] = message.name
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        if message.reasoning_content is not None:
            one["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            one["tool_calls"] = [_call(call, i) for call in message.tool_calls]
        found.append(one)
    return found


def tools_of(body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools for the template; none when the request says not to call any.

    Raises:
        RequestError: a call was demanded, which cannot be promised.
    """
    if isinstance(body.tool_choice, dict) or body.tool_choice not in (None, "none", "auto"):
        raise RequestError("tool_choice: only none and auto are supported.", field="tool_choice")
    if not body.tools or body.tool_choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


def _sampling(body: Common, settings: Settings, vocabulary: int) -> Sampling:
    if (body.top_k or 0) > vocabulary:
        raise RequestError(f"top_k: goes up to the model's {vocabulary:,} tokens.", field="top_k")
    try:
        return Sampling(
            temperature=settings.temperature if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=min(body.top_k or 0, vocabulary - 1),
            min_p=body.min_p or 0.0,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=_bias(body.logit_bias or {}, vocabulary),
            seed=body.seed,
        )
    except UsageError as error:
        raise RequestError(str(error), field=str(error).partition(" ")[0]) from error


def _stops(body: Common) -> tuple[str, ...]:
    return checked_stops([body.stop] if isinstance(body.stop, str) else body.stop or [], "stop")


def _bias(given: dict[str, float], size: int) -> dict[int, float]:
    found = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit()) or not int(key) < size:
            raise RequestError(f"logit_bias: {key[:20]!r} is no token id of this model.", field="logit_bias")
        if not -100 <= value <= 100:
            raise RequestError("logit_bias: values go from -100 to 100.", field="logit_bias")
        found[int(key)] = value
    return found


def _format(wanted: ResponseFormat | None, model: LoadedModel) -> Any:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        schema: dict[str, Any] | None = None
    elif wanted.json_schema is None:
        raise RequestError("response_format.json_schema: is missing.", field="response_format.json_schema")
    else:
        schema = wanted.json_schema.schema_
    try:
        return processors_for(model.tokenizer, schema, vocabulary(model))
    except UsageError as error:
        raise RequestError(f"response_format: {error}", field="response_format") from error


def _call(call: ToolCall, message: int) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"messages.{message}.tool_calls: arguments are no JSON.", field=f"messages.{message}.tool_calls"
            ) from error
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
