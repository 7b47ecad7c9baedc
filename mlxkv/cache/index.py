"""The index of the cold tier: SQLite in WAL mode, one row a block, shared by every process on the root.

It answers matches and chooses victims, so that no start-up and no match opens a block file. Counts of children, sums
of bytes and the order of use among ancestors are kept by triggers: they hold whichever process writes.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxkv.cache.codec import BlockIdentity
from mlxkv.cache.names import BlockName

FILE_NAME = "index.sqlite"
WAL_PAGES = 64
BUSY_S = 10.0
_BATCH = 64

_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    name BLOB PRIMARY KEY, parent BLOB NOT NULL, root BLOB NOT NULL, place INTEGER NOT NULL, tokens BLOB NOT NULL,
    bytes INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL, hits INTEGER NOT NULL DEFAULT 0,
    children INTEGER NOT NULL DEFAULT 0,
    writer INTEGER  -- process that is writing the file; NULL once it is whole and durable
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_parent ON blocks (parent);
CREATE INDEX IF NOT EXISTS leaves ON blocks (used) WHERE children = 0 AND writer IS NULL;
CREATE INDEX IF NOT EXISTS firsts ON blocks (tokens) WHERE place = 0;
CREATE TABLE IF NOT EXISTS totals (one INTEGER PRIMARY KEY CHECK (one = 1), blocks INTEGER, bytes INTEGER);
INSERT OR IGNORE INTO totals VALUES (1, 0, 0);
CREATE TABLE IF NOT EXISTS written (day TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON blocks BEGIN
    UPDATE totals SET blocks = blocks + 1, bytes = bytes + NEW.bytes;
    UPDATE blocks SET children = children + 1 WHERE name = NEW.parent;
END;
CREATE TRIGGER IF NOT EXISTS resized AFTER UPDATE OF bytes ON blocks BEGIN
    UPDATE totals SET bytes = bytes + NEW.bytes - OLD.bytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON blocks BEGIN
    UPDATE totals SET blocks = blocks - 1, bytes = bytes - OLD.bytes;
    UPDATE blocks SET children = children - 1, used = max(used, OLD.used) WHERE name = OLD.parent;
END;
PRAGMA user_version = 1;
"""
_ROW = "name, parent, root, place, tokens, bytes, created, used, hits"


@dataclass(frozen=True, slots=True)
class Row:
    """A block in the cold tier. `nbytes` are physical bytes of its file; times are seconds since 1970."""

    name: BlockName
    parent: BlockName
    root: BlockName
    index: int
    tokens: bytes
    nbytes: int
    created: float
    used: float
    hits: int

    @property
    def is_checkpoint(self) -> bool:
        return not self.tokens

    @property
    def identity(self) -> BlockIdentity:
        return BlockIdentity(self.root, self.name, self.parent, self.index, self.tokens)


_PASSING = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM,
}  # fmt: skip


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file itself is at fault, and not the disk, a lock or memory, which may be better the next time."""
    return error.sqlite_errorcode & 0xFF not in _PASSING


class Index:
    """Owner: reads from any thread; `transaction` and what needs one from the mover's thread only.

    Raises sqlite3.Error on a damaged or vanished file; the cold tier turns that into a rebuild.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self._lock = threading.Lock()
        with ExitStack() as opened:
            self._reading = opened.enter_context(closing(self._connect()))
            self._writing = opened.enter_context(closing(self._connect()))
            self._writing.executescript(_SCHEMA)
            self._inode = os.stat(self.path).st_ino
            self._version = 0
            opened.pop_all()  # all is well: `close` closes them

    def close(self) -> None:
        with self._lock:
            self._reading.close()
        self._writing.close()

    def is_the_file(self) -> bool:
        """Whether the open database is still the file at its path: a deleted one would swallow writes in silence."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def is_sound(self) -> bool:
        """Whether SQLite finds the file whole. Cost: reads all of it, about 0.5 ms per 1,000 blocks."""
        try:
            return bool(self._writing.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            return False

    # reads

    def find(self, names: Sequence[BlockName]) -> dict[BlockName, Row]:
        """The rows of those `names` that are held, whole and durable."""
        marks = ",".join("?" * len(names))
        rows = self._read(f"SELECT {_ROW} FROM blocks WHERE name IN ({marks}) AND writer IS NULL", names)
        return {row.name: row for row in rows}

    def walk(self, names: Sequence[BlockName]) -> Iterator[Row]:
        """The rows of a chain in order, up to the first that is not held. Cost: one query for 64 names."""
        for start in range(0, len(names), _BATCH):
            batch = names[start : start + _BATCH]
            held = self.find(batch)
            for name in batch:
                if name not in held:
                    return
                yield held[name]

    def children(self, parent: BlockName) -> list[Row]:
        return self._read(f"SELECT {_ROW} FROM blocks WHERE parent = ? AND writer IS NULL", (parent,))

    def same_start(self, tokens: bytes, root: BlockName) -> BlockName | None:
        """Another root that holds a first block of the same tokens."""
        rows = self._read(
            f"SELECT {_ROW} FROM blocks WHERE place = 0 AND tokens = ? AND root <> ? AND writer IS NULL LIMIT 1",
            (tokens, root),
        )
        return rows[0].root if rows else None

    def names(self) -> set[BlockName]:
        """Every block, those being written included."""
        with self._lock:
            return {name for (name,) in self._reading.execute("SELECT name FROM blocks")}

    def rows(self, root: BlockName | None = None) -> list[Row]:
        """Every held block, or those of one root, by root and place."""
        where = "WHERE writer IS NULL" + (" AND root = ?" if root else "")
        return self._read(f"SELECT {_ROW} FROM blocks {where} ORDER BY root, place, used", (root,) if root else ())

    def by_prefix(self, text: str) -> list[Row]:
        """Blocks whose name starts with these hex digits, at most two."""
        where = "hex(name) LIKE ? AND writer IS NULL"
        return self._read(f"SELECT {_ROW} FROM blocks WHERE {where} LIMIT 2", (text.upper() + "%",))

    def totals(self) -> tuple[int, int]:
        """Blocks, and physical bytes of their files, those being written included."""
        with self._lock:
            blocks, nbytes = self._reading.execute("SELECT blocks, bytes FROM totals").fetchone()
        return int(blocks), int(nbytes)

    def written_bytes(self, day: str) -> int:
        with self._lock:
            row = self._reading.execute("SELECT bytes FROM written WHERE day = ?", (day,)).fetchone()
        return int(row[0]) if row else 0

    # writes

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, and no other process writes meanwhile."""
        self._writing.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._writing.execute("COMMIT")
        except BaseException:
            if self._writing.in_transaction:  # a full disk may have ended it already
                self._writing.execute("ROLLBACK")
            raise

    def is_held(self, name: BlockName, *, writing: bool) -> bool:
        """Whether `name` is held; `writing` counts one whose file is being written."""
        row = self._writing.execute("SELECT writer FROM blocks WHERE name = ?", (name,)).fetchone()
        return row is not None and (writing or row[0] is None)

    def used_bytes(self) -> int:
        """The bytes of `totals`, as the current transaction sees them."""
        return int(self._writing.execute("SELECT bytes FROM totals").fetchone()[0])

    def others_wrote(self) -> bool:
        """Whether another process, or another tier of this one, changed the index since this was asked last."""
        version = int(self._writing.execute("PRAGMA data_version").fetchone()[0])
        changed, self._version = version != self._version, version
        return changed

    def victims(self) -> Iterator[Row]:
        """Leaves, least recently used first."""
        cursor = self._writing.execute(
            f"SELECT {_ROW} FROM blocks WHERE children = 0 AND writer IS NULL ORDER BY used LIMIT 1024"
        )
        for row in cursor.fetchall():
            yield Row(*row)

    def insert(self, block: BlockIdentity, nbytes: int, *, writer: int | None, used: float | None = None) -> None:
        now = time.time()
        self._writing.execute(
            "INSERT INTO blocks (name, parent, root, place, tokens, bytes, created, used, children, writer)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, (SELECT count(*) FROM blocks WHERE parent = ?), ?)",
            (block.name, block.parent, block.root, block.index, block.tokens, nbytes, used or now, used or now,
             block.name, writer),
        )  # fmt: skip

    def publish(self, name: BlockName, nbytes: int, day: str, written: int) -> None:
        """The file is whole and durable: from here on it can be matched."""
        self._writing.execute("UPDATE blocks SET writer = NULL, bytes = ? WHERE name = ?", (nbytes, name))
        self._writing.execute(
            "INSERT INTO written VALUES (?, ?) ON CONFLICT (day) DO UPDATE SET bytes = bytes + excluded.bytes",
            (day, written),
        )

    def delete(self, name: BlockName) -> None:
        self._writing.execute("DELETE FROM blocks WHERE name = ?", (name,))

    def descendants(self, name: BlockName) -> list[Row]:
        """`name` and everything that continues it, deepest first."""
        cursor = self._writing.execute(
            f"WITH RECURSIVE tree (n) AS (VALUES (?) UNION ALL SELECT b.name FROM blocks b JOIN tree ON b.parent = n)"
            f" SELECT {_ROW} FROM blocks WHERE name IN tree ORDER BY place DESC",
            (name,),
        )
        return [Row(*row) for row in cursor.fetchall()]

    def unfinished(self) -> list[tuple[Row, int]]:
        """Blocks that some process was writing, with its id."""
        cursor = self._writing.execute(f"SELECT {_ROW}, writer FROM blocks WHERE writer IS NOT NULL")
        return [(Row(*row[:-1]), int(row[-1])) for row in cursor.fetchall()]

    def hit(self, names: Iterable[BlockName], deepest: BlockName) -> None:
        """Count a hit for each of `names` and mark the deepest, and so its ancestors, as just used."""
        with self.transaction():
            self._writing.executemany("UPDATE blocks SET hits = hits + 1 WHERE name = ?", [(name,) for name in names])
            self._writing.execute("UPDATE blocks SET used = ? WHERE name = ?", (time.time(), deepest))

    def check_integrity(self) -> None:
        """Raise AssertionError when sums, counts of children or parents do not agree with the rows."""
        with self._lock, self._snapshot() as ask:
            counted = ask("SELECT count(*), coalesce(sum(bytes), 0) FROM blocks").fetchone()
            assert counted == ask("SELECT blocks, bytes FROM totals").fetchone(), "totals differ from the rows"
            wrong = ask(
                "SELECT count(*) FROM blocks b WHERE children <> (SELECT count(*) FROM blocks WHERE parent = b.name)"
            ).fetchone()[0]
            assert wrong == 0, f"{wrong} rows miscount their children"
            orphans = ask(
                "SELECT count(*) FROM blocks b WHERE place > 0 AND NOT EXISTS"
                " (SELECT 1 FROM blocks WHERE name = b.parent AND place = b.place - 1)"
            ).fetchone()[0]
            assert orphans == 0, f"{orphans} blocks have no parent"

    @contextmanager
    def _snapshot(self) -> Iterator[Callable[[str], sqlite3.Cursor]]:
        """Ask several questions of one and the same state, whoever writes meanwhile."""
        self._reading.execute("BEGIN")
        try:
            yield self._reading.execute
        finally:
            self._reading.execute("COMMIT")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            os.chmod(self.path, 0o600)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _read(self, sql: str, values: Sequence[object]) -> list[Row]:
        with self._lock:
            return [Row(*row) for row in self._reading.execute(sql, values)]
