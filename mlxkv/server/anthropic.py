"""Anthropic's API: bodies in, messages and events out."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, Literal

from pydantic import Field

from mlxkv.core.errors import UsageError
from mlxkv.engine.request import Request, Sampling
from mlxkv.models.loader import LoadedModel
from mlxkv.server.generation.prepare import Wish, salt_of
from mlxkv.server.http.errors import RequestError
from mlxkv.server.openai import CacheOptions, Flag, Lenient, Number, Text, Texts, Whole, checked_stops, vocabulary
from mlxkv.server.settings import Settings

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "cancelled": "end_turn"}


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


def wish_of(body: MessagesBody, settings: Settings, model: LoadedModel, key_salt: str | None) -> Wish:
    """What a message asks of the engine.

    Raises:
        RequestError: names the field.
    """
    cache = body.cache or CacheOptions()
    if (body.top_k or 0) > vocabulary(model):
        raise RequestError(f"top_k: goes up to the model's {vocabulary(model):,} tokens.", field="top_k")
    try:
        sampling = Sampling(
            temperature=settings.temperature if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=min(body.top_k or 0, vocabulary(model) - 1),
        )
    except UsageError as error:
        raise RequestError(str(error), field=str(error).partition(" ")[0]) from error
    return Wish(
        max_tokens=body.max_tokens,
        sampling=sampling,
        stop=checked_stops(body.stop_sequences or [], "stop_sequences"),
        salt=salt_of(key_salt, cache.salt),
        store=cache.store,
        pin_s=cache.pin_s,
    )


def messages_of(body: CountBody) -> list[dict[str, Any]]:
    """Messages as chat templates want them; results of tools become messages of role `tool`."""
    found: list[dict[str, Any]] = []
    if body.system:
        text = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
        found.append({"role": "system", "content": text})
    for message in body.messages:
        if isinstance(message.content, str):
            found.append({"role": message.role, "content": message.content})
        else:
            found += _from_blocks(message.role, message.content)
    return found


def tools_of(body: CountBody) -> list[dict[str, Any]] | None:
    """The tools in OpenAI's form, which chat templates know; none when the request says not to call any."""
    choice = body.tool_choice
    if choice is not None and choice.type not in ("auto", "none"):
        raise RequestError("tool_choice: only auto and none are supported.", field="tool_choice")
    if not body.tools or (choice is not None and choice.type == "none"):
        return None
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in body.tools
    ]


def template_of(body: CountBody) -> dict[str, Any]:
    """Variables of the template: thinking is on or off where the request says so."""
    return {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}


def usage(request: Request, held: int, output_tokens: int, *, stores: bool) -> dict[str, int]:
    """Tokens in disjoint parts: read from the cache, written to it, and neither; their sum is the prompt.

    Written are those of full blocks that were not there before.
    """
    prompt = len(request.prompt)
    created = max(prompt // 64 * 64 - held, 0) if stores and request.store else 0
    return {
        "input_tokens": prompt - held - created,
        "cache_read_input_tokens": held,
        "cache_creation_input_tokens": created,
        "output_tokens": output_tokens,
    }


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def frame(event: str, **fields: Any) -> bytes:
    """One server-sent event; its type is in the data too."""
    data = json.dumps({"type": event, **fields}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"event: {event}\ndata: {data}\n\n".encode()


class ContentBlocks:
    """The content of a message as it grows: text, thinking and calls, one block after the other.

    `frames` are the events of a stream; `content` is the same without one.
    """

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self.used_tools = False
        self._open: str | None = None

    def add(self, kind: str, text: str) -> list[bytes]:
        """More text or thinking."""
        kind, field = ("thinking", "thinking") if kind == "reasoning" else ("text", "text")
        frames = []
        if self._open != kind:
            signed = {"signature": ""} if kind == "thinking" else {}  # clients want one; nothing is signed here
            frames = [*self.close(), self._begin({"type": kind, field: "", **signed})]
            self._open = kind
        self.content[-1][field] += text
        frames.append(self._delta({"type": f"{kind}_delta", field: text}))
        return frames

    def add_call(self, call: dict[str, Any]) -> list[bytes]:
        """A whole call of a tool."""
        function = call["function"]
        written = function["arguments"]
        block = {"type": "tool_use", "id": new_id("toolu"), "name": function["name"], "input": {}}
        self.used_tools = True
        frames = [*self.close(), self._begin(block)]
        frames.append(self._delta({"type": "input_json_delta", "partial_json": written}))
        self.content[-1]["input"] = json.loads(written)
        self._open = "tool_use"
        return [*frames, *self.close()]

    def close(self) -> list[bytes]:
        """End the block that is open."""
        if self._open is None:
            return []
        self._open = None
        return [frame("content_block_stop", index=len(self.content) - 1)]

    def _begin(self, block: dict[str, Any]) -> bytes:
        self.content.append(dict(block))
        return frame("content_block_start", index=len(self.content) - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return frame("content_block_delta", index=len(self.content) - 1, delta=delta)


def _from_blocks(role: str, blocks: list[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    for result in results:
        content = result.content
        said = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        found.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": said})
    if text or calls or not results:
        message: dict[str, Any] = {"role": role, "content": text}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
                for call in calls
            ]
        found.append(message)
    return found
