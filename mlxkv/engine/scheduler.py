"""Who runs next; no MLX, no clock of its own. First come, first served, with two exceptions that both end.

A request whose next block is being computed by another waits for it (the block is computed once), and while it waits
others may go first. It does not wait for ever: when the other ends, however it ends, its blocks are no longer expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mlxkv.core.units import format_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """How much may run at once. `memory_bytes` is what live sequences may hold together; None is no limit."""

    sequences: int = 8
    queue: int = 64
    memory_bytes: int | None = None


@dataclass
class Waiting(Generic[T]):
    """A request in the queue and the bytes it may come to hold."""

    item: T
    need_bytes: int


@dataclass
class Scheduler(Generic[T]):
    """Owner: the engine's thread. `expected` says whether a running prefill will commit a block that `item` needs."""

    limits: Limits
    live_bytes: int = 0
    live: int = 0
    queue: list[Waiting[T]] = field(default_factory=list)

    def refuse(self, need_bytes: int) -> str | None:
        """Why a request can never run, or None."""
        memory = self.limits.memory_bytes
        if memory is not None and need_bytes > memory:
            return (
                f"the request needs {format_bytes(need_bytes)} of KV cache, and all requests together may hold"
                f" {format_bytes(memory)}; shorten it or ask for fewer tokens."
            )
        return None

    def add(self, item: T, need_bytes: int) -> None:
        self.queue.append(Waiting(item, need_bytes))

    def next(self, expected: Callable[[T], bool], *, extra_bytes: int = 0) -> T | None:
        """Take the request that starts now, or None.

        Args:
            extra_bytes: what live sequences hold beyond what they need each, for padding; below 0 where they share a
                prefix and hold less.

        Only a request that waits for somebody's blocks is passed; one that waits for memory or a place holds the line,
        so that small ones cannot pass it for ever.
        """
        if self.live >= self.limits.sequences:
            return None
        for waiting in self.queue:
            if expected(waiting.item):
                continue
            if self.live and self.room_bytes(extra_bytes) < waiting.need_bytes:
                return None
            self.queue.remove(waiting)
            self.live += 1
            self.live_bytes += waiting.need_bytes
            return waiting.item
        return None

    def room_bytes(self, extra_bytes: int) -> float:
        """What live sequences may come to hold more; `extra_bytes` as for `next`."""
        memory = self.limits.memory_bytes
        return math.inf if memory is None else memory - self.live_bytes - extra_bytes

    def ended(self, need_bytes: int) -> None:
        """A live request gave its place back."""
        self.live -= 1
        self.live_bytes -= need_bytes

    def drop(self, items: Iterable[T]) -> None:
        """Take cancelled requests out of the queue."""
        gone = list(items)
        self.queue = [waiting for waiting in self.queue if waiting.item not in gone]
