"""mlx-lm's sliding-window caches that also remember the rows of the block being filled.

A ring forgets: when a block is full, its first rows may be gone (a window of 32, a long chunk). So the keys and
values are noted as they are put in, references and not copies, until the block is cut.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxkv.core.platform import keep_open_files_limit

with keep_open_files_limit():
    from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache


class Record:
    """Rows of keys and values from position `start` on, `[1, heads, n, dim]`. Owner: the cache that fills it."""

    def __init__(self) -> None:
        self.start = 0
        self._rows: dict[str, list[mx.array]] = {"keys": [], "values": []}

    def add(self, keys: mx.array, values: mx.array) -> None:
        """Note rows that come next. Handles of its own: a ring that took these very arrays writes into them later."""
        self._rows["keys"].append(mx.array(keys))
        self._rows["values"].append(mx.array(values))

    def rows(self, side: str, start: int, stop: int) -> mx.array:
        """The rows of positions [start, stop), `[heads, n, dim]`."""
        parts = self._rows[side]
        if len(parts) > 1:
            parts[:] = [mx.concatenate(parts, axis=2)]
        return parts[0][0, :, start - self.start : stop - self.start]

    @property
    def nbytes(self) -> int:
        """Of the rows that are noted."""
        return sum(part.nbytes for parts in self._rows.values() for part in parts)

    def forget(self, before: int) -> None:
        """Drop the rows of positions below `before`."""
        drop = before - self.start
        if drop <= 0:
            return
        for side, parts in self._rows.items():
            if parts:
                joined = mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
                # A slice would keep the whole chunk alive; a copy of what is left keeps only that.
                self._rows[side] = [mx.contiguous(joined[:, :, drop:])] if drop < joined.shape[2] else []
        self.start = before


class RecordedRotatingKVCache(RotatingKVCache):  # type: ignore[misc]
    """A `RotatingKVCache` with a record."""

    def __init__(self, max_size: int, keep: int = 0) -> None:
        super().__init__(max_size, keep)
        self.record = Record()

    @property
    def window(self) -> int:
        return int(self.max_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.record.add(keys, values)
        return super().update_and_fetch(keys, values)

    def fill(self, keys: mx.array, values: mx.array, tokens: int) -> None:
        """Put in the last rows of `tokens` tokens, in their order, as a fresh run would have them."""
        self.keys, self.values = keys, values
        self.offset, self._idx = tokens, keys.shape[2]


class RecordedChunkedKVCache(ChunkedKVCache):  # type: ignore[misc]
    """A `ChunkedKVCache` with a record."""

    def __init__(self, chunk_size: int) -> None:
        super().__init__(chunk_size)
        self.record = Record()

    @property
    def window(self) -> int:
        return int(self.chunk_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.record.add(keys, values)
        return super().update_and_fetch(keys, values)

    def fill(self, keys: mx.array, values: mx.array, tokens: int) -> None:
        """Put in the last rows of `tokens` tokens, in their order."""
        self.keys, self.values = keys, values
        self.offset, self.start_position = tokens, tokens - keys.shape[2]


RECORDED = (RecordedRotatingKVCache, RecordedChunkedKVCache)


def recorded(cache: Any) -> Any:
    """The same empty cache with a record, when it is one that forgets."""
    if type(cache) is RotatingKVCache:
        return RecordedRotatingKVCache(cache.max_size, cache.keep)
    if type(cache) is ChunkedKVCache:
        return RecordedChunkedKVCache(cache.chunk_size)
    return cache
