"""mlx-lm's own server log, as far as it says anything: prompt lengths, and at DEBUG what was cached."""

from __future__ import annotations

import re

from mlxkv.blocklog.events import Event

_PROGRESS = re.compile(r"Prompt processing progress: (\d+)/(\d+)$")
_HELD = re.compile(r"Prompt Cache: (\d+) sequences, ([\d.]+) GB$")
_BY_TYPE = re.compile(r"- \S+: \d+ sequences, [\d.]+ GB$")
_USAGE = re.compile(r'"(prompt_tokens|completion_tokens|cached_tokens)": (\d+)')
_KNOWN = (
    "Starting httpd",
    "Starting stream:",
    "Starting completion:",
    "Incoming Request Body:",
    "Failed to parse tool",
)
ACCESS = re.compile(rb'\S+ - - \[[^\]]+\] "(?:POST|GET|HEAD|OPTIONS) [^"]*" \d{3} -')
RESPONSE = "Outgoing Response:"


class MlxLmReader:
    """Feeds on records, gives events. Owner: whoever reads the log.

    The length in the progress lines is what was left to compute; only the response at DEBUG says what was cached.
    """

    def __init__(self) -> None:
        self.levels: set[str] = set()
        self._requests = 0
        self._pending: Event | None = None

    def feed(self, time: str, level: str, message: str) -> list[Event] | None:
        """The events of one record; None when its shape is not known."""
        self.levels.add(level)
        if progress := _PROGRESS.match(message):
            if progress[1] != progress[2]:
                return []
            before = self._take()
            self._requests += 1
            self._pending = Event(event="request", source="mlx_lm", time=time, request=f"mlx_lm-{self._requests}",
                                  computed_tokens=int(progress[2]))  # fmt: skip
            return before
        if held := _HELD.match(message):
            return [
                Event(event="held", source="mlx_lm", time=time, index=int(held[1]), bytes=int(float(held[2]) * 1e9))
            ]
        if message.startswith(RESPONSE):
            return self._response(time, dict(_USAGE.findall(message)))
        return [] if _BY_TYPE.match(message) or message.startswith(_KNOWN) else None

    def finish(self) -> list[Event]:
        """The last request."""
        return self._take()

    def _response(self, time: str, usage: dict[str, str]) -> list[Event]:
        if "prompt_tokens" not in usage:
            return []
        if self._pending is None:
            self._requests += 1
        prompt, cached = int(usage["prompt_tokens"]), int(usage.get("cached_tokens", 0))
        self._pending = None
        return [
            Event(event="request", source="mlx_lm", time=time, request=f"mlx_lm-{self._requests}", prompt_tokens=prompt,
                  reused_tokens=cached, computed_tokens=prompt - cached, looked_up_tokens=cached, matched_tokens=cached,
                  output_tokens=int(usage.get("completion_tokens", 0)))
        ]  # fmt: skip

    def _take(self) -> list[Event]:
        pending, self._pending = self._pending, None
        return [] if pending is None else [pending]
