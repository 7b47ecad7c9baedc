"""What the cold tier needs of a file system: names that appear whole, bytes that stay, locks that exclude."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from mlxkv.cache.cold import publish_file
from mlxkv.core.platform import sync_file, sync_file_fully
from mlxkv.core.units import GIB, MIB, format_bytes, format_seconds
from mlxkv.prove.check import Check, Figure, why

_RENAMES = 300
_SYNCS = 5
_SYNCED_BYTES = MIB
_LITTLE_DISK_BYTES = 2 * GIB
_F_BARRIERFSYNC = 85  # <sys/fcntl.h> of macOS
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afpfs", "webdav", "9p", "fuse.sshfs"}
_ELSEWHERE = "Choose a --cache-dir on an internal disk; what is written here may be torn or lost."
_ASK_FOR_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
try:
    connection.execute("BEGIN IMMEDIATE")
    print("taken")
except sqlite3.OperationalError as error:
    print("busy" if "locked" in str(error) else error)
"""


def check_rename(scratch: Path) -> Check:
    """While one thread gives a file new content by renaming, another sees the old or the new, and never neither."""
    path, sizes = scratch / "renamed", (10_000, 20_000)
    contents = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    path.write_bytes(contents[0])
    stop = threading.Event()
    torn: list[str] = []
    reads = [0]
    reader = threading.Thread(target=_read_on, args=(path, contents, stop, torn, reads))
    reader.start()
    try:
        for turn in range(_RENAMES):
            temporary = scratch / "renamed.tmp"
            temporary.write_bytes(contents[turn % 2])
            os.replace(temporary, path)
    except OSError as error:
        torn.append(why(error))
    finally:
        stop.set()
        reader.join()
    figures: dict[str, Figure] = {"renames": _RENAMES, "reads": reads[0], "torn_reads": len(torn)}
    if torn:
        return Check("rename", "fail", f"a rename is not atomic: {torn[0]}", figures, _ELSEWHERE)
    said = f"{_RENAMES} files replaced while {reads[0]:,} reads saw the old or the new"
    return Check("rename", "ok", said, figures)


def _read_on(path: Path, contents: list[bytes], stop: threading.Event, torn: list[str], reads: list[int]) -> None:
    while not stop.is_set() and not torn:
        try:
            found = path.read_bytes()
        except OSError as error:
            torn.append(why(error))
            return
        reads[0] += 1
        if found not in contents:
            torn.append(f"{len(found):,} bytes of neither file")


def check_publish(scratch: Path) -> Check:
    """A finished file gets its name, by a hard link or a rename, and one that has it keeps its content."""
    first, second, path = scratch / "first.tmp", scratch / "second.tmp", scratch / "published"
    first.write_bytes(b"first")
    second.write_bytes(b"second")
    links = _links(scratch)
    try:
        publish_file(first, path)
        publish_file(second, path)
        kept = path.read_bytes() == b"first"
    except OSError as error:
        said = f"a file cannot be given its name: {why(error)}"
        return Check("publish", "fail", said, {"hard_links": links}, _ELSEWHERE)
    if not kept:
        return Check("publish", "fail", "a name that was taken got other content", {"hard_links": links}, _ELSEWHERE)
    way = "by hard links" if links else "by renames, for there are no hard links"
    return Check("publish", "ok", f"files get their names {way}, and keep them", {"hard_links": links})


def _links(scratch: Path) -> bool:
    target = scratch / "link-target"
    target.write_bytes(b"x")
    try:
        os.link(target, scratch / "link")
    except OSError:
        return False
    return (scratch / "link").stat().st_ino == target.stat().st_ino


def check_sync(scratch: Path) -> Check:
    """The calls that make a file durable, in the order they are tried, and how long they take."""
    with open(scratch / "synced", "wb") as file:
        try:
            ordered_s = _median_seconds(file.fileno(), sync_file)
            full_s = _median_seconds(file.fileno(), sync_file_fully)
        except OSError as error:
            return Check("sync", "fail", f"a file cannot be made durable: {why(error)}", {}, _ELSEWHERE)
        call = _sync_call(file.fileno())
    figures: dict[str, Figure] = {"call": call, "sync_s": ordered_s, "full_sync_s": full_s, "bytes": _SYNCED_BYTES}
    said = (
        f"{call} of {format_bytes(_SYNCED_BYTES)} takes {format_seconds(ordered_s)}, a full sync"
        f" {format_seconds(full_s)}"
    )
    if sys.platform == "darwin" and call == "fsync":
        advice = "After a power cut the newest blocks may be found damaged, and are computed again; nothing to do."
        return Check("sync", "note", f"no barriers here: {said}", figures, advice)
    return Check("sync", "ok", said, figures)


def _median_seconds(fd: int, sync: Callable[[int], None]) -> float:
    seconds = []
    for turn in range(_SYNCS):
        os.pwrite(fd, bytes([turn]) * _SYNCED_BYTES, 0)
        started = time.perf_counter()
        sync(fd)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _sync_call(fd: int) -> str:
    if sys.platform != "darwin":
        return "fdatasync"
    with suppress(OSError):
        fcntl.fcntl(fd, _F_BARRIERFSYNC)
        return "F_BARRIERFSYNC"
    return "fsync"


def check_lock(scratch: Path) -> Check:
    """SQLite's lock, with which processes share the index: held here, another process must be told so."""
    path = scratch / "lock.db"
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            mode = str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
            connection.execute("CREATE TABLE t (x)")
            connection.execute("BEGIN IMMEDIATE")
            held = _ask_for_lock(path)
            connection.execute("COMMIT")
            free = _ask_for_lock(path)
    except sqlite3.Error as error:
        return Check("lock", "fail", f"SQLite cannot work here: {error}", {}, _ELSEWHERE)
    figures: dict[str, Figure] = {"journal_mode": mode, "while_held": held, "while_free": free}
    if held != "busy":
        said = "a lock held here did not keep another process out"
        return Check("lock", "fail", said, figures,
                     "Choose a --cache-dir on an internal disk, or never run two processes on this one.")  # fmt: skip
    if free != "taken" or mode != "wal":
        said = f"another process could not take a free lock ({free})" if free != "taken" else f"no WAL, only {mode}"
        return Check("lock", "fail", said, figures, _ELSEWHERE)
    return Check("lock", "ok", "a lock held here keeps another process out, and lets it in afterwards", figures)


def _ask_for_lock(path: Path) -> str:
    """What a process of its own hears when it asks for the lock: `taken`, `busy`, or another error."""
    command = [sys.executable, "-I", "-c", _ASK_FOR_LOCK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return done.stdout.strip() or "no answer"


def check_place(scratch: Path) -> Check:
    """What kind of file system this is, whether it tells upper from lower case, and how much is free."""
    (scratch / "Case").write_bytes(b"")
    folds = (scratch / "cASE").exists()
    free_bytes = shutil.disk_usage(scratch).free
    kind = file_system(scratch)
    figures: dict[str, Figure] = {"file_system": kind, "case_insensitive": folds, "free_bytes": free_bytes}
    case = "upper and lower case are one name" if folds else "upper and lower case differ"  # block names are lower case
    said = f"{kind or 'unknown file system'}, {format_bytes(free_bytes)} free, {case}"
    if free_bytes < _LITTLE_DISK_BYTES:
        return Check("place", "note", said, figures, "Free some disk: below its floor the cold tier writes nothing.")
    if kind in _NETWORK:
        return Check("place", "note", f"a network disk: {said}", figures,
                     "Restoring over a network may be slower than computing; an internal disk is better.")  # fmt: skip
    return Check("place", "ok", said, figures)


def file_system(path: Path) -> str | None:
    """The type of the file system that `path` is on; None where the system does not say."""
    device = path.resolve()
    mounts = _mounts()
    while str(device) not in mounts:
        if device == device.parent:
            return None
        device = device.parent
    return mounts[str(device)]


def _mounts() -> dict[str, str]:
    """Mount point -> type, from the system's own table; a later mount hides an earlier one."""
    if sys.platform == "linux":
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as table:
            rows = [line.split() for line in table]
        return {row[1].replace("\\040", " "): row[2] for row in rows if len(row) > 2}
    shown = subprocess.run(["/sbin/mount"], capture_output=True, text=True, check=False).stdout
    found = {}
    for line in shown.splitlines():  # /dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled)
        place, _, options = line.partition(" on ")[2].rpartition(" (")
        found[place] = options.partition(",")[0].rstrip(")")
    return found
