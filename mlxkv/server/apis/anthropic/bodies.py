"""The bodies of Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mlxkv.server.generation.wish import CacheOptions, Flag, Lenient, Number, Text, Texts, Whole


class TextBlock(Lenient):
    type: Literal["text"]
    text: Text


class ThinkingBlock(Lenient):
    type: Literal["thinking"]
    thinking: Text


class ToolUseBlock(Lenient):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ToolResultBlock(Lenient):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class AnthropicMessage(Lenient):
    role: Literal["user", "assistant"]
    content: Text | Annotated[list[Block], Field(fail_fast=True)]


class AnthropicTool(Lenient):
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any]


class ToolChoice(Lenient):
    type: Text
    disable_parallel_tool_use: Flag | None = None


class Thinking(Lenient):
    type: Literal["enabled", "disabled", "adaptive"]


class CountBody(Lenient):
    """`POST /v1/messages/count_tokens`."""

    model: Text | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: Text | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(strict=True, ge=1)]
    stream: Flag | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    stop_sequences: Texts | None = None
    cache: CacheOptions | None = None
