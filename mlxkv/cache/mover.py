"""The mover: the one thread that writes to the cold tier, and the few that read from it. It sees bytes, never arrays.

The write queue is bounded in bytes: `offload` never waits, it says no. What it refused stays hot and is offered again.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from mlxkv.cache.codec import BlockIdentity, View
from mlxkv.cache.cold import ColdTier
from mlxkv.cache.layout import Layout
from mlxkv.core.errors import CacheRootError

READERS = 3

logger = logging.getLogger("mlxkv")


@dataclass(frozen=True)
class Offloaded:
    """What became of a queued block, the object that was queued: `reason` is None when the cold tier holds it now."""

    block: BlockIdentity
    nbytes: int
    reason: str | None


class Mover:
    """Owner: `offload`, `submit`, `read`, `done` and `close` belong to the thread that owns the store."""

    def __init__(self, cold: ColdTier, queue_bytes: int) -> None:
        self.queue_bytes = queue_bytes
        self.queued_bytes = 0
        self._cold = cold
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        cold.when_offline = lambda: self._work.put(_nothing)  # or the writer would sleep through the next try
        self._done: queue.SimpleQueue[Offloaded] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="mlxkv-read")
        self._writer = threading.Thread(target=self._run, name="mlxkv-write", daemon=True)
        self._writer.start()

    def offload(self, block: BlockIdentity, layout: Layout, views: Sequence[View]) -> bool:
        """Queue a block for the cold tier; False when the queue has no room for it. Never waits."""
        nbytes = sum(view.nbytes for view in views)
        if self.queued_bytes and self.queued_bytes + nbytes > self.queue_bytes:
            return False
        self.queued_bytes += nbytes
        self._work.put(lambda: self._done.put(Offloaded(block, nbytes, self._cold.write(block, layout, views))))
        return True

    def done(self) -> list[Offloaded]:
        """What was written or refused since the last call."""
        finished = []
        while not self._done.empty():
            item = self._done.get()
            self.queued_bytes -= item.nbytes
            finished.append(item)
        return finished

    def submit(self, work: Callable[[], object]) -> None:
        """Have the writing thread do something to the cold tier, after what is queued."""
        self._work.put(work)

    def read(
        self, block: BlockIdentity, layout: Layout, views: Sequence[View], tensors: Sequence[int] | None = None
    ) -> Future[int]:
        """Read a block into `views` on a reading thread; the future raises what `ColdTier.read` raises."""
        return self._readers.submit(self._cold.read, block, layout, views, tensors)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued before is done; False when the time is up."""
        reached = threading.Event()
        self._work.put(reached.set)
        return reached.wait(timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the queue and stop the threads; False when the time was up before the queue was empty."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._work.put(None)
        self._writer.join(timeout_s)
        return not self._writer.is_alive()

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=self._cold.retry_in_s)
            except queue.Empty:
                work = self._cold.retry
            if work is None:
                return
            try:
                work()
            except (OSError, sqlite3.Error, CacheRootError) as error:
                # A cold tier that fails is a slower cache, never a dead one.
                logger.warning("cold tier: %s", error)


def _nothing() -> None:
    return None
