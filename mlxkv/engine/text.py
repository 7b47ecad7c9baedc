"""From tokens to text that may be shown: whole characters, no half of a stop text, reasoning and tool calls apart.

What begins a reasoning part or a tool call is mlx-lm's knowledge of the model's template; its state machine splits the
text. A stop text ends the reply only where it stands in the answer itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from mlxkv.core.platform import keep_open_files_limit

with keep_open_files_limit():
    from mlx_lm.generate import TextStateMachine, make_text_state_machine

Kind = Literal["text", "reasoning", "tool"]
_KINDS: dict[str, Kind] = {"reasoning": "reasoning", "tool": "tool"}


class Segment(NamedTuple):
    """A part of a reply; a `tool` segment is the whole text of one call, still to be parsed.

    `written` is a call with its markers, as far as they came: what to show of one that cannot be parsed.
    """

    kind: Kind
    text: str
    written: str = ""


class ReplyText:
    """Owner: the sequence it belongs to. `stopped_by` is the stop text that was complete, None until then."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], *, initial: str | None, tools: bool) -> None:
        """Begin a reply.

        Args:
            initial: the state that the prompt leaves the reply in, `normal` or `reasoning`; None for plain text, in
                which nothing is looked for but `stop`.
            tools: whether a call is told apart from text.
        """
        self._detokenizer = tokenizer.detokenizer
        self._stop = tuple(text for text in stop if text)
        self._pending = ""
        self._call: str | None = None
        self._state: Any = None
        self._marks = (tokenizer.tool_call_start or "", tokenizer.tool_call_end or "")
        self.stopped_by: str | None = None
        if initial is not None:
            known = tokenizer if tools else _without_tools(tokenizer)
            self._state = make_text_state_machine(known).make_state(initial)

    @property
    def stopped(self) -> bool:
        """Whether a stop text ended the reply."""
        return self.stopped_by is not None

    def add(self, token: int) -> list[Segment]:
        """What became certain with `token`."""
        self._detokenizer.add_token(token)
        return self._split(self._detokenizer.last_segment)

    def finish(self) -> list[Segment]:
        """What was held back, after the last token. A character cut off by the end is left out."""
        if self.stopped:
            return []
        self._detokenizer.finalize()
        found = self._split(self._detokenizer.last_segment.rstrip("\ufffd"))
        if self._state is not None and not self.stopped:
            self._state, rest, name = TextStateMachine.flush(self._state)
            found += self._sorted([(name, rest)])
        if self._call is not None:
            found.append(self._end_call(closed=False))
        if self._pending and not self.stopped:
            found.append(Segment("text", self._pending))
            self._pending = ""
        return found

    def _split(self, text: str) -> list[Segment]:
        if self._state is None:
            return self._sorted([("normal", text)])
        self._state, parts = TextStateMachine.split(self._state, text)
        return self._sorted(parts)

    def _sorted(self, parts: list[tuple[str, str]]) -> list[Segment]:
        found: list[Segment] = []
        for name, text in parts:
            kind = _KINDS.get(name, "text")
            if kind == "tool":
                self._call = (self._call or "") + text
                continue
            if self._call is not None:
                found.append(self._end_call(closed=True))
            shown = self._before_stop(text) if kind == "text" else text
            if shown:
                found.append(Segment(kind, shown))
            if self.stopped:
                break
        return found

    def _end_call(self, *, closed: bool) -> Segment:
        text, self._call = self._call or "", None
        start, end = self._marks
        return Segment("tool", text, start + text + (end if closed else ""))

    def _before_stop(self, more: str) -> str:
        """The text that can no longer be part of a stop text; the earliest stop text ends it."""
        self._pending += more
        found = [(at, text) for text in self._stop if (at := self._pending.find(text)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            shown, self._pending = self._pending[:at], ""
            return shown
        keep = max((_overlap(self._pending, text) for text in self._stop), default=0)
        cut = len(self._pending) - keep
        shown, self._pending = self._pending[:cut], self._pending[cut:]
        return shown


def initial_state(tokenizer: Any, prompt: list[int]) -> str:
    """`reasoning` when the template left a reasoning part open at the end of the prompt."""
    if tokenizer.response_initial_state:
        return str(tokenizer.response_initial_state)
    if tokenizer.has_thinking and tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt):
        return "reasoning"
    return "normal"


def _without_tools(tokenizer: Any) -> SimpleNamespace:
    """What mlx-lm's state machine asks of a tokenizer, for a request that has no tools."""
    return SimpleNamespace(
        has_thinking=tokenizer.has_thinking,
        think_start=tokenizer.think_start,
        think_end=tokenizer.think_end,
        has_tool_calling=False,
        structural_markers=tokenizer.structural_markers,
        response_transitions=tokenizer.response_transitions,
    )


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`.

    >>> _overlap("alpha be", "beta gamma")
    2
    """
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
