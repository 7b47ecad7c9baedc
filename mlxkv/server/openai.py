"""OpenAI's API: bodies in, answers and chunks out."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mlxkv.core.errors import UsageError
from mlxkv.engine.request import Finished, Sampling, TokenLogprob
from mlxkv.engine.structured import processors_for
from mlxkv.models.detokenizer import token_bytes
from mlxkv.models.loader import LoadedModel
from mlxkv.server.generation.prepare import Wish, salt_of
from mlxkv.server.http.errors import RequestError
from mlxkv.server.settings import MOST_CHOICES, Settings

LEAST_LOGPROB = -9999.0  # what OpenAI writes for "impossible", which JSON has no number for
MOST_STOPS, MOST_STOP_LENGTH = 16, 1024
MOST_IDS = 2**21  # more than any context; checking them must not keep others waiting

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Texts = Annotated[list[Text], Field(fail_fast=True)]  # one error of a list of millions is enough
Wholes = Annotated[list[Whole], Field(fail_fast=True, max_length=MOST_IDS)]


class Lenient(BaseModel):
    """Fields nobody knows are ignored; values of the ones we know must be right."""

    model_config = ConfigDict(extra="ignore")


class CacheOptions(Lenient):
    """What a request may say about the cache: leave nothing behind, share only within a salt, keep for a while."""

    store: Flag = True
    salt: Annotated[str, Field(max_length=256)] | None = None
    pin_s: Annotated[float, Field(strict=True, ge=0, le=86_400, allow_inf_nan=False)] = 0.0


class TextPart(Lenient):
    type: Literal["text", "input_text"]
    text: Text


class FunctionCall(Lenient):
    name: Text
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Lenient):
    id: Text | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None


class Function(Lenient):
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Lenient):
    type: Literal["function"]
    function: Function


class StreamOptions(Lenient):
    include_usage: Flag | None = None


class JsonSchema(Lenient):
    name: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Common(Lenient):
    """What both of OpenAI's bodies have."""

    model: Text | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    seed: Whole | None = None
    stop: Text | Texts | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MOST_CHOICES)] | None = None
    cache: CacheOptions | None = None

    def sampling(self, settings: Settings, vocabulary: int) -> Sampling:
        if (self.top_k or 0) > vocabulary:
            raise RequestError(f"top_k: goes up to the model's {vocabulary:,} tokens.", field="top_k")
        try:
            return Sampling(
                temperature=settings.temperature if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=min(self.top_k or 0, vocabulary - 1),
                min_p=self.min_p or 0.0,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                logit_bias=_bias(self.logit_bias or {}, vocabulary),
                seed=self.seed,
            )
        except UsageError as error:
            raise RequestError(str(error), field=str(error).partition(" ")[0]) from error

    def stops(self) -> tuple[str, ...]:
        return checked_stops([self.stop] if isinstance(self.stop, str) else self.stop or [], "stop")

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(Common):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Common):
    """`POST /v1/completions`."""

    prompt: Text | Texts | Wholes | Annotated[list[Wholes], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(strict=True, ge=0, le=5)] | None = None
    echo: Flag | None = None


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
        sampling=body.sampling(settings, vocabulary(model)),
        stop=body.stops(),
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
        sampling=body.sampling(settings, vocabulary(model)),
        stop=body.stops(),
        choices=body.n or 1,
        logprobs=body.logprobs,
        salt=salt_of(key_salt, cache.salt),
        store=cache.store,
        pin_s=cache.pin_s,
    )


def checked_stops(given: Sequence[str], field: str) -> tuple[str, ...]:
    """Stop texts that can be looked for after every token.

    Raises:
        RequestError: there are too many, one is too long, or one is empty.
    """
    if len(given) > MOST_STOPS or any(len(text) > MOST_STOP_LENGTH for text in given):
        raise RequestError(
            f"{field}: at most {MOST_STOPS} texts of at most {MOST_STOP_LENGTH:,} characters.", field=field
        )
    if not all(given):
        raise RequestError(f"{field}: an empty text would stop every reply at once.", field=field)
    return tuple(given)


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


def vocabulary(model: LoadedModel) -> int:
    """How many token ids the model knows."""
    level = {**model.config, **(model.config.get("text_config") or {})}
    return int(level.get("vocab_size") or len(model.tokenizer))


class ToolCalls:
    """Parses the calls of one choice; what cannot be parsed is text, not lost."""

    def __init__(self, model: LoadedModel, tools: Sequence[dict[str, Any]] | None, *, one_only: bool) -> None:
        self._parser = model.tokenizer.tool_parser
        self._tools = list(tools or [])
        self._one_only = one_only
        self.count = 0

    def parse(self, text: str) -> list[dict[str, Any]] | None:
        """The calls in a segment of kind `tool`: `{index, id, type, function}`; None when it is none."""
        try:
            parsed = self._parser(text, self._tools)
            functions = [_function(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
        except (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError):
            return None  # the model wrote nonsense; a parser that goes through Python's own gives up in many ways
        if self._one_only:
            functions = functions[: 1 - min(self.count, 1)]
        first, self.count = self.count, self.count + len(functions)
        return [
            {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
            for index, function in enumerate(functions, first)
        ]


def usage(finished: Sequence[Finished]) -> dict[str, Any]:
    """Tokens of a request; a prompt of several choices counts once."""
    first = finished[0]
    output = sum(one.output_tokens for one in finished)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": first.prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
    }


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


def envelope(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """What every answer and chunk of one request begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _function(call: Any) -> dict[str, str]:
    """Name and arguments of a call; arguments are the text of a JSON object.

    Raises:
        ValueError: they are not, or not to be written as UTF-8. TypeError, LookupError: the call has no such form.
    """
    name, arguments = call["name"], call["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("a call has a name and an object of arguments")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + written).encode()
    return {"name": name, "arguments": written}


def _logprob(model: LoadedModel, token: int, value: float) -> dict[str, Any]:
    raw = token_bytes(model.tokenizer, token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(value), "bytes": list(raw)}


def _text(model: LoadedModel, token: int) -> str:
    return token_bytes(model.tokenizer, token).decode("utf-8", "replace")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST_LOGPROB


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
