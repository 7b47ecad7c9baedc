"""The index: sums, children and order of use are right after every write, whichever connection or process writes."""

import os
import random
import sqlite3
import stat
import subprocess
import sys
import threading

import pytest
from blocks import OTHER_ROOT, ROOT, blocks_of, random_blocks

from mlxkv.cache.codec import BlockIdentity
from mlxkv.cache.index import FILE_NAME, Index

A, B, C = random_blocks(3, 0)
OTHER = random_blocks(1, 1)[0]


@pytest.fixture
def index(tmp_path):
    """An empty index, checked after the test."""
    index = Index(tmp_path)
    yield index
    index.check_integrity()
    index.close()


def insert(index: Index, *blocks: BlockIdentity, nbytes: int = 100, writer: int | None = None) -> None:
    with index.transaction():
        for block in blocks:
            index.insert(block, nbytes, writer=writer)


def delete(index: Index, *blocks: BlockIdentity) -> None:
    with index.transaction():
        for block in blocks:
            index.delete(block.name)


def victims(index: Index) -> list[bytes]:
    """Every name in the order in which it would be evicted; rolled back."""
    gone = []
    index._writing.execute("BEGIN IMMEDIATE")
    while (row := next(index.victims(), None)) is not None:
        index.delete(row.name)
        gone.append(row.name)
    index._writing.execute("ROLLBACK")
    return gone


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_says_what_was_inserted(index):
    insert(index, A, B, nbytes=4096)
    row = index.find([B.name])[B.name]
    assert row.identity == B
    assert (row.nbytes, row.hits) == (4096, 0)
    assert row.created == row.used > 0


def test_find_gives_those_that_are_held_and_walk_ends_at_the_first_that_is_not(index):
    long = random_blocks(200, 5)
    insert(index, *long[:150])
    assert index.find([]) == {}
    assert index.find([long[3].name, bytes(32), long[160].name]).keys() == {long[3].name}
    names = [block.name for block in long]
    assert [row.name for row in index.walk(names)] == names[:150]
    assert [row.name for row in index.walk(names[:64])] == names[:64]
    assert list(index.walk([names[160], names[3]])) == []
    assert list(index.walk([])) == []


def test_rows_come_by_root_and_place(index):
    other = blocks_of(range(128), OTHER_ROOT)
    insert(index, A, other[0], B, other[1], C)
    assert [row.name for row in index.rows(ROOT)] == [A.name, B.name, C.name]
    assert [row.name for row in index.rows()] == [
        row.name for root in sorted([ROOT, OTHER_ROOT]) for row in index.rows(root)
    ]
    assert index.rows(bytes(32)) == []


def test_a_block_is_found_by_the_first_digits_of_its_name(index):
    insert(index, A, B)
    assert [row.name for row in index.by_prefix(A.name.hex()[:8])] == [A.name]
    assert [row.name for row in index.by_prefix(A.name.hex())] == [A.name]
    assert index.by_prefix("0" * 64) == []
    assert len(index.by_prefix("")) == 2


def test_the_same_start_under_another_root_is_found_and_only_there(index):
    mine, theirs = blocks_of(range(128)), blocks_of(range(128), OTHER_ROOT)
    insert(index, *mine)
    assert index.same_start(mine[0].tokens, ROOT) is None
    insert(index, theirs[0])
    assert index.same_start(mine[0].tokens, ROOT) == OTHER_ROOT
    assert index.same_start(mine[1].tokens, bytes(32)) is None  # a later block is no start
    assert index.same_start(A.tokens, ROOT) is None


def test_descendants_come_deepest_first(index):
    left, right = blocks_of([1] * 64 + [2] * 128), blocks_of([1] * 64 + [3] * 64)
    insert(index, *left, right[1], OTHER)
    with index.transaction():
        names = [row.name for row in index.descendants(left[0].name)]
        assert set(names[1:3]) == {left[1].name, right[1].name}
        assert (names[0], names[3]) == (left[2].name, left[0].name)
        assert [row.name for row in index.descendants(left[2].name)] == [left[2].name]
        assert index.descendants(bytes(32)) == []


# --- sums and children -----------------------------------------------------------------------------------------------


def test_triggers_keep_sums_and_children_through_any_sequence_of_writes(index):
    source = random.Random(1)
    family = [*random_blocks(4, 2), *random_blocks(3, 3), *blocks_of([1] * 128), blocks_of([1] * 64 + [2] * 64)[1]]
    held: dict[bytes, tuple[BlockIdentity, int]] = {}
    for _ in range(300):
        block = source.choice(family)
        children = [b for b, _ in held.values() if b.parent == block.name]
        if block.name not in held and (block.index == 0 or block.parent in held):
            nbytes = source.randrange(10_000)
            insert(index, block, nbytes=nbytes, writer=os.getpid())
            held[block.name] = block, nbytes
        elif block.name in held and source.random() < 0.5:
            nbytes = source.randrange(10_000)
            with index.transaction():
                index.publish(block.name, nbytes, "2026-01-01", 1)
            held[block.name] = block, nbytes
        elif block.name in held and not children:
            delete(index, block)
            del held[block.name]
        index.check_integrity()
        assert index.totals() == (len(held), sum(nbytes for _, nbytes in held.values()))
        counted = dict(index._reading.execute("SELECT name, children FROM blocks"))
        assert counted == {name: sum(b.parent == name for b, _ in held.values()) for name in held}


def test_a_transaction_that_fails_leaves_nothing(index):
    insert(index, A)

    def fail() -> None:
        with index.transaction():
            index.insert(B, 100, writer=None)
            index.delete(A.name)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert index.totals() == (1, 100)
    assert index.find([A.name, B.name]).keys() == {A.name}
    insert(index, B)


def test_the_bytes_of_a_transaction_are_seen_inside_it_at_once(index):
    with index.transaction():
        index.insert(A, 100, writer=None)
        assert index.used_bytes() == 100
        assert index.totals() == (0, 0)
    assert index.totals() == (1, 100)


def test_a_block_is_held_once(index):
    insert(index, A)
    with pytest.raises(sqlite3.IntegrityError):
        insert(index, A)
    assert index.totals() == (1, 100)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE totals SET bytes = bytes + 1",
        "UPDATE totals SET blocks = 0",
        "UPDATE blocks SET children = 5 WHERE place = 1",
        "UPDATE blocks SET parent = x'00' WHERE place = 2",
        "UPDATE blocks SET place = 5 WHERE place = 2",
    ],
)
def test_check_integrity_finds_what_is_wrong(tmp_path, damage):
    index = Index(tmp_path)
    insert(index, A, B, C)
    index.check_integrity()
    index._writing.execute(damage)
    with pytest.raises(AssertionError):
        index.check_integrity()
    index.close()


# --- order of use ----------------------------------------------------------------------------------------------------


def test_leaves_go_first_and_the_least_recently_used_of_them(index):
    insert(index, A)
    insert(index, B)
    insert(index, OTHER)
    assert victims(index) == [B.name, A.name, OTHER.name]


def test_a_hit_is_counted_for_each_and_makes_the_deepest_and_its_ancestors_new(index):
    for block in (A, B, C, OTHER):
        insert(index, block)
    index.hit([A.name, B.name, C.name], C.name)
    index.hit([A.name], A.name)
    assert [index.find([b.name])[b.name].hits for b in (A, B, C, OTHER)] == [2, 1, 1, 0]
    assert victims(index) == [OTHER.name, C.name, B.name, A.name]


def test_a_hit_of_a_block_that_went_meanwhile_does_nothing(index):
    insert(index, A)
    index.hit([A.name, B.name], B.name)
    assert index.find([A.name])[A.name].hits == 1


def test_the_order_of_use_survives_a_restart(tmp_path):
    index = Index(tmp_path)
    singles = [random_blocks(1, seed)[0] for seed in range(5)]
    for block in singles:
        insert(index, block)
    index.hit([singles[0].name], singles[0].name)
    index.close()
    again = Index(tmp_path)
    assert victims(again) == [block.name for block in [*singles[1:], singles[0]]]
    assert again.totals() == (5, 500)
    again.check_integrity()
    again.close()


# --- blocks that are being written -----------------------------------------------------------------------------------


def test_a_block_that_is_being_written_is_counted_and_not_found(index):
    insert(index, A)
    insert(index, B, writer=4711)
    assert index.totals() == (2, 200)
    assert index.find([A.name, B.name]).keys() == {A.name}
    assert index.children(A.name) == []
    assert index.rows() == list(index.find([A.name]).values())
    assert index.by_prefix(B.name.hex()) == []
    assert [row.name for row in index.walk([A.name, B.name])] == [A.name]
    assert index.same_start(A.tokens, OTHER_ROOT) == ROOT
    assert [(row.name, writer) for row, writer in index.unfinished()] == [(B.name, 4711)]
    assert (index.is_held(B.name, writing=True), index.is_held(B.name, writing=False)) == (True, False)
    assert (index.is_held(A.name, writing=True), index.is_held(A.name, writing=False)) == (True, True)
    assert (index.is_held(C.name, writing=True), index.is_held(C.name, writing=False)) == (False, False)


def test_neither_it_nor_what_it_continues_may_be_evicted(index):
    insert(index, A)
    insert(index, B, writer=4711)
    assert victims(index) == []
    with index.transaction():
        index.publish(B.name, 250, "2026-01-01", 300)
    assert index.totals() == (2, 350)
    assert index.unfinished() == []
    assert victims(index) == [B.name, A.name]


def test_a_first_block_that_is_being_written_is_no_start_for_others(index):
    insert(index, A, writer=4711)
    assert index.same_start(A.tokens, OTHER_ROOT) is None


def test_bytes_written_are_added_up_by_day(index):
    insert(index, A, B, C, writer=1)
    with index.transaction():
        index.publish(A.name, 100, "2026-01-01", 110)
        index.publish(B.name, 100, "2026-01-01", 120)
        index.publish(C.name, 100, "2026-01-02", 130)
    days = ("2026-01-01", "2026-01-02", "2026-01-03")
    assert [index.written_bytes(day) for day in days] == [230, 130, 0]
    delete(index, C)
    assert index.written_bytes("2026-01-02") == 130  # deleting does not unwrite


# --- several connections and processes -------------------------------------------------------------------------------


def test_what_one_connection_wrote_another_sees(index, tmp_path):
    other = Index(tmp_path)
    insert(index, A)
    insert(other, B)
    assert index.totals() == other.totals() == (2, 200)
    assert [row.name for row in index.walk([A.name, B.name])] == [A.name, B.name]
    delete(other, B)
    assert index.find([B.name]) == {}
    assert victims(index) == [A.name]
    other.close()


def test_reading_threads_and_a_writing_one_do_not_disturb_each_other(index):
    chain = random_blocks(60, 4)
    names = [block.name for block in chain]
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                found = [row.name for row in index.walk(names)]
                assert found == names[: len(found)]
                blocks, nbytes = index.totals()
                assert nbytes == 100 * blocks
        except (AssertionError, sqlite3.Error) as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for block in chain:
        insert(index, block)
        index.hit([block.name], block.name)
    done.set()
    for reader in readers:
        reader.join()
    assert failures == []
    assert len(list(index.walk(names))) == 60


WRITER = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from blocks import random_blocks
from mlxkv.cache.index import Index

index = Index(Path(sys.argv[1]))
source = random.Random(int(sys.argv[3]))
chains = [random_blocks(4, seed) for seed in range(3)]
print("ready", flush=True)
sys.stdin.readline()
for _ in range(120):
    chain = source.choice(chains)
    with index.transaction():
        depth = next((i for i, b in enumerate(chain) if not index.is_held(b.name, writing=True)), len(chain))
        if depth < len(chain) and source.random() < 0.6:
            index.insert(chain[depth], source.randrange(1000), writer=None)
        elif depth:
            index.delete(chain[depth - 1].name)
index.close()
"""


def test_processes_that_write_at_once_keep_sums_and_children(index, tmp_path):
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), tests, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    index.check_integrity()
    assert index.totals()[0] == len(index.rows()) > 0


# --- the file --------------------------------------------------------------------------------------------------------


def test_only_the_owner_may_read_the_file(index, tmp_path):
    insert(index, A)
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file.name


def test_an_index_is_sound_until_its_file_is_damaged(tmp_path):
    index = Index(tmp_path)
    insert(index, *random_blocks(300, 6))
    assert index.is_sound()
    index.close()
    path = tmp_path / FILE_NAME
    pages = path.stat().st_size // 4096
    assert pages > 10
    with open(path, "r+b") as file:
        file.seek(4096 * (pages // 2))
        file.write(os.urandom(4096))
    damaged = Index(tmp_path)
    assert not damaged.is_sound()
    damaged.close()


def is_usable(tmp_path) -> bool:
    """Whether the file opens and SQLite finds it whole."""
    try:
        index = Index(tmp_path)
    except sqlite3.DatabaseError:
        return False
    try:
        return index.is_sound()
    finally:
        index.close()


@pytest.mark.parametrize("size", [0, 1])
def test_a_file_cut_to_nothing_is_an_empty_index(tmp_path, size):
    """What the cold tier does about files that no row knows is tested with it."""
    index = Index(tmp_path)
    insert(index, A)
    index.close()
    os.truncate(tmp_path / FILE_NAME, size)
    again = Index(tmp_path)
    assert again.totals() == (0, 0)
    insert(again, A)
    again.check_integrity()
    again.close()


@pytest.mark.parametrize("size", [100, 4096, 5000, 4096 * 5])
def test_a_cut_file_is_noticed_when_it_is_opened(tmp_path, size):
    index = Index(tmp_path)
    insert(index, *random_blocks(300, 6))
    index.close()
    os.truncate(tmp_path / FILE_NAME, size)
    assert not is_usable(tmp_path)


@pytest.mark.parametrize("content", [b"x" * 8192, b"SQLite format 3\0" + b"\xff" * 8176], ids=["other", "half right"])
def test_a_file_that_is_no_index_is_noticed_when_it_is_opened(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    assert not is_usable(tmp_path)


def test_somebody_elses_database_is_noticed_when_it_is_opened(tmp_path):
    with sqlite3.connect(tmp_path / FILE_NAME) as other:
        other.execute("CREATE TABLE blocks (title TEXT)")
    other.close()
    assert not is_usable(tmp_path)


@pytest.mark.parametrize("fault", ["no database", "another schema"])
def test_a_failed_opening_leaves_no_descriptor_open(tmp_path, fault):
    if fault == "no database":
        (tmp_path / FILE_NAME).write_bytes(b"x" * 8192)
    else:
        with sqlite3.connect(tmp_path / FILE_NAME) as other:
            other.execute("CREATE TABLE blocks (title TEXT)")
        other.close()
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(sqlite3.DatabaseError) as raised:
        Index(tmp_path)
    assert len(os.listdir("/dev/fd")) == before, raised.value  # whose traceback would keep a connection alive


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_a_file_that_is_not_the_one_that_was_opened_is_noticed(tmp_path, change):
    index = Index(tmp_path)
    insert(index, A)
    assert index.is_the_file()
    (tmp_path / FILE_NAME).unlink()
    if change == "replaced":
        (tmp_path / FILE_NAME).write_bytes(b"")
    assert not index.is_the_file()
    index.close()


def test_a_directory_that_is_not_there_is_an_error_of_sqlite(tmp_path):
    with pytest.raises(sqlite3.OperationalError):
        Index(tmp_path / "missing")
