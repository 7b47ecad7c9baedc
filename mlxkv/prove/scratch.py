"""A directory of our own beside the user's blocks, on the same file system, that is gone afterwards."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlxkv.cache.cold import absent_mount_point
from mlxkv.core.errors import CacheRootError
from mlxkv.core.platform import process_is_alive

_NAME = re.compile(r"\.mlxkv-prove-(\d+)-[0-9a-f]{8}")


@contextmanager
def scratch_beside(root: Path) -> Iterator[Path]:
    """An empty directory on the disk of the cache root, which need not exist; deleted however the body ends.

    What a killed run left is deleted too. Beside the root, or in it where the root is a disk of its own.

    Raises:
        CacheRootError: nothing can be written there.
    """
    absent = absent_mount_point(root)
    if absent is not None:
        raise CacheRootError(f"{absent} is not mounted: attach the disk, or choose another --cache-dir.")
    beside = _place(root)
    path = beside / f".mlxkv-prove-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    made = _missing(beside)
    try:
        path.mkdir(mode=0o700, parents=True)
    except OSError as error:
        _remove_empty(made)
        raise CacheRootError(
            f"{beside} cannot be written to ({error.strerror}); choose another --cache-dir."
        ) from error
    try:
        _sweep(beside)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _remove_empty(made)


def _place(root: Path) -> Path:
    """The directory to put ours in."""
    if root.is_dir() and (root.stat().st_dev != root.parent.stat().st_dev or not os.access(root.parent, os.W_OK)):
        return root
    return root.resolve().parent if root.is_symlink() else root.parent


def _missing(path: Path) -> list[Path]:
    """Those of `path` and its parents that are not there yet, deepest first."""
    return [parent for parent in (path, *path.parents) if not parent.exists()]


def _remove_empty(directories: list[Path]) -> None:
    for directory in directories:
        with suppress(OSError):  # somebody put something there meanwhile
            directory.rmdir()


def _sweep(beside: Path) -> None:
    for path in beside.glob(".mlxkv-prove-*"):
        named = _NAME.fullmatch(path.name)
        ours = named is not None and not path.is_symlink() and path.stat().st_uid == os.geteuid()
        if named is not None and ours and not process_is_alive(int(named[1])):
            shutil.rmtree(path, ignore_errors=True)
