"""A file as it grows: its lines now, then those that come, also after it was rotated or cut short."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mlxkv.blocklog.sources import PIECE_BYTES, Cleaner


def follow(path: Path) -> Iterator[list[bytes] | None]:
    """Yield whole lines as they come, and None whenever there is no more for now: the caller waits and asks again.

    When another file has taken the name, what is left of the old one is read first. A file that became shorter is read
    from its beginning. A name that is gone for a moment is waited for.
    """
    file = path.open("rb")
    rest, cleaner = b"", Cleaner()
    try:
        while True:
            piece = file.read(PIECE_BYTES)
            if piece:
                cut = (rest + piece).rfind(b"\n") + 1
                lines, rest = (rest + piece)[:cut], (rest + piece)[cut:]
                if lines:
                    yield cleaner.lines(lines)
                continue
            try:
                now = path.stat()
            except FileNotFoundError:
                yield None
                continue
            held = os.fstat(file.fileno())
            if (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino):
                if left := file.read():  # written between the last read and the rotation
                    yield cleaner.lines(rest + left)
                file.close()
                file, rest = path.open("rb"), b""
            elif now.st_size < file.tell():
                file.seek(0)
                rest = b""
            else:
                yield None
    finally:
        file.close()
