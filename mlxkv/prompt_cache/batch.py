"""Sequences decoded together: rows join, leave, and are cut into blocks like any other sequence.

A single row keeps its own prompt cache. Several are put on mlx-lm's batch caches, which pad on the left: row i's
position p lies at column `left_padding[i] + p`. Padding is memory: a batch holds rows x longest. So rows of one group
are at most about twice as long as each other, and other rows decode in a group of their own, a forward pass more.

As soon as two rows begin with the same blocks and that saves `SHARE_FROM_BYTES`, the batch keeps one copy of what they
share (`attention.shared_prefix`, which pads nothing), where the architecture allows it. Caches that have no batch form
are run a row at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from mlxkv.attention.dispatch import Dispatch
from mlxkv.attention.shared_prefix import Batch, branch, extend
from mlxkv.cache.layout import ARRAY_STEP, Layout
from mlxkv.cache.names import BLOCK_TOKENS, BlockName
from mlxkv.core.platform import keep_open_files_limit
from mlxkv.core.units import MIB
from mlxkv.prompt_cache.adapter import PromptCache, Source, held_bytes, leaves, split_path
from mlxkv.prompt_cache.windows import Record, RecordedRotatingKVCache

with keep_open_files_limit():
    from mlx_lm.models.cache import ArraysCache, BatchKVCache, BatchRotatingKVCache, CacheList, KVCache

SHARE_FROM_BYTES = 16 * MIB
"""Below this a prefix in common is copied: a group costs two more operations a layer and step."""

PADDING_TOKENS = 256
"""So much padding a row is no matter: mlx-lm's arrays grow by as many rows at a time."""

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

    @property
    def nbytes(self) -> int:
        return int(super().nbytes) + sum(record.nbytes for record in self.records)

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


class _Group:
    """Rows whose caches are padded to the longest of them, or a row by itself. Owner: the `DecodeBatch`."""

    def __init__(self, prompt_cache: PromptCache, row: int, tokens: int) -> None:
        self.caches = prompt_cache
        self.rows = [row]
        self.tokens = [tokens]
        self.alone = True

    def add(self, prompt_cache: PromptCache, row: int, tokens: int) -> None:
        if self.alone:
            self.caches, self.alone = [_merged(cache) for cache in self.caches], False
        for mine, cache in zip(self.caches, prompt_cache, strict=True):
            mine.extend(_merged(cache))
        self.rows.append(row)
        self.tokens.append(tokens)

    def keep(self, places: list[int]) -> None:
        """Only the rows at these places; padding that all of them have goes."""
        for cache in self.caches:
            cache.filter(mx.array(places))
        for _, leaf in leaves(self.caches):
            _let_go_of_what_was_cut(leaf)
        self.rows = [self.rows[place] for place in places]
        self.tokens = [self.tokens[place] for place in places]

    def row(self, place: int) -> PromptCache:
        """A row's own prompt cache."""
        return self.caches if self.alone else [cache.extract(place) for cache in self.caches]


class DecodeBatch:
    """The rows that are decoded together. Owner: the thread that owns MLX. Joining and leaving copy a group once."""

    def __init__(self, hook: Dispatch, layout: Layout) -> None:
        """Begin empty.

        Args:
            hook: of the model that the rows are run through.
            layout: of its blocks, which says what a row holds.
        """
        self._hook = hook
        self._layout = layout
        self._chains: list[Sequence[BlockName]] = []
        self._groups: list[_Group] = []
        self._shared: Batch = []  # in place of the groups once rows share a prefix
        self._apart: list[PromptCache] = []  # one a row, where mlx-lm has no batch form
        self._order: mx.array | None = None  # where each row's logits are in those of all groups
        self.saved_bytes = 0
        """What the rows would take more if each had a copy of its own of what they share."""
        self.extra_bytes = 0
        """What the rows may hold more than each by itself, for padding; less what they save."""

    @property
    def size(self) -> int:
        return len(self._chains)

    @property
    def held_bytes(self) -> int:
        """Bytes of every array the rows hold."""
        if self._shared:
            return sum(int(cache.nbytes) for cache in self._shared)
        return held_bytes([*self._caches, *(cache for caches in self._apart for cache in caches)])

    @property
    def _caches(self) -> PromptCache:
        """Those of every group, one behind another."""
        return [cache for group in self._groups for cache in group.caches]

    def step(self, module: nn.Module, tokens: mx.array) -> mx.array:
        """One forward pass of one token a row, not evaluated: `[rows]` -> logits `[rows, vocabulary]`."""
        if self._apart:
            rows = [module(tokens[i : i + 1][None], cache=cache) for i, cache in enumerate(self._apart)]
            return mx.concatenate(rows)[:, -1, :]
        if self._shared or self._order is None:
            logits: mx.array = module(tokens[:, None], cache=self._shared or self._groups[0].caches)
            self._count_step()
            return logits[:, -1, :]
        parts = [module(tokens[mx.array(group.rows)][:, None], cache=group.caches)[:, -1, :] for group in self._groups]
        self._count_step()
        return mx.concatenate(parts)[self._order]

    def join(
        self, prompt_cache: PromptCache, tokens: int, chain: Sequence[BlockName] = (), *, room_bytes: float = math.inf
    ) -> None:
        """Add a sequence as the last row; its prompt cache belongs to the batch from now on.

        Args:
            tokens: how many it holds.
            chain: names of the full blocks of its prompt, in order.
            room_bytes: what padding may take; where that is too little, the row decodes by itself.
        """
        if not all(isinstance(leaf, _WITH_BATCH_FORM) for _, leaf in leaves(prompt_cache)):
            self._apart.append(prompt_cache)
        elif not self._join_shared(prompt_cache, chain):
            group = self._group_for(tokens, room_bytes)
            if group is None:
                self._groups.append(_Group(prompt_cache, self.size, tokens))
            else:
                group.add(prompt_cache, self.size, tokens)
        self._chains.append(chain)
        self._count()

    def leave(self, rows: set[int]) -> None:
        """Drop these rows; the others move up."""
        kept = [row for row in range(self.size) if row not in rows]
        if len(kept) == self.size:
            return
        if self._apart:
            self._apart = [self._apart[row] for row in kept]
        elif not kept:
            self._groups, self._shared = [], []
        elif self._shared:
            for cache in self._shared:
                cache.filter(kept)
        else:
            self._leave_groups(rows, {row: place for place, row in enumerate(kept)})
        self._chains = [self._chains[row] for row in kept]
        self._count()

    def sources(self) -> list[Source | None]:
        """Where each row's blocks are cut out of, until the next join or leave; None for one that has its own cache."""
        if self._shared:
            return [_SharedRowSource(self._shared, row) for row in range(self.size)]
        found: list[Source | None] = [None] * self.size
        for group in self._groups:
            if not group.alone:
                held = dict(leaves(group.caches))
                for place, row in enumerate(group.rows):
                    found[row] = _RowSource(held, place)
        return found

    def _leave_groups(self, rows: set[int], moved: dict[int, int]) -> None:
        for group in self._groups:
            places = [place for place, row in enumerate(group.rows) if row not in rows]
            if places and len(places) < len(group.rows):
                group.keep(places)
            elif not places:
                group.rows = []
        self._groups = [group for group in self._groups if group.rows]
        for group in self._groups:
            group.rows = [moved[row] for row in group.rows]

    def _group_for(self, tokens: int, room_bytes: float) -> _Group | None:
        """The group that a row adds least padding to; None when every one would pad a row too much, or too little room.

        A row is padded at most by as much as it holds itself, so that it takes at most twice that. What it is padded by
        stays as it is while all grow, and shrinks when longer ones leave.
        """
        best, least = None, room_bytes
        for group in self._groups:
            more = self._padding_bytes([*group.tokens, tokens]) - self._padding_bytes(group.tokens)
            if more <= least and self._may_pad([*group.tokens, tokens]):
                best, least = group, more
        return best

    def _may_pad(self, tokens: Sequence[int]) -> bool:
        held = self._layout.restored_bytes
        longest, always = held(max(tokens)), held(PADDING_TOKENS)
        return all(longest - held(each) <= max(held(each), always) for each in tokens)

    def _padding_bytes(self, tokens: Sequence[int]) -> int:
        """What rows of so many tokens may hold more in one batch than each by itself."""
        if len(tokens) == 1:
            return 0
        held = self._layout.restored_bytes
        step = held(ARRAY_STEP) - self._layout.checkpoint_bytes  # the common array ends up to a step behind each row's
        return sum(held(max(tokens)) - held(each) + step for each in tokens)

    def _count_step(self) -> None:
        for group in self._groups:
            group.tokens = [tokens + 1 for tokens in group.tokens]

    def _count(self) -> None:
        """Rows only come and go here, and the engine asks twice a step."""
        self.saved_bytes = sum(int(cache.saved_bytes) for cache in self._shared)
        self.extra_bytes = sum(self._padding_bytes(group.tokens) for group in self._groups) - self.saved_bytes
        self._order = None
        if len(self._groups) > 1:
            rows = [row for group in self._groups for row in group.rows]
            self._order = mx.array(sorted(range(len(rows)), key=rows.__getitem__))

    def _nearest(self, chain: Sequence[BlockName]) -> tuple[int, int]:
        """The row that has most blocks in common with a chain, and how many tokens that is."""
        common = [
            next((i for i, (a, b) in enumerate(zip(chain, other, strict=False)) if a != b), min(len(chain), len(other)))
            for other in self._chains
        ]
        row = max(range(len(common)), key=common.__getitem__)
        return row, common[row] * BLOCK_TOKENS

    def _join_shared(self, prompt_cache: PromptCache, chain: Sequence[BlockName]) -> bool:
        """Join as a branch of a row: only what the sequence has of its own is taken over. False where it is no use."""
        if not self._chains or not self._hook.served or not all(type(cache) is KVCache for cache in prompt_cache):
            return False
        row, tokens = self._nearest(chain)
        saves = tokens * self._layout.bytes_per_token >= SHARE_FROM_BYTES
        if not self._shared and not saves:
            return False
        if not self._shared:
            self._share()
        held = self._shared[0].prefix_tokens(row)
        tokens = held if 0 < held <= tokens else 0 if held else tokens
        if tokens * self._layout.bytes_per_token < SHARE_FROM_BYTES or tokens > prompt_cache[0].offset:
            extend(self._shared, self._hook.begin(prompt_cache))
            return True
        joining = branch(self._shared, row, tokens)
        for cache, own in zip(joining, prompt_cache, strict=True):
            if own.offset > tokens:
                cache.update_and_fetch(own.keys[:, :, tokens : own.offset], own.values[:, :, tokens : own.offset])
        extend(self._shared, joining)
        return True

    def _share(self) -> None:
        """Put every row on caches that can keep a prefix once."""
        rows = {row: group.row(place) for group in self._groups for place, row in enumerate(group.rows)}
        self._shared, self._groups = self._hook.begin(rows[0]), []
        for row in range(1, self.size):
            extend(self._shared, self._hook.begin(rows[row]))


def _let_go_of_what_was_cut(leaf: Any) -> None:
    """mlx-lm cuts padding off with a slice, which keeps the whole array alive; a copy keeps only what is left."""
    if isinstance(leaf, BatchKVCache) and leaf.keys is not None:
        leaf.keys, leaf.values = mx.contiguous(leaf.keys), mx.contiguous(leaf.values)


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
