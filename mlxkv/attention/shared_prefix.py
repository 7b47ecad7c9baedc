"""A cache for mlx-lm's models whose batch keeps one copy of the prefix of each group of sequences.

A layer has one `SharedPrefixCache` for the whole batch: each prefix once, [1, Hkv, P, D], and a pool of 64-token blocks
for what every sequence has of its own. Nothing is padded to the longest sequence. A decode step takes each prefix as
one matrix product with the queries of its group and the blocks by their table, then merges the two. A sequence that
decodes by itself gets plain contiguous arrays and MLX's fused attention, as in mlx-lm.

How an engine uses it (a prompt cache is mlx-lm's list, one cache a layer; so is a batch here; mlx-lm's `BatchGenerator`
takes a branch as the cache of a sequence too):

    hook = Dispatch(module)                                # once a model; close() undoes it
    batch = hook.begin(prompt_cache)                       # takes over one sequence's KVCaches, prefilled or restored;
                                                           # from blocks: hook.begin([cache_of(keys, values), ...])
    joining = branch(batch, row=0, prefix_tokens=1984)     # another sequence that begins with the same 1,984 tokens
    module(tokens[None, 1984:-1], cache=joining)           # its own prompt, in chunks, against the one copy
    extend(batch, joining)                                 # joins; a sequence with nothing in common: hook.begin(...)
    logits = module(last_tokens[:, None], cache=batch)     # one step for all groups, ragged
    for cache in batch: cache.filter([0, 2])               # the others leave
    own = [cache.extract(0) for cache in batch]            # a sequence's own KVCaches, prefix and suffix
    keys, values = batch[0].rows(0, 64, 128)               # or some tokens of one, to commit a block
    sum(cache.nbytes for cache in batch)                   # what it holds; prefix_tokens(row) says what is shared
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxkv.attention.block_attention import BLOCK_TOKENS, BlockPlan, block_partial, plan_blocks
from mlxkv.attention.partial import Partial, finish, merge, nothing, partial_shared
from mlxkv.attention.rows import Moved, Placed, Prefix, Row, Table, blocks_for
from mlxkv.core.errors import UsageError
from mlxkv.core.platform import keep_open_files_limit

with keep_open_files_limit():
    from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

Pair = tuple[mx.array, mx.array]

_UNSHARED = (RotatingKVCache, ArraysCache)
"""Caches of mlx-lm's that have a batch form of their own and cannot be cut at any token."""

LONE_STEPS = 16
"""Decode steps after which a batch of one row gets plain arrays: not at once, for others may be about to join."""


@dataclass(frozen=True)
class _Members:
    """A prefix and the rows that begin with it; None when they are all rows in order."""

    prefix: Prefix
    rows: mx.array | None


@dataclass(frozen=True)
class _Step:
    """What every layer needs to run one step.

    Attributes:
        sources: index of each kept token in the step's [B * L] tokens; None when all are kept.
        blocks, places: where each goes.
        plan: of the blocks, for one query a row; None for longer steps.
        order: row b is entry order[b] of the groups' rows one behind another; None when it is b itself.
    """

    placed: Placed
    counts: tuple[int, ...]
    sources: mx.array | None
    blocks: mx.array
    places: mx.array
    plan: BlockPlan | None
    groups: tuple[_Members, ...]
    order: mx.array | None


class SharedPrefixCache:
    """One layer's keys and values of a batch of sequences that may begin alike.

    Used as mlx-lm's batch caches are (`offset`, `update_and_fetch`, `make_mask`, `filter`, `extend`, `extract`,
    `prepare`, `finalize`, `state`, `nbytes`). All layers of a batch are driven alike, one after another.
    Owner: the thread that owns MLX. Make one with `Dispatch.begin`, `begin` or `branch`.
    """

    step = BLOCK_TOKENS

    def __init__(
        self,
        table: Table,
        prefixes: dict[Prefix, Pair],
        alone: KVCache | None,
        *,
        hooked: bool,
        grouped_mask: bool,
    ) -> None:
        self._table = table
        self._prefixes = prefixes
        self._pool: Pair | None = None
        self._alone = alone
        self._hooked = hooked
        self._grouped_mask = grouped_mask
        self._left: list[int] | None = None  # tokens that are no padding, while a right-padded prompt goes through
        self._step: _Step | None = None
        self._lone = 0  # decode steps in a row that only one sequence took

    # what a model asks

    @property
    def offset(self) -> int | mx.array:
        """Position of each row's next token, [B]; a number for a batch of plain arrays."""
        if self._alone is not None:
            return int(self._alone.offset)
        table = self._table
        return table.answer("offset", lambda: mx.array([row.tokens for row in table.rows]))

    @property
    def alone(self) -> bool:
        """Whether the batch is one sequence in plain contiguous arrays."""
        return self._alone is not None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Pair:
        """Append [B, Hkv, L, D] and [B, Hkv, L, Dv] to every row.

        Returns:
            The plain arrays of a sequence that is alone. For a batch behind the hook, the new keys and values, which
            only `attend` may follow. Otherwise every row's keys and values [B, Hkv, most tokens, D], put together for
            this step: `make_mask` hides what lies beyond a row's tokens.
        """
        length = keys.shape[2]
        self._lone = self._lone + 1 if length == len(self._table.rows) == 1 else 0
        if self._lone > LONE_STEPS:
            self.settle()
        if self._alone is not None:
            fetched: Pair = self._alone.update_and_fetch(keys, values)
            return fetched
        counts = self._counts(length)
        if self._left is not None:
            self._left = [left - count for left, count in zip(self._left, counts, strict=True)]
        step = _step(self._table, counts, length)
        self._pool = tuple(
            _written(side, new, step)
            for side, new in zip(self._grown(step.placed.table, keys, values), (keys, values), strict=True)
        )
        self._table, self._step = step.placed.table, step
        return (keys, values) if self._hooked else self._together()

    def attend(self, queries: mx.array, *, scale: float) -> mx.array:
        """Attention [B, Hq, L, Dv] of the queries whose keys were appended last, each row causal over its own tokens.

        Cost: one query a row reads each prefix and each block once. Longer steps take the rows one by one through MLX's
        fused attention, over an array [1, Hkv, tokens, D] that lasts for this call.
        """
        step = self._step
        if step is None or self._pool is None:
            raise UsageError("nothing was appended yet; call update_and_fetch first.")
        if step.plan is None:
            return self._attend_long(queries, step.counts, scale)
        own = block_partial(queries, *self._pool, step.plan, scale=scale)
        if not step.groups:
            return finish(own, queries.dtype)
        parts = []
        for group in step.groups:
            chosen = queries if group.rows is None else queries[group.rows]
            parts.append(partial_shared(chosen, *self._prefixes[group.prefix], scale=scale))
        shared = parts[0]
        if step.order is not None:
            _, heads, length, dim = own.out.shape
            rest = nothing(1, heads, length, dim)  # for rows without a prefix
            joined = (mx.concatenate(arrays)[step.order] for arrays in zip(*parts, rest, strict=True))
            shared = Partial(*joined)
        return finish(merge(own, shared), queries.dtype)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask that mlx-lm hands to attention after N tokens more: none behind the hook, which needs none."""
        if self._alone is not None:
            return self._alone.make_mask(N, return_array=return_array, window_size=window_size)
        if self._hooked:
            return None
        offset = mx.array(self.offset)[:, None, None, None]
        positions = offset + mx.arange(N)[:, None]
        counts = self._counts(N)
        keys = mx.arange(max(row.tokens + count for row, count in zip(self._table.rows, counts, strict=True)))
        mask = keys <= positions
        if window_size is not None:
            mask = mask & (keys > positions - window_size)
        return mask[:, :, None] if self._grouped_mask else mask

    # what an engine asks

    def size(self) -> int:
        """Tokens of the longest row."""
        return max(self.tokens(row) for row in range(len(self._table.rows)))

    def empty(self) -> bool:
        return self.size() == 0

    def is_trimmable(self) -> bool:
        return False

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self._table.rows)

    def tokens(self, row: int) -> int:
        """Tokens of a row, prefix included."""
        return int(self._alone.offset) if self._alone is not None else self._table.rows[row].tokens

    def prefix_tokens(self, row: int) -> int:
        """How many of a row's tokens are kept once for all that begin with them."""
        return 0 if self._alone is not None else self._table.rows[row].prefix_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of every array held: each prefix once, the pool with its reserve. Branches hold the same prefix."""
        return sum(array.nbytes for array in self.state)

    @property
    def saved_bytes(self) -> int:
        """What copies of the prefixes would take more: tokens of a prefix x (rows that begin with it - 1)."""
        if self._alone is not None:
            return 0
        rows = self._table.rows
        return sum(
            (sum(row.prefix is prefix for row in rows) - 1) * sum(side.nbytes for side in pair)
            for prefix, pair in self._prefixes.items()
        )

    @property
    def state(self) -> list[mx.array]:
        """Every array held, to be evaluated."""
        if self._alone is not None:
            return [] if self._alone.keys is None else [self._alone.keys, self._alone.values]
        return [side for pair in (*self._prefixes.values(), *([self._pool] if self._pool else [])) for side in pair]

    def rows(self, row: int, start: int, stop: int) -> Pair:
        """Keys and values of tokens [start, stop) of a row, [1, Hkv, stop - start, D].

        Raises:
            UsageError: the row has not that many tokens.

        Cost: copies them; reads no others but those of the blocks they lie in.
        """
        if not 0 <= start <= stop <= self.tokens(row):
            raise UsageError(f"row {row} has {self.tokens(row)} tokens; [{start}, {stop}) are not among them.")
        if self._alone is not None:
            held = (self._alone.keys, self._alone.values)
            keys, values = (mx.contiguous(side[:, :, start:stop]) for side in held)  # a view would stay in the way
            return keys, values
        chosen = self._table.rows[row]
        ahead = chosen.prefix_tokens
        parts: list[Pair] = []
        if start < ahead and chosen.prefix is not None:
            keys, values = self._prefixes[chosen.prefix]
            parts.append((keys[:, :, start : min(stop, ahead)], values[:, :, start : min(stop, ahead)]))
        if stop > ahead or not parts:
            parts.append(self._own(chosen, max(start - ahead, 0), max(stop - ahead, 0)))
        keys, values = zip(*parts, strict=True)
        return _joined(keys), _joined(values)

    def extract(self, row: int) -> KVCache:
        """A row as mlx-lm's own cache of one sequence, prefix and suffix; the batch is not changed.

        Cost: one copy of the row.
        """
        made = KVCache()
        made.keys, made.values = (mx.contiguous(side) for side in self.rows(row, 0, self.tokens(row)))
        made.offset = self.tokens(row)
        return made

    def branch(self, row: int, prefix_tokens: int | None = None) -> SharedPrefixCache:
        """A batch of one more sequence that begins with a row's first tokens; it and the row hold one copy of them.

        Args:
            prefix_tokens: how many. None means all tokens of a sequence that is alone, or the prefix the row has.
                A row in a batch gives full blocks; one that has a prefix gives that one.

        Raises:
            UsageError: the row cannot give so many.

        Cost: one copy of the prefix the first time; nothing after that.
        """
        if self._alone is not None:
            wanted = self._alone.offset if prefix_tokens is None else prefix_tokens
            if not 0 < wanted <= self._alone.offset:
                raise UsageError(f"{wanted} tokens of a row of {self._alone.offset} cannot become a prefix.")
            held, tokens = self._table.rows[0].prefix, self._alone.offset
            if held is None or held.tokens != wanted:
                held = self._table.answer(("prefix", tokens, wanted), lambda: Prefix(wanted))
            self._split(held, {})
        prefix = self._table.rows[row].prefix
        if prefix is None:
            wanted = 0 if prefix_tokens is None else prefix_tokens
            moved = self._table.lift(row, wanted)
            prefix = moved.table.rows[row].prefix
            assert prefix is not None
            self._prefixes[prefix] = self._lifted(moved)
            self._move(moved)
        elif prefix_tokens not in (None, prefix.tokens):
            raise UsageError(
                f"row {row} shares its first {prefix.tokens} tokens already; a sequence that begins with"
                f" {prefix_tokens} of them can share those {prefix.tokens} or none."
            )
        table = self._table.answer(("branch", prefix), lambda: Table((Row(prefix, 0, ()),), 0))
        pair = self._prefixes[prefix]
        return SharedPrefixCache(table, {prefix: pair}, None, hooked=self._hooked, grouped_mask=self._grouped_mask)

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these rows, in this order; prefixes and blocks that nobody uses go.

        Raises:
            UsageError: no row, or one that is not there.

        Cost: one copy of the blocks that stay.
        """
        if self._alone is not None:
            self._table.filter(tuple(int(row) for row in keep))
            return
        self._move(self._table.filter(tuple(int(row) for row in keep)))

    def extend(self, other: SharedPrefixCache) -> None:
        """Take in the rows of another batch of the same layer, which is used up. Equal prefixes stay one.

        Cost: one copy of both pools; of the tokens of a sequence that was alone.
        """
        for cache, known in ((self, other._prefixes), (other, self._prefixes)):
            if cache._alone is not None:
                cache._split(cache._table.rows[0].prefix, known)
        pools = [(c._pool, c._table.used) for c in (self, other) if c._pool is not None and c._table.used]
        self._table = self._table.extend(other._table)
        self._prefixes = {**other._prefixes, **self._prefixes}
        if pools:
            self._pool = tuple(mx.concatenate([pool[side][:used] for pool, used in pools]) for side in range(2))
        self._step = None

    @classmethod
    def merge(cls, caches: Sequence[SharedPrefixCache]) -> SharedPrefixCache:
        """One batch of several, which are used up."""
        first, *others = caches
        for other in others:
            first.extend(other)
        return first

    def settle(self) -> None:
        """Give the only row of a batch plain arrays of its own, prefix included, for MLX's fused attention.

        A sequence that takes more than `LONE_STEPS` decode steps by itself is settled without being asked.

        Raises:
            UsageError: there is more than one row.

        Cost: one copy of the row.
        """
        if self._alone is not None:
            return
        if len(self._table.rows) > 1:
            raise UsageError(f"a batch of {len(self._table.rows)} rows cannot be alone; filter it first.")
        tokens = self._table.rows[0].tokens
        made = KVCache()
        if tokens:
            spare = (tokens // KVCache.step + 1) * KVCache.step - tokens
            made.keys, made.values = (
                mx.pad(side, [(0, 0), (0, 0), (0, spare), (0, 0)]) for side in self.rows(0, 0, tokens)
            )
            made.offset = tokens
            mx.eval(made.keys, made.values)
        self._alone, self._pool, self._prefixes, self._step = made, None, {}, None

    def prepare(self, *, lengths: Sequence[int] | None = None, right_padding: Sequence[int] | None = None) -> None:
        """Announce a right-padded prompt: of row b only the next lengths[b] tokens are real, the rest is not kept.

        Raises:
            UsageError: padding without lengths.
        """
        if right_padding is None or not max(right_padding):
            return
        if lengths is None:
            raise UsageError("right padding needs the lengths of the rows that are padded.")
        self._left = list(lengths)

    def finalize(self) -> None:
        """The right-padded prompt has gone through."""
        self._left = None

    def check_integrity(self) -> None:
        """Raise AssertionError unless the arrays are those that the table says."""
        if self._alone is not None:
            assert self._pool is None
            assert not self._prefixes
            assert len(self._table.rows) == 1
            return
        self._table.check_integrity()
        assert set(self._prefixes) == set(self._table.prefixes)
        for prefix, pair in self._prefixes.items():
            assert all(side.shape[2] == prefix.tokens for side in pair)
        if self._pool is not None:
            assert all(side.shape[0] == self._table.capacity for side in self._pool)
            assert all(side.shape[2] == BLOCK_TOKENS for side in self._pool)
        else:
            assert self._table.used == 0

    # inside

    def _counts(self, length: int) -> tuple[int, ...]:
        """How many of `length` tokens are no padding, row by row."""
        if self._left is None:
            return (length,) * len(self._table.rows)
        return tuple(min(length, left) for left in self._left)

    def _grown(self, table: Table, keys: mx.array, values: mx.array) -> Pair:
        """The pool with as many blocks as the table wants."""
        held = 0 if self._pool is None else self._pool[0].shape[0]
        if self._pool is not None and held == table.capacity:
            return self._pool
        sides = []
        for index, new in enumerate((keys, values)):
            room = mx.zeros((table.capacity - held, new.shape[1], BLOCK_TOKENS, new.shape[3]), new.dtype)
            sides.append(room if self._pool is None else mx.concatenate([self._pool[index], room]))
        return sides[0], sides[1]

    def _move(self, moved: Moved) -> None:
        """Take over a table whose blocks have new places."""
        self._table, self._step = moved.table, None
        if not moved.kept:
            self._pool = None
        elif self._pool is not None:
            index = moved.table.answer("kept", lambda: mx.array(moved.kept))
            self._pool = (self._pool[0][index], self._pool[1][index])
        wanted = set(moved.table.prefixes)
        self._prefixes = {prefix: pair for prefix, pair in self._prefixes.items() if prefix in wanted}

    def _lifted(self, moved: Moved) -> Pair:
        """The blocks that become a prefix, as one array."""
        assert self._pool is not None
        index = mx.array(moved.lifted)
        keys, values = (mx.contiguous(_line(side[index])) for side in self._pool)
        mx.eval(keys, values)
        return keys, values

    def _split(self, prefix: Prefix | None, known: dict[Prefix, Pair]) -> None:
        """Cut the plain arrays of the only row into a prefix and blocks, a layer at a time."""
        assert self._alone is not None
        tokens, own = self._alone.offset, self._alone.offset - (prefix.tokens if prefix is not None else 0)
        blocks = blocks_for(own)
        self._table = self._table.answer(
            ("split", prefix, tokens), lambda: Table((Row(prefix, own, tuple(range(blocks))),), blocks)
        )
        sides = [] if self._alone.keys is None else [self._alone.keys, self._alone.values]
        if prefix is not None:
            pair = known.get(prefix) or tuple(mx.contiguous(side[:, :, : prefix.tokens]) for side in sides)
            self._prefixes = {prefix: (pair[0], pair[1])}
        if own:
            spare = blocks * BLOCK_TOKENS - own
            behind = [
                mx.pad(side[:, :, tokens - own : tokens], [(0, 0), (0, 0), (0, spare), (0, 0)])[0] for side in sides
            ]
            self._pool = tuple(
                mx.contiguous(side.reshape(side.shape[0], blocks, BLOCK_TOKENS, -1).swapaxes(0, 1)) for side in behind
            )
        del sides
        self._alone, self._lone = None, 0
        mx.eval(self.state)

    def _own(self, row: Row, start: int, stop: int) -> Pair:
        """Tokens [start, stop) of what a row has of its own."""
        if self._pool is None:
            raise UsageError("this batch holds no tokens yet.")
        first = start // BLOCK_TOKENS
        index = mx.array(row.blocks[first : blocks_for(stop)] or (0,))
        shift = first * BLOCK_TOKENS
        keys, values = (_line(side[index])[:, :, start - shift : stop - shift] for side in self._pool)
        return keys, values

    def _attend_long(self, queries: mx.array, counts: Sequence[int], scale: float) -> mx.array:
        outputs = []
        for row, count in enumerate(counts):
            keys, values = self.rows(row, 0, self.tokens(row))
            padding = queries.shape[2] - count
            real = mx.zeros((1, queries.shape[1], 0, values.shape[3]), queries.dtype)
            if count:
                chosen = queries[row : row + 1, :, :count]
                real = mx.fast.scaled_dot_product_attention(chosen, keys, values, scale=scale, mask="causal")
            outputs.append(mx.pad(real, [(0, 0), (0, 0), (0, padding), (0, 0)]))
        return _joined(outputs, axis=0)

    def _together(self) -> Pair:
        """Every row's keys and values behind one another, padded to the longest."""
        most = self.size()
        sides: list[list[mx.array]] = [[], []]
        for row in range(len(self._table.rows)):
            for side, array in zip(sides, self.rows(row, 0, self.tokens(row)), strict=True):
                side.append(mx.pad(array, [(0, 0), (0, 0), (0, most - array.shape[2]), (0, 0)]))
        return _joined(sides[0], axis=0), _joined(sides[1], axis=0)


Batch = list[Any]
"""One cache a layer: a `SharedPrefixCache`, or mlx-lm's own batch cache where the layer keeps a window or a state."""


def begin(prompt_cache: Sequence[Any], *, hooked: bool = False, grouped_mask: bool = False) -> Batch:
    """A batch of one sequence, from mlx-lm's caches of it, which are used up.

    Args:
        prompt_cache: mlx-lm's caches. A layer with a window or a state goes on in mlx-lm's own batch cache and shares
            nothing.
        hooked: whether a `Dispatch` carries the attention; `Dispatch.begin` says so itself.
        grouped_mask: whether the model's scores are [B, Hkv, Hq / Hkv, L, S] and its masks want that axis too.

    Raises:
        UsageError: no layer keeps a `KVCache`, or one keeps what mlx-lm cannot batch; names its class.

    Cost: nothing is copied but windows and states.
    """
    others = sorted({type(cache).__name__ for cache in prompt_cache if not isinstance(cache, (KVCache, *_UNSHARED))})
    if others or not any(isinstance(cache, KVCache) for cache in prompt_cache):
        raise UsageError(
            f"a prefix cannot be shared by a model whose layers keep {', '.join(others) or 'no KVCache'}. Run its"
            " sequences one by one, or with mlx-lm's own batch caches."
        )
    table = Table((Row(None, 0, ()),), 0)
    return [
        SharedPrefixCache(table, {}, cache, hooked=hooked, grouped_mask=grouped_mask)
        if isinstance(cache, KVCache)
        else type(cache).merge([cache])
        for cache in prompt_cache
    ]


def cache_of(keys: mx.array | Sequence[mx.array], values: mx.array | Sequence[mx.array]) -> KVCache:
    """One layer's `KVCache` from keys [1, Hkv, P, D] and values [1, Hkv, P, Dv], or from lists of blocks of them."""
    made = KVCache()
    made.keys, made.values = (
        side if isinstance(side, mx.array) else mx.concatenate(list(side), axis=2) for side in (keys, values)
    )
    made.offset = made.keys.shape[2]
    return made


def branch(batch: Batch, row: int, prefix_tokens: int | None = None) -> Batch:
    """`SharedPrefixCache.branch` of every layer; windows and states are copied.

    Raises:
        UsageError: as there; or the model has windows or states, which are those of the row's last token only, and the
            row is not a sequence by itself that ends where the prefix does.
    """
    shared = next(cache for cache in batch if isinstance(cache, SharedPrefixCache))
    if any(not isinstance(cache, SharedPrefixCache) for cache in batch):
        held = shared.tokens(row)
        if shared.count > 1 or prefix_tokens not in (None, held):
            raise UsageError(
                f"this model has layers with a window or a state, which cannot go back to token {prefix_tokens} of"
                f" {held}; keep a sequence that ends where the prefix does, and branch from that."
            )
    return [
        cache.branch(row, prefix_tokens) if isinstance(cache, SharedPrefixCache) else copy.deepcopy(cache)
        for cache in batch
    ]


def extend(batch: Batch, other: Batch) -> None:
    """`SharedPrefixCache.extend` of every layer."""
    for cache, more in zip(batch, other, strict=True):
        cache.extend(more)


def _step(table: Table, counts: tuple[int, ...], length: int) -> _Step:
    """Made by the first layer that asks."""
    return table.answer(("arrays", counts, length), lambda: _make_step(table, counts, length))


def _make_step(table: Table, counts: tuple[int, ...], length: int) -> _Step:
    placed = table.step(counts)
    after = placed.table
    whole = len(placed.sources) == length * len(counts)
    tables, own = [row.blocks for row in after.rows], [row.own for row in after.rows]
    groups, order = _groups(after)
    return _Step(
        placed,
        counts,
        None if whole else mx.array([row * length + place for row, place in placed.sources]),
        mx.array([block for block, _ in placed.targets]),
        mx.array([place for _, place in placed.targets]),
        plan_blocks(tables, own) if length == 1 and min(counts) == 1 else None,
        groups,
        order,
    )


def _groups(table: Table) -> tuple[tuple[_Members, ...], mx.array | None]:
    prefixes = table.prefixes
    if not prefixes:
        return (), None
    members = [[i for i, row in enumerate(table.rows) if row.prefix is prefix] for prefix in prefixes]
    if members == [list(range(len(table.rows)))]:
        return (_Members(prefixes[0], None),), None
    place = {row: at for at, row in enumerate(row for rows in members for row in rows)}
    order = [place.get(row, len(place)) for row in range(len(table.rows))]
    groups = tuple(_Members(prefix, mx.array(rows)) for prefix, rows in zip(prefixes, members, strict=True))
    return groups, mx.array(order)


def _written(pool: mx.array, new: mx.array, step: _Step) -> mx.array:
    """The pool with the step's tokens [B, H, L, D] in their places; in place when nobody else holds it."""
    tokens = new.swapaxes(1, 2).reshape(-1, new.shape[1], new.shape[3])
    if step.sources is not None:
        tokens = tokens[step.sources]
    if tokens.shape[0]:
        pool[step.blocks, :, step.places] = tokens
    return pool


def _line(blocks: mx.array) -> mx.array:
    """Blocks [n, H, 64, D] one behind another: [1, H, 64 n, D]."""
    count, heads, tokens, dim = blocks.shape
    return blocks.swapaxes(0, 1).reshape(1, heads, count * tokens, dim)


def _joined(arrays: Sequence[mx.array], axis: int = 2) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays), axis=axis)
