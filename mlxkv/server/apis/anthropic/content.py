"""The content of a message as it grows."""

from __future__ import annotations

import json
from typing import Any

from mlxkv.server.apis.anthropic.events import frame, new_id


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
