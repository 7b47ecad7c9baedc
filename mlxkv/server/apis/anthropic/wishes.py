"""From Anthropic's bodies to what they wish for, and to messages and tools as chat templates want them."""

from __future__ import annotations

from typing import Any

from mlxkv.core.errors import UsageError
from mlxkv.engine.request import Sampling
from mlxkv.models.loader import LoadedModel
from mlxkv.server.apis.anthropic.bodies import (
    CountBody,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from mlxkv.server.generation.wish import CacheOptions, Wish, checked_stops, salt_of, vocabulary
from mlxkv.server.http.errors import RequestError
from mlxkv.server.settings import Settings


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
