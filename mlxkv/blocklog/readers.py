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
from mlxkv.blocklog.omlx import OmlxReader, iso_time
from mlxkv.blocklog.sources import Advance, Read, find_files, pieces

_CONTINUED_LINES = 64  # that may belong to one record
_WRAPPED_LINES = 4  # of one message
_WRAPPED_BYTES = 64 * 2**10
_LEVELS = {name.encode(): name for name in ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
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
        self._waiting: tuple[str, str, str, str] | None = None
        self._more: list[str] = []
        self._continued = 0
        self._at = (b"", "")

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
        frequent = self._omlx.feed_frequent
        known = quick = 0
        for line in lines:
            if line[:1] == b"{" and not self._half:
                try:
                    event = decode(line)
                except torn:
                    yield from self._torn(line)
                    continue
                if event.detail is not None or event.source != "mlxkv":
                    event.detail, event.source = None, "mlxkv"  # set by readers only; no fields of mlxkv's own lines
                known += 1
                yield event
            elif self._half:
                yield from self._torn(line)
            elif self._waiting is None and (one := frequent(line)) is not None:
                quick += 1
                self._continued = 0
                yield one
            elif found := self._text(line):
                yield from found
        self.lines += known + quick
        self.records["mlxkv"] += known
        self.records["oMLX"] += quick

    def finish(self) -> Iterator[Event]:
        """What was still waiting for a next line."""
        yield from self._give_up()
        self._cut()
        yield from self._omlx.finish()
        yield from self._mlx_lm.finish()

    def _text(self, line: bytes) -> Sequence[Event]:
        """One line that is no JSON: a record of oMLX or mlx_lm, or the rest of one."""
        if _framed(line):
            self.lines += 1
            self._continued = 0
            before = self._give_up() if self._waiting is not None else ()
            first = line.find(b" - ", 26)
            if line.startswith(b"omlx", 26) and first > 0:
                second = line.find(b" - ", first + 3)
                level = line[first + 3 : second]
                at = second + 3
                if line[at : at + 1] == b"[" and (stop := line.find(b"] - ", at)) > 0 and line.find(b" ", at, stop) < 0:
                    at = stop + 4
                source = "oMLX"
            else:
                level, at, source = line[26:first], first + 3, "mlx_lm"
            name = _LEVELS.get(level)
            if name is None:
                self.unknown_lines += 1
                return before
            if line[:23] != self._at[0]:
                self._at = (line[:23], iso_time(line[:23]))
            message = str(line[at:], "utf-8", "replace")
            events = (self._omlx if source == "oMLX" else self._mlx_lm).feed(self._at[1], name, message)
            if events is None or message.startswith(RESPONSE):
                self._waiting = (source, self._at[1], name, message)
                return before
            self.records[source] += 1
            return (*before, *events) if before else events
        return self._rest(line) if line.strip() else ()

    def _rest(self, line: bytes) -> Sequence[Event]:
        """A line without a known beginning."""
        self.lines += 1
        at = line.find(_JSON)
        if at > 0:
            self.lines -= 1
            return list(self.events([line[at:]]))
        if ACCESS.match(line):
            self.records["mlx_lm"] += 1
        elif not self.records.total() and self._waiting is None:
            self.unknown_lines += 1
        elif self._continued < _CONTINUED_LINES:
            self._continued += 1
            self.continued_lines += 1
            if self._waiting is not None:
                self._more.append(line.decode(errors="replace"))
        else:
            self.unknown_lines += 1
        return ()

    def _give_up(self) -> Sequence[Event]:
        """Read the record that waited with the lines that followed it, or count it as unknown."""
        if self._waiting is None:
            return ()
        source, time, level, message = self._waiting
        more, self._more, self._waiting = self._more, [], None
        reader = self._omlx if source == "oMLX" else self._mlx_lm
        if message.startswith(RESPONSE):
            forms = ["\n".join([message, *more])]
        else:
            rests = [[line.strip() for line in more[:count]] for count in range(1, min(len(more), _WRAPPED_LINES) + 1)]
            forms = [glue.join([message, *rest]) for rest in rests for glue in ("", " ")]
        for form in forms:
            events = reader.feed(time, level, form)
            if events is not None:
                self.records[source] += 1
                return events
        self.unknown_lines += 1
        return ()

    def _torn(self, line: bytes) -> Iterator[Event]:
        """A line that is no whole JSON: the next ones may be the rest of it."""
        if self._half and _begins(line):  # another record, so the one before stays cut
            self._cut()
            yield from self.events([line])
            return
        self._half.append(line)
        for glue in (b"", b" "):
            try:
                event = self._decode(glue.join(part.strip(b"> \t") if i else part for i, part in enumerate(self._half)))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            event.detail, event.source = None, "mlxkv"
            self.lines += len(self._half)
            self.continued_lines += len(self._half) - 1
            self.records["mlxkv"] += 1
            self._half = []
            yield event
            return
        if len(self._half) > _CONTINUED_LINES or sum(map(len, self._half)) > _WRAPPED_BYTES or _is_json(line):
            self._cut()

    def _cut(self) -> None:
        """Count what looked like a part of an event and was none."""
        self.torn_lines += len(self._half)
        self.lines += len(self._half)
        self._half = []


def _framed(line: bytes) -> bool:
    """Whether a line begins as records of oMLX and mlx_lm do: a time with milliseconds, then a dash."""
    return line[23:26] == b" - " and line[4:5] == b"-" and line[19:20] == b","


def _begins(line: bytes) -> bool:
    """Whether a line is a record of its own, not the rest of one that was cut."""
    return line.startswith(_JSON) or _framed(line) or _is_json(line)


def _is_json(line: bytes) -> bool:
    """Whether a line is a whole JSON object, an event or another program's."""
    if line[:1] != b"{" or not line.endswith(b"}"):
        return False
    try:
        msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
