"""The bodies of OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mlxkv.server.generation.wish import CacheOptions, Flag, Lenient, Number, Text, Texts, Whole, Wholes
from mlxkv.server.settings import MOST_CHOICES


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
