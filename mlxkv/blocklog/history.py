"""One request of a log with what is needed to explain it: earlier requests, and blocks of its chain that went.

Read in two passes, because what went is logged before it is missed; memory does not grow with the log.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mlxkv.blocklog.events import Event
from mlxkv.blocklog.readers import LogReader
from mlxkv.blocklog.sources import Advance, need_files
from mlxkv.blocklog.why import Gone, Record, shared
from mlxkv.core.errors import UsageError

NEAREST = 8
_GONE = ("evict", "quarantine", "drop")


@dataclass(frozen=True)
class History:
    """What a log knows of one request; `event` is its own line."""

    event: Event
    record: Record
    earlier: tuple[Record, ...]
    gone: tuple[Gone, ...]


def record_of(event: Event) -> Record:
    """The record of a `request` event."""
    return Record.of(event.to_fields())


def find_request(names: Sequence[str], request: str, advance: Advance | None = None) -> Event:
    """The request of that id, or of the only id that begins so.

    Raises:
        UsageError: there is none, or more than one begins so.
    """
    return _find(names, request, advance)[0]


def _find(names: Sequence[str], request: str, advance: Advance | None) -> tuple[Event, set[str]]:
    """The request, and the names of the blocks it committed."""
    found: dict[str, Event] = {}
    committed: dict[str, set[str]] = {}
    for event in LogReader().files(names, advance):
        if event.request is None or not event.request.startswith(request):
            continue
        whole = event.request == request  # it may come after any number that only begin so
        if event.event == "request" and (whole or len(found) <= NEAREST):
            found[event.request] = event
        elif event.event == "commit" and event.block is not None and (whole or len(committed) <= NEAREST):
            committed.setdefault(event.request, set()).add(event.block)
    if request not in found and len(found) != 1:
        several = f"several begin with {request}: {', '.join(list(found)[:4])}" if found else f"no request {request}"
        raise UsageError(f"{several} in this log; `mlxkv log requests FILE` lists them.")
    event = found[request] if request in found else next(iter(found.values()))
    return event, committed.get(event.request or "", set())


def read_history(names: Sequence[str], request: str, advance: Advance | None = None) -> History:
    """Everything to explain a request from its log.

    Raises:
        UsageError: as `find_request`; or the log is stdin or a pipe, which cannot be read twice.
    """
    need_files(names)
    event, own = _find(names, request, advance)
    record = record_of(event)
    nearest: list[tuple[int, int, Record]] = []
    gone: list[Gone] = []
    unexplained = 0  # of the last in `gone`: what they made room for comes next in the log
    begun = False
    for number, each in enumerate(_until(names, event)):
        begun = begun or (each.event == "commit" and each.request == event.request)
        if each.event in _GONE and each.block in own and not begun:
            gone.append(
                Gone(block=each.block or "", event=each.event, time=each.time, tier=each.tier, reason=each.reason)
            )
            unexplained += 1
        elif each.event == "commit" and unexplained:
            gone[-unexplained:] = [replace(one, by=each.request) for one in gone[-unexplained:]]
            unexplained = 0
        elif each.event == "request":
            other = record_of(each)
            row = (shared(record, other)[0], number, other)
            if len(nearest) < NEAREST:
                heapq.heappush(nearest, row)
            else:
                heapq.heappushpop(nearest, row)
    return History(event, record, tuple(other for _, _, other in sorted(nearest)), tuple(gone))


def _until(names: Sequence[str], last: Event) -> Iterator[Event]:
    """The events before a request's own."""
    for event in LogReader().files(names):
        if event.event == "request" and (event.request, event.time) == (last.request, last.time):
            return
        yield event
