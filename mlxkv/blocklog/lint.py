"""Prefix stability before a deploy: recorded conversations through the chat template, names and outlines only.

Each request is compared with all before it, to the token, as an endless cache would: what is not reusable then will not
be on any machine. No model weights are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxkv.blocklog.outline import Outline, Outliner, message_text
from mlxkv.blocklog.why import ADVICE, Cause, Record, compare, likeness, words_around
from mlxkv.cache.names import BLOCK_TOKENS, TOKEN_BYTES, common_tokens, pack
from mlxkv.core.errors import MlxkvError, UsageError
from mlxkv.models.chat import render

Body = Mapping[str, Any]
TEMPLATE_OPTIONS = "chat_template_kwargs"
_EXPECTED: frozenset[Cause] = frozenset({"new text", "nothing", "short"})


@dataclass(frozen=True)
class Turn:
    """One request: how much of it was there before, and what broke the prefix.

    `broken` is False where only new text follows. `message`, `role` say where; `before`, `now`, `then` are the words
    there (both ways they go on).
    """

    line: int
    prompt_tokens: int
    reusable_tokens: int
    nearest_line: int | None
    cause: Cause
    detail: str
    advice: str
    role: str | None
    index: int | None
    words: tuple[str, str, str] | None

    @property
    def broken(self) -> bool:
        return self.cause not in _EXPECTED


@dataclass(frozen=True)
class Report:
    """All turns. `reusable_share` is of all prompt tokens after the first request; None with fewer than two."""

    turns: tuple[Turn, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def reusable_tokens(self) -> int:
        return sum(turn.reusable_tokens for turn in self.turns)

    @property
    def reusable_share(self) -> float | None:
        """Of the tokens that were in some earlier prompt's place: those of every request but the first."""
        later = self.turns[1:]
        prompt = sum(turn.prompt_tokens for turn in later)
        return sum(turn.reusable_tokens for turn in later) / prompt if prompt else None

    @property
    def broken(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self.turns if turn.broken)


@dataclass(frozen=True)
class _Seen:
    line: int
    messages: Sequence[Mapping[str, Any]]
    packed: bytes
    outline: Outline
    text: str


def read_bodies(lines: Sequence[str] | Iterator[str]) -> Iterator[tuple[int, Body]]:
    """Request bodies of a file with one JSON object a line, with the line's number from 1.

    Raises:
        UsageError: a line is no request body; says which and why.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"line {number} is no JSON ({error}); write one request body a line.") from error
        inner = body.get("body", body) if isinstance(body, dict) else None  # the form of OpenAI's batch files
        if not isinstance(inner, dict) or not isinstance(inner.get("messages"), list) or not inner["messages"]:
            raise UsageError(f"line {number} has no list of messages; write OpenAI or Anthropic request bodies.")
        if (wrong := _wrong(inner)) is not None:
            raise UsageError(f"line {number} has {wrong}; write OpenAI or Anthropic request bodies.")
        yield number, inner


def _wrong(body: Body) -> str | None:
    """What neither API has, of the fields that are read here; None when there is no such thing."""
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return "tools that are no list of objects"
    if not all(isinstance(tool.get("function", {}), dict) for tool in tools):
        return "a tool whose function is no object"
    if any("input_schema" in tool and "function" not in tool and "name" not in tool for tool in tools):
        return "a tool without a name"
    if not isinstance(body.get(TEMPLATE_OPTIONS) or {}, dict):
        return f"{TEMPLATE_OPTIONS} that are no object"
    return next((wrong for message in body["messages"] if (wrong := _wrong_message(message)) is not None), None)


def _wrong_message(message: Any) -> str | None:
    if not isinstance(message, dict):
        return "a message that is no object"
    content, calls = message.get("content"), message.get("tool_calls") or []
    if content is not None and not isinstance(content, str | list):
        return "a message whose content is no text and no list"
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function", {}), dict) for call in calls
    ):
        return "tool calls that are no list of objects"
    parts = content if isinstance(content, list) else []
    if any(isinstance(part, dict) and part.get("type") == "tool_use" and "name" not in part for part in parts):
        return "a tool use without a name"
    return None


def to_openai(body: Body) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Messages, tools and template options of a body of either API, as the chat template takes them."""
    messages: list[dict[str, Any]] = []
    system = body.get("system")
    if system:
        messages.append({"role": "system", "content": _plain_text(system)})
    for message in body["messages"]:
        messages += _message(message)
    tools = [
        tool if "function" in tool or "input_schema" not in tool else _anthropic_tool(tool)
        for tool in body.get("tools") or ()
    ]
    return messages, tools, dict(body.get(TEMPLATE_OPTIONS) or {})


def _plain_text(content: Any) -> str:
    return message_text({"content": content})


def _anthropic_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _message(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One message of either API; Anthropic's tool results are messages of their own there."""
    role, content = str(message.get("role", "")), message.get("content")
    if isinstance(content, str) or content is None:
        yield {**message, "content": content or ""}
        return
    said = [part for part in content if isinstance(part, Mapping)]
    thought = "".join(str(part.get("thinking", "")) for part in said if part.get("type") == "thinking")
    calls = [
        {
            "id": part.get("id"),
            "type": "function",
            "function": {"name": part["name"], "arguments": part.get("input", {})},
        }
        for part in said
        if part.get("type") == "tool_use"
    ]
    for part in said:
        if part.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": _plain_text(part.get("content"))}
    text = "".join(str(part.get("text", "")) for part in said if part.get("type") in ("text", "input_text"))
    if text or calls or thought or not any(part.get("type") == "tool_result" for part in said):
        found = {name: value for name, value in message.items() if name != "content"}
        found |= {"role": role, "content": (f"<think>{thought}</think>" if thought else "") + text}
        yield found | ({"tool_calls": calls} if calls else {})


def lint(bodies: Iterator[tuple[int, Body]], tokenizer: Any, *, block_tokens: bool = False) -> Report:
    """Run recorded requests, in order, through a chat template.

    Args:
        tokenizer: mlx-lm's wrapper, of the model that is to be deployed.
        block_tokens: count reuse in whole blocks only, as the SSD gives it; else to the token, as memory does.

    Raises:
        UsageError: a line is no request body, or the template refuses its messages.
        ModelError: the model has no chat template.

    Cost: one rendering a request and one comparison with each earlier one.
    """
    outliner = Outliner(tokenizer)
    seen: list[_Seen] = []
    turns: list[Turn] = []
    for line, body in bodies:
        messages, tools, options = to_openai(body)
        try:
            tokens = render(tokenizer, messages, tools=tools, options=options)
        except MlxkvError as error:
            raise type(error)(f"line {line}: {error}") from error
        outline = outliner.outline(tokens, messages, tools=tools, options=options)
        now = _Seen(line, messages, pack(tokens), outline, outliner.text(tokens))
        turns.append(_turn(now, seen, block_tokens=block_tokens))
        seen.append(now)
    return Report(tuple(turns))


def _turn(now: _Seen, seen: Sequence[_Seen], *, block_tokens: bool) -> Turn:
    prompt = len(now.packed) // TOKEN_BYTES
    near, shared = None, 0
    for other in seen:
        tokens = common_tokens(now.packed, other.packed)
        if near is None or tokens >= shared:
            near, shared = other, tokens
    reusable = min(shared, prompt - 1)
    if block_tokens:
        reusable = reusable // BLOCK_TOKENS * BLOCK_TOKENS
    cause, detail = _broke(now, near, shared, prompt)
    if cause == "new text" and near is not None and (index := _thought_dropped(now, near)) is not None:
        cause, detail = "thinking removed", f"message {index} (assistant) was sent with thinking, the template drops it"
    part = now.outline.at(min(shared, prompt - 1))
    words = words_around(_record(now), _record(near)) if near is not None else None
    return Turn(now.line, prompt, reusable, near.line if near else None, cause, detail, ADVICE[cause],
                part.role if part else None, part.index if part else None, words)  # fmt: skip


def _broke(now: _Seen, near: _Seen | None, shared: int, prompt: int) -> tuple[Cause, str]:
    if near is None:
        return "new text", "the first request"
    if shared < BLOCK_TOKENS and not likeness(now.outline, near.outline):
        return "new text", "another conversation: no block, message or tool is shared"
    if shared >= prompt:
        return "nothing", "the same prompt as before"
    return compare(now.outline, near.outline, shared)


def _thought_dropped(now: _Seen, near: _Seen) -> int | None:
    """The first message since the nearest request whose thinking is not in the prompt: its reply cannot be reused."""
    rendered = {part.index for part in now.outline.parts if part.thinking}
    for index, message in enumerate(now.messages):
        thought = "</think>" in message_text(message) or bool(message.get("reasoning_content"))
        if index >= len(near.messages) and thought and index not in rendered:
            return index
    return None


def _record(seen: _Seen) -> Record:
    return Record(request=str(seen.line), outline=seen.outline, text=seen.text, tokens=seen.packed)


def template_reads_the_clock(tokenizer: Any) -> bool:
    """Whether the chat template writes the date or the time by itself."""
    return "strftime_now" in str(tokenizer.chat_template)
