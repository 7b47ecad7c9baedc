"""Who sleeps on a queue, and for how long: what an idle process does is seen without waiting for it."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest


class Waits:
    """With which timeout each thread waited for a message, in order; None is until one comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch every `queue.SimpleQueue` that is made from now on."""
        noted: list[tuple[str, float | None]] = []

        class Watched(queue.SimpleQueue[Any]):
            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                if block:
                    noted.append((threading.current_thread().name, timeout))
                return super().get(block, timeout)

        self._noted = noted
        monkeypatch.setattr(queue, "SimpleQueue", Watched)

    def of(self, thread: str) -> list[float | None]:
        return [timeout for name, timeout in self._noted if name == thread]
