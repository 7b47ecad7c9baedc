"""Which tokens of a batch lie where: sequences, the prefix each begins with, and its own blocks. No arrays.

A `Table` never changes. What happens to a batch gives another one, and gives it once: the layers of a model, which all
ask the same, share the answer and with it the index arrays that hang on it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mlxkv.attention.block_attention import BLOCK_TOKENS
from mlxkv.core.errors import UsageError

T = TypeVar("T")


class Prefix:
    """The first `tokens` tokens of some sequences, kept once. Two are the same only if they are one object."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __deepcopy__(self, _memo: dict[int, Any]) -> Prefix:
        return self


@dataclass(frozen=True)
class Row:
    """One sequence: a prefix, or none, and `own` tokens behind it in blocks of its own, named by their place."""

    prefix: Prefix | None
    own: int
    blocks: tuple[int, ...]

    @property
    def prefix_tokens(self) -> int:
        return 0 if self.prefix is None else self.prefix.tokens

    @property
    def tokens(self) -> int:
        return self.prefix_tokens + self.own


@dataclass(frozen=True)
class Placed:
    """Where the new tokens of a step go.

    Attributes:
        table: the batch after the step.
        sources: row and place in the step of each token that is kept; padding is left out.
        targets: block and place in the block of each.
    """

    table: Table
    sources: tuple[tuple[int, int], ...]
    targets: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Moved:
    """A table whose blocks have new places: `kept` are their old ones, in the new order.

    `lifted` are the old places of blocks that became a prefix.
    """

    table: Table
    kept: tuple[int, ...]
    lifted: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Table:
    """The sequences of a batch, in order.

    Attributes:
        rows: used blocks are 0 to `used` - 1, each of one row.
        capacity: blocks the pool has room for.
    """

    rows: tuple[Row, ...]
    capacity: int
    _answers: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def used(self) -> int:
        return sum(len(row.blocks) for row in self.rows)

    @property
    def prefixes(self) -> list[Prefix]:
        """Each prefix once, in the order of the first row that has it."""
        return list(dict.fromkeys(row.prefix for row in self.rows if row.prefix is not None))

    def answer(self, question: Hashable, work: Callable[[], T]) -> T:
        """`work()`, done once for each question."""
        if question not in self._answers:
            self._answers[question] = work()
        found: T = self._answers[question]
        return found

    def __deepcopy__(self, _memo: dict[int, Any]) -> Table:
        return self

    def step(self, counts: tuple[int, ...]) -> Placed:
        """Give each row so many tokens more. New blocks come with a sixteenth of the pool in reserve, at least none."""
        return self.answer(("step", counts), lambda: self._step(counts))

    def filter(self, keep: tuple[int, ...]) -> Moved:
        """Only these rows, in this order; the others' blocks go.

        Raises:
            UsageError: no row, or one that is not there.
        """
        if not keep or not all(0 <= row < len(self.rows) for row in keep):
            raise UsageError(f"rows {list(keep)} cannot be kept of {len(self.rows)}; drop the batch to keep none.")
        return self.answer(("filter", keep), lambda: _packed([self.rows[row] for row in keep]))

    def extend(self, other: Table) -> Table:
        """The rows of both, the other's blocks behind one's own."""
        return self.answer(("extend", other), lambda: self._extend(other))

    def lift(self, row: int, tokens: int) -> Moved:
        """Make the first `tokens` tokens of a row without a prefix one that other rows can have too.

        Raises:
            UsageError: the row has a prefix, or `tokens` are no full blocks of its own.
        """
        chosen = self.rows[row]
        if chosen.prefix is not None:
            raise UsageError(
                f"row {row} begins with a prefix of {chosen.prefix_tokens} tokens already; share that one."
            )
        if tokens % BLOCK_TOKENS or not 0 < tokens <= chosen.own:
            raise UsageError(
                f"{tokens} tokens of a row of {chosen.own} cannot become a prefix; they must be full blocks of"
                f" {BLOCK_TOKENS}."
            )
        return self.answer(("lift", row, tokens), lambda: self._lift(row, tokens))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every used block is of one row and every row has blocks for its own tokens."""
        blocks = [block for row in self.rows for block in row.blocks]
        assert sorted(blocks) == list(range(len(blocks))), f"blocks are {blocks}"
        assert len(blocks) <= self.capacity, f"{len(blocks)} blocks in a pool of {self.capacity}"
        for row in self.rows:
            assert len(row.blocks) == blocks_for(row.own), row

    def _step(self, counts: Sequence[int]) -> Placed:
        used, rows = self.used, []
        sources: list[tuple[int, int]] = []
        targets: list[tuple[int, int]] = []
        for index, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            own = row.own + count
            new = blocks_for(own) - len(row.blocks)
            blocks = (*row.blocks, *range(used, used + new))
            used += new
            rows.append(replace(row, own=own, blocks=blocks))
            for i in range(count):
                block, place = divmod(row.own + i, BLOCK_TOKENS)
                sources.append((index, i))
                targets.append((blocks[block], place))
        capacity = self.capacity if used <= self.capacity else used + used // 16
        return Placed(Table(tuple(rows), capacity), tuple(sources), tuple(targets))

    def _extend(self, other: Table) -> Table:
        moved = [replace(row, blocks=tuple(self.used + block for block in row.blocks)) for row in other.rows]
        return Table((*self.rows, *moved), self.used + other.used)

    def _lift(self, row: int, tokens: int) -> Moved:
        chosen, count = self.rows[row], tokens // BLOCK_TOKENS
        rest = Row(Prefix(tokens), chosen.own - tokens, chosen.blocks[count:])
        packed = _packed([rest if index == row else other for index, other in enumerate(self.rows)])
        return replace(packed, lifted=chosen.blocks[:count])


def blocks_for(tokens: int) -> int:
    """Blocks that so many tokens take."""
    return -(-tokens // BLOCK_TOKENS)


def _packed(rows: Sequence[Row]) -> Moved:
    """Rows with their blocks one behind another."""
    kept: list[int] = []
    packed = []
    for row in rows:
        packed.append(replace(row, blocks=tuple(range(len(kept), len(kept) + len(row.blocks)))))
        kept += row.blocks
    return Moved(Table(tuple(packed), len(kept)), tuple(kept))
