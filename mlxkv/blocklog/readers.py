"""From lines to events: tells each line's program by the line itself, so that mixed logs are read too.

An unknown line is counted, never fatal. Records may go on over several lines: tracebacks, responses at DEBUG, and lines
that were wrapped when somebody pasted them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from mlxkv.blocklog.events import Event
from mlxkv.blocklog.mlx_lm import ACCESS, RESPONSE, MlxLmReader
from mlxkv.blocklog.omlx import OmlxReader
from mlxkv.blocklog.sources import Advance, Read, find_files, pieces

_CONTINUED_LINES = 64  # that may belong to one record
_WRAPPED_LINES = 4  # of one message
_WRAPPED_BYTES = 64 * 2**10
_LEVELS = frozenset((b"TRACE", b"DEBUG", b"INFO", b"WARNING", b"ERROR", b"CRITICAL"))
_JSON = b'{"time":"'


class LogReader:
    """Lines in, events out, with what was not understood counted. Owner: whoever reads.

    `unknown_lines` have a known frame and an unknown message, or no frame at all; `continued_lines` belong to the
    record before them; `torn_lines` are JSON that was cut.
    """

    def __init__(self) -> None:
        self.read = Read()
        self.lines = 0
        self.unknown_lines = 0
        self.continued_lines = 0
        self.torn_lines = 0
        self.records: Counter[str] = Counter()
        self._decode = msgspec.json.Decoder(Event).decode
        self._omlx = OmlxReader()
        self._mlx_lm = MlxLmReader()
        self._half: list[bytes] = []
        self._record: tuple[str, str, str, str] | None = None
        self._more: list[str] = []

    @property
    def levels(self) -> set[str]:
        """Levels seen in logs of oMLX and mlx_lm."""
        return self._omlx.levels | self._mlx_lm.levels

    def files(self, names: Sequence[str | Path], advance: Advance | None = None) -> Iterator[Event]:
        """The events of some files, a directory or stdin; see `sources`."""
        for lines in pieces(find_files([str(name) for name in names]), self.read, advance):
            yield from self.events(lines)
        yield from self.finish()

    def events(self, lines: Sequence[bytes]) -> Iterator[Event]:
        """The events of some more lines."""
        decode, torn = self._decode, (msgspec.DecodeError, UnicodeDecodeError)
        known = 0
        for line in lines:
            if line[:1] == b"{" and not self._half:
                try:
                    event = decode(line)
                except torn:
                    yield from self._torn(line)
                    continue
                known += 1
                yield event
            else:
                yield from self._other(line)
        self.lines += known
        self.records["mlxkv"] += known

    def finish(self) -> Iterator[Event]:
        """What was still waiting for a next line."""
        yield from self._flush()
        if self._half:
            self.torn_lines += len(self._half)
            self._half = []
        yield from self._omlx.finish()
        yield from self._mlx_lm.finish()

    def _other(self, line: bytes) -> Iterator[Event]:
        if not line.strip():
            return
        if self._half:
            yield from self._torn(line)
            return
        self.lines += 1
        parts = line.split(b" - ", 3)
        if len(parts) >= 3 and len(parts[0]) == 23 and parts[0][4:5] == b"-" and parts[0][19:20] == b",":
            yield from self._flush()
            if len(parts) == 4 and parts[2] in _LEVELS and parts[1].startswith(b"omlx"):
                message = parts[3]
                if message[:1] == b"[" and (stop := message.find(b"] - ")) > 0 and b" " not in message[:stop]:
                    message = message[stop + 4 :]
                self._record = ("oMLX", _time(parts[0]), parts[2].decode(), message.decode(errors="replace"))
                return
            if parts[1] in _LEVELS:
                message = line[len(parts[0]) + len(parts[1]) + 6 :]
                self._record = ("mlx_lm", _time(parts[0]), parts[1].decode(), message.decode(errors="replace"))
                return
            self.unknown_lines += 1
            return
        at = line.find(_JSON)
        if at > 0:
            self.lines -= 1
            yield from self.events([line[at:]])
        elif ACCESS.match(line):
            self.records["mlx_lm"] += 1
        elif self._record is not None and len(self._more) < _CONTINUED_LINES:
            self._more.append(line.decode(errors="replace"))
        else:
            self.unknown_lines += 1

    def _flush(self) -> Iterator[Event]:
        """Read the record before, with the lines that followed it."""
        if self._record is None:
            return
        source, time, level, message = self._record
        more, self._more, self._record = self._more, [], None
        self.continued_lines += len(more)
        reader = self._omlx if source == "oMLX" else self._mlx_lm
        if more and message.startswith(RESPONSE):
            message += "\n".join(more)
        events = reader.feed(time, level, message)
        for count in range(1, min(len(more), _WRAPPED_LINES) + 1):
            if events is not None:
                break
            rest = [line.strip() for line in more[:count]]
            events = reader.feed(time, level, "".join([message, *rest]))
            events = reader.feed(time, level, " ".join([message, *rest])) if events is None else events
        if events is None:
            self.unknown_lines += 1
            return
        self.records[source] += 1
        yield from events

    def _torn(self, line: bytes) -> Iterator[Event]:
        """A line that is no whole JSON: the next ones may be the rest of it."""
        if self._half and line.startswith(_JSON):  # a new one begins, so the one before stays cut
            self.torn_lines += len(self._half)
            self._half = []
            yield from self.events([line])
            return
        self._half.append(line)
        for glue in (b"", b" "):
            try:
                event = self._decode(glue.join(part.strip(b"> \t") if i else part for i, part in enumerate(self._half)))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            self.lines += len(self._half)
            self.continued_lines += len(self._half) - 1
            self.records["mlxkv"] += 1
            self._half = []
            yield event
            return
        if len(self._half) > _CONTINUED_LINES or sum(map(len, self._half)) > _WRAPPED_BYTES:
            self.torn_lines += len(self._half)
            self.lines += len(self._half)
            self._half = []


def _time(asctime: bytes) -> str:
    """Python's `2026-11-30 19:12:38,779` as ISO 8601, without a zone: the log does not say it."""
    return asctime.decode().replace(" ", "T").replace(",", ".")
