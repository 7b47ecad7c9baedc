"""Calls of tools in what a model wrote, in the form that chat templates know."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from mlxkv.models.loader import LoadedModel


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
