"""Sequences decoded together: rows join, leave, and are cut into blocks like any other sequence.

A single row keeps its own prompt cache. Several are put on mlx-lm's batch caches, which pad on the left: row i's
position p lies at column `left_padding[i] + p`. As soon as two rows begin with the same blocks and that saves
`SHARE_FROM_BYTES`, the batch keeps one copy of what they share (`attention.shared_prefix`), where the architecture
allows it. Caches that have no batch form are run a row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from mlxkv.attention.dispatch import Dispatch
from mlxkv.attention.shared_prefix import Batch, branch, extend
from mlxkv.cache.names import BLOCK_TOKENS, BlockName
from mlxkv.core.platform import keep_open_files_limit
from mlxkv.core.units import MIB
from mlxkv.prompt_cache.adapter import PromptCache, Source, leaves, split_path
from mlxkv.prompt_cache.windows import Record, RecordedRotatingKVCache

with keep_open_files_limit():
    from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache, CacheList, KVCache

SHARE_FROM_BYTES = 16 * MIB
"""Below this a prefix in common is copied: a group costs two more operations a layer and step."""

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

    def __init__(self, hook: Dispatch, bytes_per_token: int) -> None:
        """Begin empty.

        Args:
            hook: of the model that the rows are run through.
            bytes_per_token: what a token of a row holds.
        """
        self._hook = hook
        self._bytes_per_token = bytes_per_token
        self._chains: list[Sequence[BlockName]] = []
        self._caches: PromptCache = []  # of all rows together, or of the only one
        self._shared: Batch = []  # in place of `_caches` once rows share a prefix
        self._apart: list[PromptCache] = []  # one a row, where mlx-lm has no batch form
        self._alone = False
        self.saved_bytes = 0
        """What the rows would take more if each had a copy of its own of what they share."""

    @property
    def size(self) -> int:
        return len(self._chains)

    def step(self, module: nn.Module, tokens: mx.array) -> mx.array:
        """One forward pass of one token a row, not evaluated: `[rows]` -> logits `[rows, vocabulary]`."""
        if not self._apart:
            logits: mx.array = module(tokens[:, None], cache=self._shared or self._caches)
            return logits[:, -1, :]
        rows = [module(tokens[i : i + 1][None], cache=cache) for i, cache in enumerate(self._apart)]
        return mx.concatenate(rows)[:, -1, :]

    def join(self, prompt_cache: PromptCache, chain: Sequence[BlockName] = ()) -> None:
        """Add a sequence as the last row; its prompt cache belongs to the batch from now on.

        Args:
            chain: names of the full blocks of its prompt, in order.
        """
        if not all(isinstance(leaf, _WITH_BATCH_FORM) for _, leaf in leaves(prompt_cache)):
            self._apart.append(prompt_cache)
        elif not self._chains:
            self._caches, self._alone = prompt_cache, True
        else:
            row, tokens = self._nearest(chain)
            if self._can_share(prompt_cache) and (self._shared or tokens * self._bytes_per_token >= SHARE_FROM_BYTES):
                self._join_shared(prompt_cache, row, tokens)
            else:
                self._join_padded(prompt_cache)
        self._chains.append(chain)
        self._count_saved()

    def leave(self, rows: set[int]) -> None:
        """Drop these rows; the others move up."""
        kept = [row for row in range(self.size) if row not in rows]
        if len(kept) == self.size:
            return
        if self._apart:
            self._apart = [self._apart[row] for row in kept]
        elif not kept:
            self._caches, self._shared, self._alone = [], [], False
        else:
            for cache in self._shared:
                cache.filter(kept)
            for cache in self._caches:
                cache.filter(mx.array(kept))
        self._chains = [self._chains[row] for row in kept]
        self._count_saved()

    def sources(self) -> Sequence[Source] | None:
        """Where the rows' blocks are cut out of, until the next join or leave; None while each has its own cache."""
        if self._shared:
            return [_SharedRowSource(self._shared, row) for row in range(self.size)]
        if self._alone or self._apart or not self._chains:
            return None
        held = dict(leaves(self._caches))
        return [_RowSource(held, row) for row in range(self.size)]

    def _count_saved(self) -> None:
        """Rows only come and go here, and the engine asks twice a step."""
        self.saved_bytes = sum(int(cache.saved_bytes) for cache in self._shared)

    def _nearest(self, chain: Sequence[BlockName]) -> tuple[int, int]:
        """The row that has most blocks in common with a chain, and how many tokens that is."""
        common = [
            next((i for i, (a, b) in enumerate(zip(chain, other, strict=False)) if a != b), min(len(chain), len(other)))
            for other in self._chains
        ]
        row = max(range(len(common)), key=common.__getitem__)
        return row, common[row] * BLOCK_TOKENS

    def _can_share(self, prompt_cache: PromptCache) -> bool:
        return self._hook.served and all(type(cache) is KVCache for cache in prompt_cache)

    def _join_padded(self, prompt_cache: PromptCache) -> None:
        if self._alone:
            self._caches, self._alone = [_merged(cache) for cache in self._caches], False
        for mine, cache in zip(self._caches, prompt_cache, strict=True):
            mine.extend(_merged(cache))

    def _join_shared(self, prompt_cache: PromptCache, row: int, tokens: int) -> None:
        """Join as a branch of a row: only what the sequence has of its own is taken over."""
        if not self._shared:
            self._share()
        held = self._shared[0].prefix_tokens(row)
        tokens = held if 0 < held <= tokens else 0 if held else tokens
        if tokens * self._bytes_per_token < SHARE_FROM_BYTES or tokens > prompt_cache[0].offset:
            extend(self._shared, self._hook.begin(prompt_cache))
            return
        joining = branch(self._shared, row, tokens)
        for cache, own in zip(joining, prompt_cache, strict=True):
            if own.offset > tokens:
                cache.update_and_fetch(own.keys[:, :, tokens : own.offset], own.values[:, :, tokens : own.offset])
        extend(self._shared, joining)

    def _share(self) -> None:
        """Put every row on caches that can keep a prefix once."""
        if self._alone:
            rows = [self._caches]
        else:
            rows = [[cache.extract(row) for cache in self._caches] for row in range(self.size)]
        self._shared, self._caches, self._alone = self._hook.begin(rows[0]), [], False
        for more in rows[1:]:
            extend(self._shared, self._hook.begin(more))


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


class _SharedRowSource:
    """One row of a batch whose rows share prefixes, as `adapter.Source`; windows and states are never in one."""

    def __init__(self, batch: Batch, row: int) -> None:
        self._batch = batch
        self._row = row

    def tokens(self) -> int | None:
        return int(self._batch[0].tokens(self._row))

    def rows(self, path: str, start: int, stop: int) -> mx.array:
        layer, side, _ = split_path(path)
        keys, values = self._batch[int(layer)].rows(self._row, start, stop)
        return (keys if side == "keys" else values)[0]

    def state(self, path: str) -> mx.array:
        raise KeyError(path)

    def can_cut(self, start: int) -> bool:
        del start
        return True

    def forget(self, before: int) -> None:
        """Nothing is noted beside the rows themselves."""
