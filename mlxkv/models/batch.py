"""Sequences decoded together, on mlx-lm's batch caches: rows join, leave, and are cut into blocks like any other.

mlx-lm pads on the left, so row i's position p lies at column `left_padding[i] + p`. A single row keeps its own prompt
cache. Caches that have no batch form in mlx-lm are run a row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from mlxkv.core.platform import keep_open_files_limit
from mlxkv.models.adapter import PromptCache, Source, leaves, split_path
from mlxkv.models.windows import Record, RecordedRotatingKVCache

with keep_open_files_limit():
    from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache, CacheList, KVCache

_WITH_BATCH_FORM = (KVCache, RecordedRotatingKVCache, ArraysCache)


class RecordedBatchRotatingKVCache(BatchRotatingKVCache):  # type: ignore[misc]
    """A `BatchRotatingKVCache` with a record a row."""

    def __init__(self, max_size: int, left_padding: list[int]) -> None:
        super().__init__(max_size, left_padding)
        self.records = [Record() for _ in left_padding]

    @classmethod
    def merge(cls, caches: list[Any]) -> Self:
        made: Self = super().merge(caches)
        made.records = [cache.record for cache in caches]
        return made

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        for i, record in enumerate(self.records):
            record.add(keys[i : i + 1], values[i : i + 1])
        return super().update_and_fetch(keys, values)

    def filter(self, batch_indices: Any) -> None:
        self.records = [self.records[i] for i in batch_indices.tolist()]
        super().filter(batch_indices)

    def extend(self, other: Any) -> None:
        self.records = [*self.records, *other.records]
        super().extend(other)


class DecodeBatch:
    """The rows that are decoded together. Owner: the thread that owns MLX. Joining and leaving copy the batch once."""

    def __init__(self) -> None:
        self.size = 0
        self._caches: PromptCache = []  # of all rows together, or of the only one
        self._apart: list[PromptCache] = []  # one a row, where mlx-lm has no batch form
        self._alone = False

    def step(self, module: nn.Module, tokens: mx.array) -> mx.array:
        """One forward pass of one token a row, not evaluated: `[rows]` -> logits `[rows, vocabulary]`."""
        if not self._apart:
            logits: mx.array = module(tokens[:, None], cache=self._caches)
            return logits[:, -1, :]
        rows = [module(tokens[i : i + 1][None], cache=cache) for i, cache in enumerate(self._apart)]
        return mx.concatenate(rows)[:, -1, :]

    def join(self, prompt_cache: PromptCache) -> None:
        """Add a sequence as the last row; its prompt cache belongs to the batch from now on."""
        self.size += 1
        if not all(isinstance(leaf, _WITH_BATCH_FORM) for _, leaf in leaves(prompt_cache)):
            self._apart.append(prompt_cache)
        elif self.size == 1:
            self._caches, self._alone = prompt_cache, True
        else:
            if self._alone:
                self._caches, self._alone = [_merged(cache) for cache in self._caches], False
            for mine, cache in zip(self._caches, prompt_cache, strict=True):
                mine.extend(_merged(cache))

    def leave(self, rows: set[int]) -> None:
        """Drop these rows; the others move up."""
        kept = [row for row in range(self.size) if row not in rows]
        if len(kept) == self.size:
            return
        if self._apart:
            self._apart = [self._apart[row] for row in kept]
        elif not kept:
            self._caches, self._alone = [], False
        else:
            for cache in self._caches:
                cache.filter(mx.array(kept))
        self.size = len(kept)

    def sources(self) -> Sequence[Source] | None:
        """Where the rows' blocks are cut out of, until the next join or leave; None while each has its own cache."""
        if self._alone or self._apart or not self.size:
            return None
        held = dict(leaves(self._caches))
        return [_RowSource(held, row) for row in range(self.size)]


class _RowSource:
    """One row of a batch, as `adapter.Source`."""

    def __init__(self, held: dict[str, Any], row: int) -> None:
        self._held = held
        self._row = row
        self._padding: dict[str, int] = {}

    def tokens(self) -> int | None:
        """None: who feeds the rows keeps their positions."""
        return None

    def rows(self, path: str, start: int, stop: int) -> mx.array:
        leaf_path, side, _ = split_path(path)
        leaf = self._held[leaf_path]
        if isinstance(leaf, RecordedBatchRotatingKVCache):
            return leaf.records[self._row].rows(side, start, stop)
        if leaf_path not in self._padding:
            self._padding[leaf_path] = int(leaf.left_padding[self._row].item())
        pad = self._padding[leaf_path]
        array: mx.array = leaf.keys if side == "keys" else leaf.values
        return array[self._row, :, pad + start : pad + stop]

    def state(self, path: str) -> mx.array:
        leaf_path, _, index = split_path(path)
        state: mx.array = self._held[leaf_path].cache[index]
        return state[self._row : self._row + 1]

    def can_cut(self, start: int) -> bool:
        return all(record.start <= start for record in self._records())

    def forget(self, before: int) -> None:
        for record in self._records():
            record.forget(before)

    def _records(self) -> list[Record]:
        return [
            leaf.records[self._row] for leaf in self._held.values() if isinstance(leaf, RecordedBatchRotatingKVCache)
        ]


def _merged(cache: Any) -> Any:
    """The batch of one row that a cache is."""
    if isinstance(cache, CacheList):
        return CacheList(*(_merged(inner) for inner in cache.caches))
    if isinstance(cache, RecordedRotatingKVCache):
        return RecordedBatchRotatingKVCache.merge([cache])
    return cache.merge([cache])
