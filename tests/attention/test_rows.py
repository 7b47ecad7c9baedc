"""Which tokens lie where, under random joins, leaves and steps; a plain list of tokens is the oracle."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.attention.rows import Prefix, Row, Table
from mlxkv.core.errors import UsageError


def one(prefix=None):
    return Table((Row(prefix, 0, ()),), 0)


class Pool:
    """Applies what a table says to lists, and keeps each row's tokens beside it."""

    def __init__(self):
        self.table, self.slots, self.rows, self.given = one(), {}, [[]], 0

    def step(self, counts):
        placed = self.table.step(tuple(counts))
        written = dict(zip(placed.sources, placed.targets, strict=True))
        for row, count in enumerate(counts):
            for place in range(count):
                self.given += 1
                self.slots[written[row, place]] = self.given
                self.rows[row].append(self.given)
        self.table = placed.table

    def filter(self, keep):
        moved = self.table.filter(tuple(keep))
        self.slots = {
            (new, place): self.slots[old, place]
            for new, old in enumerate(moved.kept)
            for place in range(64)
            if (old, place) in self.slots
        }
        self.table, self.rows = moved.table, [self.rows[row] for row in keep]

    def extend(self):
        other = one().step((70,))
        used = self.table.used
        tokens = list(range(self.given + 1, self.given + 71))
        self.given += 70
        for token, (block, place) in zip(tokens, other.targets, strict=True):
            self.slots[used + block, place] = token
        self.table, self.rows = self.table.extend(other.table), [*self.rows, tokens]

    def check(self):
        self.table.check_integrity()
        for row, tokens in zip(self.table.rows, self.rows, strict=True):
            assert row.own == len(tokens)
            assert [self.slots[row.blocks[i // 64], i % 64] for i in range(row.own)] == tokens


@given(st.data())
@settings(max_examples=50)
def test_every_row_keeps_its_tokens(data):
    pool = Pool()
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["step", "step", "extend", "filter"]))
        count = len(pool.rows)
        if what == "step":
            pool.step(data.draw(st.lists(st.integers(0, 130), min_size=count, max_size=count)))
        elif what == "extend":
            pool.extend()
        else:
            pool.filter(data.draw(st.permutations(range(count)))[: data.draw(st.integers(1, count))])
        pool.check()


def test_the_same_question_has_the_same_answer():
    table = one()
    assert table.step((3,)) is table.step((3,))
    assert table.step((3,)) is not table.step((4,))
    other = one()
    assert table.extend(other) is table.extend(other)


def test_copies_of_a_batch_share_its_table_and_prefixes():
    prefix = Prefix(5)
    table = one(prefix)
    assert copy.deepcopy([table, prefix]) == [table, prefix]


def test_a_prefix_is_lifted_out_of_full_blocks():
    table = one().step((150,)).table.extend(one().step((10,)).table)
    moved = table.lift(0, 128)
    first, second = moved.table.rows
    assert (first.prefix_tokens, first.own, first.tokens, second.own) == (128, 22, 150, 10)
    assert (moved.lifted, moved.kept) == ((0, 1), (2, 3))
    moved.table.check_integrity()


def test_what_cannot_be_is_said():
    table = one().step((100,)).table
    with pytest.raises(UsageError, match="full blocks of 64"):
        table.lift(0, 65)
    with pytest.raises(UsageError, match="full blocks of 64"):
        table.lift(0, 128)
    with pytest.raises(UsageError, match="prefix of 64 tokens already"):
        table.lift(0, 64).table.lift(0, 64)
    for keep in ((), (1,), (-1,)):
        with pytest.raises(UsageError, match="drop the batch"):
            table.filter(keep)


def test_the_reserve_is_a_sixteenth():
    grown = one().step((64 * 32,)).table
    assert grown.capacity == 34
    assert one().step((64,)).table.capacity == 1
