"""The cold tier: one file a block on the SSD, in a directory that several processes and models may share.

Visible means durable: a file gets its name after its bytes are on the disk, a row after the file. The budget counts
physical bytes of the whole root (blocks of every model, temporary files, quarantine, index, directories), and room is
made before a write. What cannot be read is a miss; what cannot be written stays hot; neither reaches a request.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from mlxkv.cache import codec
from mlxkv.cache.block_log import BlockEvent, BlockLog
from mlxkv.cache.codec import BlockIdentity, View
from mlxkv.cache.index import FILE_NAME, Index, Row, is_damage
from mlxkv.cache.layout import Layout
from mlxkv.cache.names import BlockName
from mlxkv.core.errors import CacheRootError, DamagedBlockError
from mlxkv.core.platform import physical_bytes, process_is_alive, sync_file, sync_file_fully
from mlxkv.core.units import MIB, format_bytes

QUARANTINE = "quarantine"
ROOT_FILE = "root.json"
QUARANTINED = ".damaged"
TEMPORARY = ".tmp"
PAGE = 4096
WAL_ROOM_BYTES = MIB // 2  # the write-ahead log is at most about WAL_PAGES pages; counted before it grows
REMEASURE_WRITES = 16
INDEX_ROOM_BYTES = REMEASURE_WRITES * 2048  # what the index may grow by until it is measured again
ANY_BYTES = 2**62
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0

logger = logging.getLogger("mlxkv")


@dataclass
class ColdCounters:
    """What the tier did since it was opened. `refused` counts writes by reason."""

    offloaded_blocks: int = 0
    offloaded_bytes: int = 0
    evicted_blocks: int = 0
    damaged_blocks: int = 0
    failed_reads: int = 0
    failed_writes: int = 0


class ColdTier:
    """Owner: `find`, `children` and `read` from any thread; everything that writes from the mover's thread only.

    Pins are this process's own: another process may still evict a pinned block, and the read is then a miss.
    """

    name = "cold"
    _in_progress: ClassVar[set[Path]] = set()
    """What any tier of this process is writing: a tier opened meanwhile must not take it for a crash's leftovers."""

    def __init__(
        self, directory: Path, budget_bytes: int, *, floor_bytes: int, daily_write_bytes: int | None, log: BlockLog
    ) -> None:
        self.directory = directory
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.daily_write_bytes = daily_write_bytes
        self.counters = ColdCounters()
        self.refused: Counter[str] = Counter()
        self.offline: str | None = "not opened"
        self._log = log
        self._index: Index | None = None
        self._pins: Counter[BlockName] = Counter()
        self._pins_lock = threading.Lock()
        self._roots: dict[BlockName, Mapping[str, str]] = {}
        self._unwanted: set[BlockName] = set()  # withdrawn, and not yet gone from the directory
        self.has_index = True  # False when `look` found no sound one
        self._scratch: TemporaryDirectory[str] | None = None
        self._overhead_bytes = 0
        self._writes_since_measure = 0
        self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self.when_offline: Callable[[], object] = lambda: None
        self._warned: set[str] = set()

    # opening, failing, recovering

    def open(self) -> None:
        """Open the root, sweep what a crash left, and delete down to the budget (announced).

        Raises:
            CacheRootError: the directory is not safe to use: a link, owned by somebody else, or writable by others.

        A directory that cannot be used for another reason (absent disk, read-only, full) leaves the tier offline
        with one warning; it is tried again later.
        """
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            self._fail(f"cannot use {self.directory}: {_reason(error)}")

    def look(self) -> bool:
        """Open for reading only: nothing is created, repaired or deleted.

        Returns False when the index is missing or damaged; then one is made elsewhere, from the headers of the files.

        Raises:
            CacheRootError: the directory cannot be read.
        """
        check_owner(self.directory)
        try:
            self._index = self._sound_index()
            sound = self._index is not None
            if self._index is None:
                self._scratch = TemporaryDirectory(prefix="mlxkv-")
                self._index = Index(Path(self._scratch.name))
                adopt_files(self.directory, self._index, payloads=False, on_damage=_leave, delete_orphans=False)
            self._measure()
        except (OSError, sqlite3.Error) as error:
            text = f"cannot read {self.directory} ({_reason(error)}); choose another --cache-dir."
            raise CacheRootError(text) from error
        self.offline = None
        return sound

    def close(self) -> None:
        if self._scratch is not None and self._index is not None:
            self._index.close()
            self._index = None
            self._scratch.cleanup()
        if self._index is not None:
            with suppress(sqlite3.Error, OSError):
                fd = os.open(self.directory, os.O_RDONLY)
                try:
                    sync_file_fully(fd)
                finally:
                    os.close(fd)
            self._index.close()
            self._index = None
        self.offline = self.offline or "closed"

    def retry(self, *, now: bool = False) -> None:
        """Try to come back online when it is time to; whether it works again is said by the first write that does."""
        if self.wants_retry or (now and self.offline not in (None, "closed")):
            try:
                self.open()
            except CacheRootError as error:
                self._fail(str(error))

    @property
    def wants_retry(self) -> bool:
        return self.retry_in_s == 0

    @property
    def retry_in_s(self) -> float | None:
        """After how many seconds to try again; None when there is nothing to try."""
        return None if self.offline in (None, "closed") else max(self._retry_at - time.monotonic(), 0.0)

    # reads, from any thread

    def walk(self, names: Sequence[BlockName]) -> Iterator[Row]:
        """The held blocks of a chain in order, up to the first that is not held."""
        index = self._index
        if index is None or not names:
            return
        try:
            yield from index.walk(names)
        except sqlite3.Error as error:
            self._suspect(error)

    def find(self, name: BlockName) -> Row | None:
        return next(self.walk([name]), None)

    def held(self, names: Sequence[BlockName]) -> dict[BlockName, Row]:
        """Those of `names` that are held, whatever their order."""
        index = self._index
        if index is None or not names:
            return {}
        try:
            return index.find(names)
        except sqlite3.Error as error:
            self._suspect(error)
            return {}

    def children(self, parent: BlockName) -> list[Row]:
        index = self._index
        if index is None:
            return []
        try:
            return index.children(parent)
        except sqlite3.Error as error:
            self._suspect(error)
            return []

    def same_start(self, tokens: bytes, root: BlockName) -> BlockName | None:
        index = self._index
        if index is None:
            return None
        try:
            return index.same_start(tokens, root)
        except sqlite3.Error as error:
            self._suspect(error)
            return None

    def rows(self, root: BlockName | None = None) -> list[Row]:
        return self._index.rows(root) if self._index else []

    def by_prefix(self, text: str) -> list[Row]:
        return self._index.by_prefix(text) if self._index else []

    def root_fields(self, root: BlockName) -> Mapping[str, str] | None:
        """What `describe` wrote about a root; None when nobody did or it cannot be read."""
        try:
            fields = json.loads((self.directory / root.hex() / ROOT_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return fields if isinstance(fields, dict) else None

    def read(
        self, block: BlockIdentity, layout: Layout, views: Sequence[View], tensors: Sequence[int] | None = None
    ) -> int:
        """Read and check one block, or some of its tensors, into `views`; returns the bytes.

        Raises:
            DamagedBlockError: not exactly that block; the caller reports it with `quarantine`.
            OSError: missing or unreadable; the caller reports it with `forget`.
        """
        return codec.read_block(self.path(block), block, layout, views, tensors)

    def row_of(self, path: Path) -> Row | None:
        """The row of the block whose file is at `path`."""
        stem = path.name.removesuffix(codec.SUFFIX)
        return self.find(bytes.fromhex(stem)) if _is_hex(stem, 64) else None

    def path(self, block: BlockIdentity | Row) -> Path:
        return self.directory / codec.relative_path(block.root, block.name)

    def pin(self, name: BlockName) -> None:
        with self._pins_lock:
            self._pins[name] += 1

    def unpin(self, name: BlockName) -> None:
        with self._pins_lock:
            self._pins[name] -= 1
            if self._pins[name] <= 0:
                del self._pins[name]

    def pins(self) -> int:
        with self._pins_lock:
            return sum(self._pins.values())

    def totals(self) -> tuple[int, int]:
        """Blocks, and physical bytes of their files, of every model on this root."""
        try:
            return self._index.totals() if self._index else (0, 0)
        except sqlite3.Error as error:
            self._suspect(error)
            return 0, 0

    @property
    def used_bytes(self) -> int:
        """Physical bytes of the whole root, as the budget counts them."""
        return self.totals()[1] + self._overhead_bytes

    def written_today_bytes(self) -> int:
        return self._index.written_bytes(_today()) if self._index else 0

    # writes, from the mover's thread

    def write(self, block: BlockIdentity, layout: Layout, views: Sequence[View]) -> str | None:
        """Make `block` durable and visible; returns None when it is held, or the reason why it is not."""
        self.retry()
        if self._index is None or self.offline is not None:
            return "offline"
        try:
            reason = self._write(self._index, block, layout, views)
        except FileExistsError:
            reason = "its name is taken"  # by a directory or a link that is not ours
        except (OSError, sqlite3.Error) as error:
            self.counters.failed_writes += 1
            self._fail(f"cannot write to {self.directory}: {_reason(error)}")
            reason = "write failed"
        if reason is not None and reason != "held":
            self.refused[reason] += 1
            self._log.write(BlockEvent(event="drop", root=block.root, block=block.name, tier="cold", reason=reason))
            self._explain(reason)
        elif reason is None:
            self._works()
        return None if reason == "held" else reason

    def describe(self, root: BlockName, fields: Mapping[str, str]) -> None:
        """Remember the fields of a root; they are written beside its first block. From any thread."""
        self._roots[root] = fields

    def hit(self, names: Sequence[BlockName]) -> None:
        """Count a hit for each of `names` (a run of one chain, in order)."""
        if self._index is not None and names:
            try:
                self._index.hit(names, names[-1])
            except sqlite3.Error as error:
                self._suspect(error)

    def quarantine(self, block: BlockIdentity, reason: str) -> None:
        """Set a damaged file aside and drop what continued it: it can no longer be reached."""
        self.counters.damaged_blocks += 1
        self._log.write(
            BlockEvent(
                event="quarantine", root=block.root, block=block.name, index=block.index, tier="cold", reason=reason
            )
        )
        path = self.path(block)
        if path.is_dir() or path.is_symlink():
            logger.warning("cold tier: %s is in the place of a block and is not one; remove it", path)
        else:
            short = block.name.hex()[:12]
            logger.warning("cold tier: block %s failed its %s check; set aside, computed again", short, reason)
        target = self.directory / QUARANTINE / f"{path.name}.{uuid.uuid4().hex[:8]}{QUARANTINED}"
        with suppress(OSError):
            target.parent.mkdir(mode=0o700, exist_ok=True)
            if target.parent.is_symlink():
                os.unlink(path)  # a quarantine that leads elsewhere is nowhere to put things
            if path.is_dir() or path.is_symlink():
                return self._forget(block)  # not ours: a block's file is a regular file
            os.rename(path, target)
        return self._forget(block)

    def forget(self, block: BlockIdentity, error: OSError) -> None:
        """Drop the row of a file that is missing or unreadable, and what continued it."""
        self.counters.failed_reads += 1
        self._log.write(BlockEvent(event="drop", root=block.root, block=block.name, tier="cold", reason=_reason(error)))
        if not isinstance(error, FileNotFoundError):
            self._warn_once("read", f"cold tier: cannot read {self.path(block).name}: {_reason(error)}; computed again")
        self._forget(block)

    def withdraw(self, names: Sequence[BlockName]) -> None:
        """Delete blocks that must not be used again and what continues them; while offline, as soon as it is back."""
        self._unwanted.update(names)
        if self._index is not None:
            try:
                self._drop_unwanted(self._index)
            except (OSError, sqlite3.Error) as error:
                self._fail(f"cannot use {self.directory}: {_reason(error)}")

    def shrink(self, budget_bytes: int, *, reason: str = "budget") -> tuple[int, int]:
        """Evict until the root holds at most `budget_bytes`; returns blocks and bytes deleted."""
        index = self._online()
        before, freed = self.counters.evicted_blocks, 0
        while budget_bytes >= 0:
            with index.transaction():
                gone = None if self._fits(index, 0, budget_bytes) else self._evict_one(index, keep=None, reason=reason)
            if gone is None:
                break
            freed += gone
        return self.counters.evicted_blocks - before, freed

    def delete(self, rows: Sequence[Row], *, reason: str) -> tuple[int, int]:
        """Delete these blocks, deepest first, and folders that are empty then; returns blocks and their bytes."""
        index = self._online()
        blocks = freed = 0
        for row in sorted(rows, key=lambda row: -row.index):
            with index.transaction():
                for held in index.descendants(row.name):
                    self._evict(index, held, reason)
                    blocks += 1
                    freed += held.nbytes
        self._drop_empty_folders()
        return blocks, freed

    def adopt(self) -> None:
        """Enter sound files that the index does not know."""
        adopt_files(self.directory, self._online(), payloads=True, on_damage=self._set_aside)

    def tidy(self) -> None:
        """Delete what is in quarantine, and the folders and descriptions of roots that hold no block."""
        while self._drop_quarantined():
            pass
        self._drop_empty_folders()

    def _drop_empty_folders(self) -> None:
        for root in _directories(self.directory, 64):
            for fan in _directories(root, 2):
                with suppress(OSError):
                    fan.rmdir()
            if not any(entry.name != ROOT_FILE for entry in os.scandir(root)):
                with suppress(OSError):
                    (root / ROOT_FILE).unlink(missing_ok=True)
                    root.rmdir()
        self._measure()

    def _drop_unwanted(self, index: Index) -> None:
        with index.transaction():
            for name in self._unwanted:
                for row in index.descendants(name):
                    self._evict(index, row, "withdrawn")
        self._unwanted.clear()

    # checking

    def check_integrity(self) -> None:
        """Raise AssertionError when the index disagrees with itself or the budget is passed."""
        if self._index is not None:
            self._index.check_integrity()
            self._measure()
            assert self.used_bytes <= self.budget_bytes or self.totals()[0] == 0, (
                f"cold tier holds {self.used_bytes} B of a budget of {self.budget_bytes} B"
            )

    def _online(self) -> Index:
        if self._index is None:
            raise CacheRootError(
                f"the cold tier is offline ({self.offline}); check --cache-dir and run `mlxkv doctor`."
            )
        return self._index

    def _open(self) -> None:
        prepare_root(self.directory)
        index = self._sound_index() or self._new_index()
        before, self._index = self._index, index  # until here the old one answers: a full disk can still be read
        if before is not None:
            before.close()
        self._sweep(index)
        adopt_files(self.directory, index, payloads=False, on_damage=self._set_aside)
        self._drop_unwanted(index)
        self._measure()
        self.offline = None
        blocks, freed = self.shrink(self._effective_budget(index))
        if blocks:
            logger.warning("cold tier: deleted %d blocks, %s, to fit the budget of %s",
                           blocks, format_bytes(freed), format_bytes(self.budget_bytes))  # fmt: skip

    def _sound_index(self) -> Index | None:
        """The index that is there; None when there is none or it is damaged, which is announced."""
        files = self._index_files()
        if not any(path.is_dir() for path in files):
            if not files[0].exists():
                return None
            try:
                index = Index(self.directory)
                if index.is_sound():
                    return index
                index.close()
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
        logger.warning("cold tier: the index is damaged; the block files say what is held")
        return None

    def _new_index(self) -> Index:
        for path in self._index_files():
            with suppress(FileNotFoundError):
                if path.is_dir() and not path.is_symlink():  # nobody knows what is in it: it makes way, and stays
                    os.rename(path, f"{path}.{uuid.uuid4().hex[:8]}.aside")
                else:
                    os.unlink(path)
        return Index(self.directory)

    def _index_files(self) -> list[Path]:
        return [self.directory / (FILE_NAME + suffix) for suffix in ("", "-wal", "-shm")]

    def _set_aside(self, path: Path, reason: str) -> None:
        self.counters.damaged_blocks += 1
        set_aside(self.directory, path)
        self._log.write(BlockEvent(event="quarantine", tier="cold", reason=reason))

    def _sweep(self, index: Index) -> None:
        """Remove what writers that are dead left behind."""
        with index.transaction():
            for row, writer in index.unfinished():
                path = self.path(row)
                alive = path in self._in_progress if writer == os.getpid() else process_is_alive(writer)
                if not alive:
                    for leftover in [path, *path.parent.glob(f".{path.name}.*{TEMPORARY}")]:
                        with suppress(FileNotFoundError):
                            os.unlink(leftover)
                    index.delete(row.name)

    def _write(self, index: Index, block: BlockIdentity, layout: Layout, views: Sequence[View]) -> str | None:
        if not index.is_the_file():
            raise FileNotFoundError("the index was removed")
        started = time.perf_counter()
        path = self.path(block)
        size = codec.file_bytes(block, layout)
        refused = self._enter(index, block, path, size)
        if refused is not None:
            return refused
        try:
            written, physical = self._write_file(path, block, layout, views)
            with index.transaction():
                index.publish(block.name, physical, _today(), written)
        except BaseException:
            with suppress(sqlite3.Error), index.transaction():
                index.delete(block.name)
            raise
        finally:
            self._in_progress.discard(path)
        self.counters.offloaded_blocks += 1
        self.counters.offloaded_bytes += written
        self._writes_since_measure += 1
        if self._writes_since_measure >= REMEASURE_WRITES:
            self._measure()
        self._log.write(
            BlockEvent(event="offload", root=block.root, block=block.name, parent=block.parent, index=block.index,
                       bytes=written, tier="cold", ms=round((time.perf_counter() - started) * 1e3, 3))
        )  # fmt: skip
        return None

    def _enter(self, index: Index, block: BlockIdentity, path: Path, size: int) -> str | None:
        """Make room for a file of `size` bytes and enter its row, as one being written; or the reason why not."""
        reserve = -(-size // PAGE) * PAGE
        while True:
            # One eviction a transaction: a process killed in it leaves one row without its file, not many.
            with index.transaction():
                if index.is_held(block.name, writing=True):
                    return "held"
                if block.index > 0 and not index.is_held(block.parent, writing=False):
                    return "parent not held"
                if self.daily_write_bytes is not None and self.written_today_bytes() + size > self.daily_write_bytes:
                    return "daily write allowance"
                if index.others_wrote():
                    self._measure()  # they may have made directories
                room = reserve + INDEX_ROOM_BYTES + (0 if path.parent.is_dir() else 2 * PAGE)
                budget_bytes = self._effective_budget(index)
                if self._fits(index, room, budget_bytes):
                    index.insert(block, reserve, writer=os.getpid())
                    self._in_progress.add(path)
                    return None
                if room > budget_bytes or self._evict_one(index, keep=block.parent, reason="budget") is None:
                    return "no room"

    def _write_file(self, path: Path, block: BlockIdentity, layout: Layout, views: Sequence[View]) -> tuple[int, int]:
        """Write under a temporary name, make durable, then give the name; returns bytes and physical bytes."""
        if not path.parent.is_dir():
            if not self.directory.is_dir():
                raise FileNotFoundError("the cache directory was removed")
            if not path.parent.parent.is_dir():
                path.parent.parent.mkdir(mode=0o700, exist_ok=True)
                text = json.dumps(self._roots.get(block.root, {}), indent=1, ensure_ascii=False)
                (path.parent.parent / ROOT_FILE).write_text(text, encoding="utf-8")
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._measure()
        temporary = path.parent / f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}{TEMPORARY}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                written = codec.write_block(fd, block, layout, views)
                sync_file(fd)
                physical = physical_bytes(os.fstat(fd))
            finally:
                os.close(fd)
            publish_file(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
        return written, physical

    def _effective_budget(self, index: Index) -> int:
        """The budget, or less where the disk's floor is nearer; what the log may still grow by is not ours to give."""
        free = shutil.disk_usage(self.directory).free - unspent_log_bytes(self.directory)
        return min(self.budget_bytes, index.used_bytes() + self._overhead_bytes + free - self.floor_bytes)

    def _fits(self, index: Index, nbytes: int, budget_bytes: int) -> bool:
        """Whether `nbytes` more are within the budget, as the current transaction sees it."""
        return index.used_bytes() + self._overhead_bytes + nbytes <= budget_bytes

    def _evict_one(self, index: Index, *, keep: BlockName | None, reason: str) -> int | None:
        """Delete what can be missed most, inside a transaction.

        Returns the bytes of the block that went, 0 for a file in quarantine, None when there is nothing to delete.
        """
        if self._drop_quarantined():
            return 0
        with self._pins_lock:
            kept = {*self._pins, keep}
        victim = next((row for row in index.victims() if row.name not in kept), None)
        if victim is None:
            return None
        self._evict(index, victim, reason)
        self.counters.evicted_blocks += 1
        return victim.nbytes

    def _evict(self, index: Index, row: Row, reason: str) -> None:
        # The file goes first: a crash between the two leaves a row without a file, which is a miss and is counted.
        with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            os.unlink(self.path(row))
        index.delete(row.name)
        self._log.write(BlockEvent(event="evict", root=row.root, block=row.name, parent=row.parent, index=row.index,
                                   bytes=row.nbytes, tier="cold", reason=reason))  # fmt: skip

    def _drop_quarantined(self) -> bool:
        """Delete the oldest file in quarantine; False when there is none."""
        with suppress(FileNotFoundError):
            files = [p for p in (self.directory / QUARANTINE).iterdir() if p.name.endswith(QUARANTINED)]
            if files:
                oldest = min(files, key=lambda p: p.lstat().st_mtime)
                self._overhead_bytes -= physical_bytes(oldest.lstat())
                os.unlink(oldest)
                return True
        return False

    def _explain(self, reason: str) -> None:
        if reason == "daily write allowance":
            allowance = format_bytes(self.daily_write_bytes or 0)
            self._warn_once(
                reason, f"cold tier: {allowance} were written today; new blocks stay in memory until tomorrow"
            )
        elif reason == "no room":
            budget, floor = format_bytes(self.budget_bytes), format_bytes(self.floor_bytes)
            text = f"cold tier: no room within {budget} and {floor} of free disk; raise --cold or free some disk"
            self._warn_once(reason, text)

    def _forget(self, block: BlockIdentity) -> None:
        index = self._index
        if index is None:
            return
        try:
            with index.transaction():
                for row in index.descendants(block.name):
                    self._evict(index, row, "parent gone" if row.name != block.name else "unreadable")
            self._measure()
        except (OSError, sqlite3.Error) as error:
            self._fail(f"cannot use {self.directory}: {_reason(error)}")

    def _measure(self) -> None:
        """Physical bytes of everything in the root that is not a block's file: counted again, not remembered."""
        self._overhead_bytes = overhead_bytes(self.directory)
        self._writes_since_measure = 0

    def _suspect(self, error: sqlite3.Error) -> None:
        self._fail(f"the index of {self.directory} cannot be read: {_reason(error)}", retry_now=True)

    def _fail(self, text: str, *, retry_now: bool = False) -> None:
        """Go offline, say so once, and come back by itself."""
        if self.offline in (None, "not opened"):
            self._warn_once("offline", f"cold tier: {text}; going on in memory, and trying again by itself")
        self.offline = text
        self._retry_at = time.monotonic() + (0 if retry_now else self._retry_s)
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        self.when_offline()

    def _works(self) -> None:
        """A block was written: what was wrong is over, and worth another warning when it comes back."""
        self._retry_s = FIRST_RETRY_S
        if "offline" in self._warned:
            logger.warning("cold tier: %s works again", self.directory)
            self._warned.clear()

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("%s", text)


def prepare_root(directory: Path) -> None:
    """Create the root when its disk is there, and refuse one that others could tamper with.

    Raises:
        CacheRootError: a link, somebody else's, or writable by others.
        OSError: it cannot be created or used; also when it would lie under an absent mount point.
    """
    if directory.is_symlink():
        if not directory.exists():
            raise FileNotFoundError(f"{directory} is a link to nothing")
        directory = directory.resolve()
    if not directory.exists():
        absent = absent_mount_point(directory)
        if absent is not None:
            raise FileNotFoundError(f"{absent} is not mounted")
        directory.mkdir(mode=0o700, parents=True)
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a directory")
    check_owner(directory)
    if not os.access(directory, os.W_OK | os.X_OK) or os.statvfs(directory).f_flag & os.ST_RDONLY:
        raise PermissionError(f"{directory} is read-only")


def check_owner(directory: Path) -> None:
    """Refuse a root that others could tamper with.

    Raises:
        CacheRootError: it belongs to somebody else, or others can write it.
    """
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise CacheRootError(
            f"{directory} belongs to another user, who could change the cache; choose another --cache-dir."
        )
    if status.st_mode & 0o022:
        raise CacheRootError(
            f"{directory} can be written by others; run `chmod go-w {directory}` or choose another --cache-dir."
        )


def absent_mount_point(directory: Path) -> Path | None:
    """The mount point `directory` lies under, when it is not there: creating it would fill the internal disk."""
    for parents in (("/", "Volumes"), ("/", "media"), ("/", "run", "media"), ("/", "mnt")):
        depth = len(parents)
        if directory.parts[:depth] == parents and len(directory.parts) > depth:
            mount = Path(*directory.parts[: depth + 1])
            itself = parents[-1] == "mnt" and os.path.ismount(mount.parent)  # /mnt is the disk, and not where disks are
            if not itself and not mount.exists():
                return mount
    return None


def overhead_bytes(directory: Path) -> int:
    """Physical bytes of the root without the files of blocks: directories, index, quarantine, what others put there."""
    if not directory.is_dir():
        return WAL_ROOM_BYTES
    total = physical_bytes(directory.stat()) + unspent_log_bytes(directory)
    for entry in os.scandir(directory):
        with suppress(FileNotFoundError):
            total += physical_bytes(entry.stat(follow_symlinks=False))
            if entry.is_dir(follow_symlinks=False):
                inner = entry.name == QUARANTINE or len(entry.name) == 64
                total += sum(_physical(e) for e in os.scandir(entry)) if inner else _tree_bytes(entry.path)
    return total


def unspent_log_bytes(directory: Path) -> int:
    """What the write-ahead log has not taken yet of its room: counted as used, and still free on the disk."""
    with suppress(FileNotFoundError):
        return max(WAL_ROOM_BYTES - physical_bytes(os.stat(directory / f"{FILE_NAME}-wal")), 0)
    return WAL_ROOM_BYTES


def adopt_files(
    directory: Path,
    index: Index,
    *,
    payloads: bool,
    on_damage: Callable[[Path, str], None],
    delete_orphans: bool = True,
) -> tuple[int, int]:
    """Enter every sound block file that the index does not know; returns how many, and how many had no parent.

    A power cut can take the last rows of an index, and a damaged one is made again: the files are what is true. A file
    without its parent can never be matched and is deleted. Cost: lists the directories; reads the header (and payload
    if asked) of unknown files only.
    """
    found: dict[BlockName, tuple[BlockIdentity, int, float]] = {}
    present = list(block_files(directory))
    known = index.names()  # asked after listing: another process writes its row first, then the file
    for path in present:
        if bytes.fromhex(path.name.removesuffix(codec.SUFFIX)) in known:
            continue
        try:
            block, _, _ = codec.inspect(path, payload=payloads)
            status = path.stat()
        except DamagedBlockError as error:
            on_damage(path, error.reason)
            continue
        except OSError:
            continue
        if path != directory / codec.relative_path(block.root, block.name):
            on_damage(path, "root")
            continue
        found[block.name] = (block, physical_bytes(status), status.st_mtime)
    adopted = orphans = 0
    with index.transaction():
        for block, nbytes, used in sorted(found.values(), key=lambda item: item[0].index):
            if index.is_held(block.name, writing=True):
                continue
            first = block.index == 0 and block.parent == block.root
            if first or (block.index > 0 and index.is_held(block.parent, writing=False)):
                index.insert(block, nbytes, writer=None, used=used)
                adopted += 1
            else:
                if delete_orphans:
                    os.unlink(directory / codec.relative_path(block.root, block.name))
                orphans += 1
    return adopted, orphans


def block_files(directory: Path) -> Iterator[Path]:
    """Every file that has the place and the name of a block; nobody else's files, no links, no directories."""
    for root in _directories(directory, 64):
        for fan in _directories(root, 2):
            for entry in os.scandir(fan):
                stem = entry.name.removesuffix(codec.SUFFIX)
                if stem != entry.name and _is_hex(stem, 64) and entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)


def set_aside(directory: Path, path: Path) -> None:
    """Move a damaged file into quarantine."""
    target = directory / QUARANTINE / f"{path.name}.{uuid.uuid4().hex[:8]}{QUARANTINED}"
    target.parent.mkdir(mode=0o700, exist_ok=True)
    os.rename(path, target)


def publish_file(temporary: Path, path: Path) -> None:
    """Give a finished file its name; an existing one stays, for it has the same content."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        if path.is_symlink() or not path.is_file():
            raise  # somebody else's, in a block's place: the write fails, and nothing says the block is held
    except OSError:
        # exFAT and some network disks have no hard links; a rename can only replace an equal block.
        if not path.exists():
            os.rename(temporary, path)


def _directories(parent: Path, digits: int) -> list[Path]:
    return [
        Path(entry.path)
        for entry in os.scandir(parent)
        if _is_hex(entry.name, digits) and entry.is_dir(follow_symlinks=False)
    ]


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and not set(text) - set("0123456789abcdef")


def _physical(entry: os.DirEntry[str]) -> int:
    try:
        return physical_bytes(entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return 0


def _tree_bytes(path: str) -> int:
    total = 0
    for entry in os.scandir(path):
        total += _physical(entry)
        if entry.is_dir(follow_symlinks=False):
            total += _tree_bytes(entry.path)
    return total


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _leave(path: Path, reason: str) -> None:
    """Looking does not set a damaged file aside."""
    del path, reason


@contextmanager
def opened(directory: Path, log: BlockLog, *, change: bool) -> Iterator[ColdTier]:
    """The tier for maintenance, without a limit of its own.

    Args:
        change: False only looks: `ColdTier.look`. True opens it as a server would, which sweeps and repairs.

    Raises:
        CacheRootError: it cannot be used.
    """
    tier = ColdTier(directory, ANY_BYTES, floor_bytes=0, daily_write_bytes=None, log=log)
    if change:
        try:
            tier._open()
        except (OSError, sqlite3.Error) as error:
            raise CacheRootError(f"cannot use {directory}: {_reason(error)}; choose another --cache-dir.") from error
    else:
        tier.has_index = tier.look()
    try:
        yield tier
    finally:
        tier.close()
