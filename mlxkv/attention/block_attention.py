"""Attention over a pool of blocks and a block table per sequence; no sequence gets one long array.

A block that several sequences use is read once: all their queries go through it as one matrix product. Blocks are
batched by how many sequences use them; each gives a part, and a sequence's parts are summed under its largest score.
Source: Kwon et al. 2023, arXiv:2309.06180 (block tables); Dao et al. 2022, arXiv:2205.14135 (the sum).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxkv.attention.partial import Partial, finish, nothing, power_of_2, scores_base2, weighted
from mlxkv.attention.shapes import default_scale
from mlxkv.core.errors import UsageError

BLOCK_TOKENS = 64


@dataclass(frozen=True)
class _Batch:
    """Blocks that `users` sequences each use.

    Attributes:
        blocks: a slice of the pool, or [n] indices.
        rows: [n * users] the sequences of each block; None when they are all of them in order.
        hidden: [n, 1, users, 1, L, 64] float32, -inf where a query does not see a key, else 0; None when every query
            sees all of every block.
    """

    users: int
    blocks: slice | mx.array
    rows: mx.array | None
    hidden: mx.array | None


@dataclass(frozen=True)
class BlockPlan:
    """Block tables as index arrays: made once a step, used by every layer.

    Attributes:
        sequences, queries: B and L of the queries it is for.
        pool_blocks: N that the pool must have at least.
        uses: [B, most blocks of a sequence] which of the parts are its own, the last one repeated; None without blocks.
        share: [B, parts] 1 where the part is the sequence's.
        owner: [parts] the sequence of each part.
        has_empty: whether some sequence has no blocks.
    """

    sequences: int
    queries: int
    pool_blocks: int
    has_empty: bool
    batches: tuple[_Batch, ...]
    uses: mx.array | None
    share: mx.array | None
    owner: mx.array | None


def plan_blocks(tables: Sequence[Sequence[int]], lengths: Sequence[int], *, queries: int = 1) -> BlockPlan:
    """Plan the attention of `queries` tokens a sequence, the last of its `lengths` tokens, each seeing those before it.

    Args:
        tables: of each sequence, its blocks in order; sequences may have blocks in common.
        lengths: its tokens, the new ones included: more than 64 (n - 1), at most 64 n in n blocks; 0 for none.
        queries: L.

    Raises:
        UsageError: a table that is too short or too long for its tokens or has a number below 0, or fewer tokens than
            queries.

    Cost: a few index arrays; linear in the blocks.
    """
    if len(tables) != len(lengths):
        raise UsageError(
            f"{len(tables)} block tables and {len(lengths)} lengths are given; give one of each a sequence."
        )
    users: dict[int, list[tuple[int, int]]] = {}
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        if len(table) != -(-length // BLOCK_TOKENS) or 0 < length < queries:
            raise UsageError(
                f"sequence {row} has {len(table)} blocks for {length} tokens and {queries} queries; a block holds"
                f" {BLOCK_TOKENS} tokens, and queries are among them."
            )
        if min(table, default=0) < 0:
            raise UsageError(f"sequence {row} names block {min(table)}; blocks are counted from 0.")
        for place, block in enumerate(table):
            users.setdefault(block, []).append((row, length - queries - place * BLOCK_TOKENS))
    by_count: dict[int, list[int]] = {}
    for block in sorted(users):
        by_count.setdefault(len(users[block]), []).append(block)
    batches, owner = [], []
    for count, blocks in sorted(by_count.items()):
        rows = [row for block in blocks for row, _ in users[block]]
        last = [seen for block in blocks for _, seen in users[block]]
        batches.append(_batch(count, blocks, rows, last, len(tables), queries))
        owner += rows
    if not owner:
        return BlockPlan(len(tables), queries, 0, True, (), None, None, None)
    parts: list[list[int]] = [[] for _ in tables]
    for part, row in enumerate(owner):
        parts[row].append(part)
    most = max(map(len, parts))
    empty = len(owner)  # the part of no keys
    uses = [own + [own[-1] if own else empty] * (most - len(own)) for own in parts]
    owners = mx.array(owner)
    share = (mx.arange(len(tables))[:, None] == owners).astype(mx.float32)
    pool_blocks = max(users) + 1
    return BlockPlan(len(tables), queries, pool_blocks, not all(parts), tuple(batches), mx.array(uses), share, owners)


def block_attention(
    queries: mx.array, keys: mx.array, values: mx.array, plan: BlockPlan, *, scale: float | None = None
) -> mx.array:
    """Attention of each sequence's queries over its own blocks: `finish` of `block_partial`, in the queries' dtype."""
    return finish(block_partial(queries, keys, values, plan, scale=scale), queries.dtype)


def block_partial(
    queries: mx.array, keys: mx.array, values: mx.array, plan: BlockPlan, *, scale: float | None = None
) -> Partial:
    """Attention of each sequence's queries over its own blocks, before it is divided.

    Args:
        queries: [B, Hq, L, D]
        keys: [N, Hkv, 64, D], the pool; a block's rows beyond its sequence's length are not seen.
        values: [N, Hkv, 64, Dv]
        plan: of the block tables, for this B and L.
        scale: 1 / sqrt(D) when None.

    Raises:
        UsageError: queries of other sizes than the plan's, a pool without a block of the plan, or head counts that do
            not fit.

    Cost: reads each block once; where the blocks used by equally many sequences are not neighbours in the pool, those
    are copied first. Holds float32 scores of the visible blocks, and in half precision up to 32 MiB as float32.
    """
    batch, heads, length, dim = queries.shape
    if (batch, length) != (plan.sequences, plan.queries):
        raise UsageError(
            f"the plan is for {plan.sequences} sequences of {plan.queries} queries, not {batch} of {length}."
        )
    if min(keys.shape[0], values.shape[0]) < plan.pool_blocks:
        raise UsageError(
            f"the plan names block {plan.pool_blocks - 1}, and the pool has {keys.shape[0]} of keys and"
            f" {values.shape[0]} of values."
        )
    kv_heads, value_dim = keys.shape[1], values.shape[3]
    if heads % kv_heads or dim != keys.shape[3]:
        raise UsageError(f"queries {queries.shape} do not fit blocks {keys.shape}.")
    if plan.uses is None or plan.share is None or plan.owner is None:
        return nothing(batch, heads, length, value_dim)
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads * length, dim)
    factor = default_scale(queries, scale)
    scores = [_scores(grouped, keys, each, length, factor) for each in plan.batches]
    peaks = _joined(
        [_by_part(mx.max(s, axis=-1, keepdims=True), b.users) for s, b in zip(scores, plan.batches, strict=True)]
    )
    peak = _row_peaks(peaks, plan)
    bases = peak[plan.owner]  # [parts, Hkv, G * L, 1]; a sequence with blocks sees a key
    totals, outs, done = [], [], 0
    for score, each in zip(scores, plan.batches, strict=True):
        count = score.shape[0] * each.users
        powers = power_of_2(score - _by_block(bases[done : done + count], each.users))
        totals.append(_by_part(mx.sum(powers, axis=-1, keepdims=True), each.users))
        outs.append(_by_part(weighted(powers, values[each.blocks]), each.users))
        done += count
    out, total = (plan.share @ a.reshape(a.shape[0], -1) for a in (_joined(outs), _joined(totals)))
    shape = (batch, heads, length, -1)
    return Partial(out.reshape(shape), (peak * math.log(2)).reshape(shape), total.reshape(shape))


def _batch(users: int, blocks: list[int], rows: list[int], last: list[int], sequences: int, queries: int) -> _Batch:
    """`last` says how far the first query of each block's sequences sees into it; below 0 is not at all."""
    neighbours = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
    hidden = None
    if min(last) < BLOCK_TOKENS - 1:
        ends = mx.array(last).reshape(len(blocks), 1, users, 1, 1, 1) + mx.arange(queries)[:, None]
        hidden = mx.where(mx.arange(BLOCK_TOKENS) <= ends, mx.array(0.0), mx.array(-mx.inf))
    return _Batch(
        users,
        slice(blocks[0], blocks[0] + len(blocks)) if neighbours else mx.array(blocks),
        None if rows == list(range(sequences)) else mx.array(rows),
        hidden,
    )


def _scores(grouped: mx.array, keys: mx.array, batch: _Batch, length: int, scale: float) -> mx.array:
    """Base-2 scores [n, Hkv, users * G * L, 64] of one batch of blocks, hidden ones at -inf."""
    _, kv_heads, folded, _ = grouped.shape
    chosen = grouped if batch.rows is None else grouped[batch.rows]
    scores = scores_base2(_by_block(chosen, batch.users), keys[batch.blocks], scale)
    if batch.hidden is None:
        return scores
    split = scores.reshape(-1, kv_heads, batch.users, folded // length, length, BLOCK_TOKENS)
    return (split + batch.hidden).reshape(scores.shape)


def _row_peaks(peaks: mx.array, plan: BlockPlan) -> mx.array:
    """The largest of each sequence's parts, [B, Hkv, G * L, 1]; -inf for a sequence without blocks."""
    if plan.has_empty:
        peaks = mx.concatenate([peaks, mx.full((1, *peaks.shape[1:]), -mx.inf)])
    return mx.max(peaks[plan.uses], axis=1)


def _by_block(parts: mx.array, users: int) -> mx.array:
    """[n * users, Hkv, R, x] -> [n, Hkv, users * R, x]: the queries of a block's sequences one below another."""
    if users == 1:
        return parts
    _, heads, rows, width = parts.shape
    return parts.reshape(-1, users, heads, rows, width).swapaxes(1, 2).reshape(-1, heads, users * rows, width)


def _by_part(blocks: mx.array, users: int) -> mx.array:
    """The reverse of `_by_block`."""
    if users == 1:
        return blocks
    _, heads, rows, width = blocks.shape
    return (
        blocks.reshape(-1, heads, users, rows // users, width).swapaxes(1, 2).reshape(-1, heads, rows // users, width)
    )


def _joined(arrays: list[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
