"""A device that fails: in one call that makes MLX work or wait, what it computes is rubbish and an error is told.

On Metal a failed command buffer leaves its arrays as if they were evaluated, with anything in them, and MLX raises
once: in the call that waits for it, or in a later one that looks (mlx/error.h, mlx/event.h).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache

from mlxkv.attention.shared_prefix import SharedPrefixCache

FAILED = "[METAL] Command buffer execution failed: "
OUT_OF_MEMORY = f"{FAILED}Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)."
TOO_SLOW = f"{FAILED}Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)."
VICTIM = f"{FAILED}Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)."
TOO_LONG = (
    "[metal::malloc] Attempting to allocate 48736917632 bytes which is greater than the maximum allowed buffer size of"
    " 30150672384 bytes."
)
RUBBISH = 0.0625
CALLS = ("eval", "async_eval", "synchronize")
KINDS = (KVCache, RotatingKVCache, ArraysCache, BatchKVCache, BatchRotatingKVCache, SharedPrefixCache)


class Device:
    """Counts the calls of one thread that make MLX work or wait, and fails in one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.fail_at: int | None = None
        self.late = False
        self.then: str | None = None
        self.said = FAILED
        self._pending: str | None = None
        self._thread: int | None = None
        self._written: WeakSet[Any] = WeakSet()
        for name in CALLS:
            monkeypatch.setattr(mx, name, self._watched(getattr(mx, name)))
        for kind in KINDS:
            if "update_and_fetch" in vars(kind):
                monkeypatch.setattr(kind, "update_and_fetch", self._noting(kind.update_and_fetch))
            else:
                monkeypatch.setattr(kind, "__setitem__", self._noting(kind.__setitem__))

    def arm(
        self, thread: int, fail_at: int | None, *, late: bool = False, said: str = FAILED, then: str | None = None
    ) -> None:
        """Fail in call `fail_at` of `thread` from now on, at once or in the call after it.

        Args:
            then: what the work that was queued behind it says, to whoever makes the next call.
        """
        self.calls, self.fail_at, self.late, self._pending, self._thread = 0, fail_at, late, None, thread
        self.said, self.then = said, then

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*arguments)
            if self._pending is not None:
                pending, self._pending = self._pending, None
                raise RuntimeError(pending)
            at, self.calls = self.calls, self.calls + 1
            result = call(*arguments)
            if at == self.fail_at:
                self._spoil(arguments)
                if not self.late:
                    self._pending = self.then
                    raise RuntimeError(self.said)
                self._pending = self.said
            if call.__name__ != "async_eval":
                self._written.clear()  # it waited for the stream: what was written before is there
            return result

        return watched

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(cache: Any, *arguments: Any) -> Any:
            self._written.add(cache)
            return method(cache, *arguments)

        return noting

    def _spoil(self, arguments: tuple[Any, ...]) -> None:
        """Fill what was asked for, and every cache that the work on its way writes, with rubbish."""
        caches = [cache.state for cache in self._written if not cache.empty()]
        arrays = [array for _, array in tree_flatten([list(arguments), caches]) if isinstance(array, mx.array)]
        self._thread, thread = None, self._thread
        try:
            mx.eval(arrays)
            for array in arrays:
                if array.nbytes and array.dtype == mx.float32:  # a token id must stay one
                    np.asarray(array)[...] = RUBBISH
        finally:
            self._thread = thread
