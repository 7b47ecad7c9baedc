"""From files to clean lines: compressed, rotated, in any encoding, in constant memory.

Every source is read once, front to back, in pieces of about a mebibyte. What is cleaned away (colours, carriage
returns, NULs of UTF-16) costs nothing where it does not occur.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import cast

from mlxkv.blocklog.events import seconds_of
from mlxkv.core.errors import UsageError

STDIN = "-"
PIECE_BYTES = 2**20
LONGEST_LINE_BYTES = 16 * 2**20  # a longer one is no log line; it is cut there
_PROBE_BYTES = 64 * 2**10
_GZIP = b"\x1f\x8b"
_ESCAPES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]?")
_BOM = b"\xef\xbb\xbf"
_TIME = re.compile(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:\d\d)?")

Content = gzip.GzipFile | io.BufferedReader
Advance = Callable[[float], None]
"""Called with the bytes read since the last call, as they lie on the disk."""


@dataclass
class Read:
    """What was read, counted while it is. `cut_lines` ended without a newline, at the end of a source."""

    files: int = 0
    duplicates: list[str] = field(default_factory=list)
    bytes: int = 0
    cut_lines: int = 0


def find_files(names: Sequence[str]) -> list[Path]:
    """The files that `names` mean, each once: a directory means the logs in it, `-` means stdin.

    Raises:
        UsageError: there is no such file, or a directory has none.
    """
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if name == STDIN:
            found.append(path)
        elif path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.is_file() and _looks_like_a_log(p.name))
            if not inside:
                raise UsageError(f"{name} has no .log, .jsonl or .txt file; name the log.")
            found += inside
        elif path.is_file() or path.is_fifo():
            found.append(path)
        else:
            raise UsageError(f"there is no file {name}; check the path.")
    return found


def _looks_like_a_log(name: str) -> bool:
    return not name.startswith(".") and re.search(r"\.(log|jsonl|ndjson|txt)(\.|$)", name) is not None


def is_pipe(path: Path) -> bool:
    """Whether a source can be read once only: stdin, a named pipe, a shell's `<(command)`."""
    return str(path) == STDIN or not path.is_file()


def need_files(names: Sequence[str]) -> None:
    """Nothing, when every source can be read more than once.

    Raises:
        UsageError: one is stdin or a pipe; or as `find_files`.
    """
    if any(is_pipe(path) for path in find_files(names)):
        raise UsageError("stdin and pipes cannot be read twice; give the log as a file.")


def total_bytes(paths: Sequence[Path]) -> int | None:
    """Bytes of all files on the disk; None when one is stdin or a pipe."""
    return None if any(map(is_pipe, paths)) else sum(path.stat().st_size for path in paths)


def pieces(paths: Sequence[Path], read: Read, advance: Advance | None = None) -> Iterator[list[bytes]]:
    """Yield the lines of all sources, cleaned, a list at a time; older files first, a file that is given twice once.

    Raises:
        UsageError: a file cannot be read, or its compression is damaged.
    """
    for path in _in_order(paths, read):
        read.files += 1
        try:
            with _opened(path) as (raw, stream):
                yield from _lines_of(raw, stream, read, advance)
        except (OSError, zlib.error) as error:
            raise UsageError(f"{path} cannot be read ({error}); give another file.") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedReader, Content]]:
    """A source as (the file on the disk, its content); they differ where it is compressed."""
    if str(path) == STDIN:
        raw = cast("io.BufferedReader", sys.stdin.buffer)
        yield raw, _content(raw)
        return
    with path.open("rb") as file:
        yield file, _content(file)


def _content(raw: io.BufferedReader) -> Content:
    return gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP else raw


def _lines_of(raw: io.BufferedReader, stream: Content, read: Read, advance: Advance | None) -> Iterator[list[bytes]]:
    rest, at = b"", 0
    cleaner = Cleaner()
    while piece := _next_piece(stream, read):
        if advance is not None:
            now = raw.tell() if raw.seekable() else at + len(piece)
            advance(now - at)
            at = now
        read.bytes += len(piece)
        piece = rest + piece
        cut = piece.rfind(b"\n") + 1
        if not cut and len(piece) < LONGEST_LINE_BYTES:
            rest = piece
            continue
        cut = cut or len(piece)
        rest = piece[cut:]
        yield cleaner.lines(piece[:cut])
    if rest.strip(b"\0\r "):
        read.cut_lines += 1
        yield cleaner.lines(rest)


def _next_piece(stream: Content, read: Read) -> bytes:
    try:
        return stream.read1(PIECE_BYTES)
    except EOFError:  # compressed, and cut short
        read.cut_lines += 1
        return b""


class Cleaner:
    """Cuts pieces of one source into lines without colours and carriage returns, in UTF-8 whatever they were before.

    UTF-16 is cut at the byte 0x0a too: little-endian then leaves the newline's NUL in front of the next line,
    big-endian at the end of its own. Which it is shows where it begins; a source may change to and from it.
    """

    def __init__(self) -> None:
        self._big_endian: bool | None = None

    def lines(self, piece: bytes) -> list[bytes]:
        r"""The lines of a piece that ends with a newline, or with the source.

        >>> Cleaner().lines(b"\x1b[32mone\x1b[0m\r\n10%\r99%\rtwo\n")
        [b'one', b'two']
        """
        lines = piece.split(b"\n")
        if not lines[-1]:
            lines.pop()
        if b"\0" in piece:
            lines = [self._from_utf16(line) for line in lines]
        elif lines:
            self._big_endian = None
        if _BOM in piece:
            lines = [line.replace(_BOM, b"") for line in lines]
        if b"\x1b" in piece:
            lines = [_ESCAPES.sub(b"", line) for line in lines]
        if b"\r" in piece:
            lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        return lines

    def _from_utf16(self, line: bytes) -> bytes:
        if b"\0" not in line:
            if line:
                self._big_endian = None
            return line
        bare = line.strip(b"\0")
        if self._big_endian is None and len(bare) > 1 and b"\0" not in bare:
            return bare  # a file system's padding, after a power cut
        if line.startswith((b"\xff\xfe", b"\xfe\xff")):
            self._big_endian = line.startswith(b"\xfe\xff")
        elif self._big_endian is None:
            self._big_endian = line.startswith(b"\0")
        odd = len(line) % 2
        if self._big_endian:
            text = line[: len(line) - odd].decode("utf-16-be", "replace")
        else:
            text = line[odd:].decode("utf-16-le", "replace")
        return text.replace("\0", "").replace("\ufeff", "").encode(errors="replace")


def _in_order(paths: Sequence[Path], read: Read) -> list[Path]:
    """The sources by the first time in them, without those whose beginning another one has too."""
    kept: list[tuple[float, Path, bytes]] = []
    for path in paths:
        if is_pipe(path):  # what was looked at would be gone
            kept.append((-inf, path, b""))
            continue
        try:
            with _opened(path) as (_, stream):
                head = _head(stream)
        except (OSError, zlib.error) as error:
            raise UsageError(f"{path} cannot be read ({error}); give another file.") from error
        twin = next((i for i, (_, _, other) in enumerate(kept) if _same_beginning(head, other)), None)
        time = _TIME.search(b" ".join(Cleaner().lines(head)))
        at = seconds_of(time[0].replace(b",", b".").decode()) if time else None
        row = (inf if at is None else at, path, head)
        if twin is None:
            kept.append(row)
            continue
        longer = max((kept[twin], row), key=lambda found: (len(found[2]), found[1].stat().st_size))
        read.duplicates.append(str(row[1] if longer is kept[twin] else kept[twin][1]))
        kept[twin] = longer
    return [path for _, path, _ in sorted(kept, key=lambda row: row[0])]


def _head(stream: Content) -> bytes:
    """The first bytes of a source; fewer where it is compressed and cut short."""
    head = b""
    while len(head) < _PROBE_BYTES:
        try:
            piece = stream.read1(_PROBE_BYTES - len(head))
        except EOFError:
            break
        if not piece:
            break
        head += piece
    return head


def _same_beginning(a: bytes, b: bytes) -> bool:
    """Whether one source is the beginning of the other, as far as was looked."""
    size = min(len(a), len(b))
    return size > 0 and a[:size] == b[:size]
