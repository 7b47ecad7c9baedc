"""Chat requests of one character a token, and what a cache that holds an earlier one would say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from talking import plain_tokenizer

from mlxkv.blocklog.outline import Outline, Outliner
from mlxkv.blocklog.why import Record
from mlxkv.cache.names import pack

KEY = b"a key of the tests"
TEMPLATE = """
{%- if bos is defined %}{{ '<s>' * bos }}{% endif %}
{%- if clock is defined %}{{ '<|system|>It is ' + clock + ' on this machine. ' + '.' * 80 + '</s>' }}{% endif %}
{%- if tools %}{{ '<|system|>Tools:' }}
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '</s>' }}{% endif %}
{%- for m in messages %}
{%- set text = m.content or '' %}
{%- if m.role == 'assistant' and not loop.last and keep_thinking is not defined %}
{%- set text = text.split('</think>')[-1] %}{% endif %}
{{- '<|' + m.role + '|>' + text }}
{%- for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + ' ' + call.function.arguments }}{% endfor %}
{{- '</s>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def tool(name: str, *fields: str, note: str = "does it") -> dict[str, Any]:
    """A function tool with text fields, in that order."""
    properties = {field: {"type": "string", "description": f"the {field}"} for field in fields}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"{name} {note}", "parameters": schema}}


def conversation(system: str, *turns: str) -> list[dict[str, Any]]:
    """A system message, then user and assistant by turns."""
    roles = ("user", "assistant")
    return [{"role": "system", "content": system}, *({"role": roles[i % 2], "content": t} for i, t in enumerate(turns))]


@dataclass
class Asked:
    """One request: its tokens, its outline (with the reply's tokens once there is one), and its text."""

    tokens: list[int]
    outline: Outline
    text: str


class Asker:
    """Renders requests with one template and outlines them."""

    def __init__(self, template: str = TEMPLATE, *, key: bytes = KEY) -> None:
        self.tokenizer = TokenizerWrapper(plain_tokenizer())
        self.tokenizer._tokenizer.chat_template = template
        self.outliner = Outliner(self.tokenizer, key=key)

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        reply: str | None = None,
        **options: Any,
    ) -> Asked:
        rendered = self.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=True, **options
        )
        tokens = [int(token) for token in rendered]
        told = {name: value for name, value in options.items() if name != "clock"}  # a template reads that by itself
        outline = self.outliner.outline(tokens, messages, tools=tools, options=told)
        text = self.outliner.text(tokens)
        if reply is not None:
            said = self.tokenizer.encode(reply, add_special_tokens=False)
            outline = self.outliner.with_reply(outline, said)
            tokens += said
        return Asked(tokens, outline, text)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """The leading tokens two lists share, counted one by one."""
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)


def record(asked: Asked, held: Asked | None = None, *, name: str = "now", reason: str | None = None) -> Record:
    """What the cache would write of a request when it holds the tokens of `held` and nothing else."""
    shared = 0 if held is None else min(common(asked.tokens, held.tokens), len(asked.tokens) - 1)
    if reason is None and shared < len(asked.tokens) - 1:
        goes_on = held is not None and len(held.tokens) > shared
        reason = f"diverged at token {shared}" if goes_on else "never seen"
    return Record(
        request=name,
        prompt_tokens=asked.outline.prompt_tokens,
        matched_tokens=shared,
        reason=reason,
        outline=asked.outline,
        text=asked.text,
    )


def with_tokens(found: Record, asked: Asked) -> Record:
    """The record of somebody who also knows the tokens."""
    return Record(**{**vars(found), "tokens": pack(asked.tokens)})
