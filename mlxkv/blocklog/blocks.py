"""Every block of a log: when it was born, where it is, how often it was used, what it cost to write.

Memory grows with the number of different blocks, about 700 B each; the summary is for logs of any size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from mlxkv.blocklog.events import Event
from mlxkv.blocklog.outline import BLOCK_DIGITS
from mlxkv.cache.names import BLOCK_TOKENS

SORTS = ("born", "used", "hits", "bytes", "written", "chain")


@dataclass(slots=True)
class BlockRow:
    """One block. `chain` is the name of the first block of its chain; `tier` is None once it went everywhere."""

    block: str
    chain: str
    index: int
    tokens: int
    bytes: int
    model: str | None
    hot: bool = False
    cold: bool = False
    born: str | None = None
    last_used: str | None = None
    hits: int = 0
    written_bytes: int = 0
    parent: str | None = None
    request: str | None = None

    @property
    def tier(self) -> str | None:
        """Where it is at the end of the log."""
        return "hot" if self.hot else "cold" if self.cold else None

    def to_fields(self) -> dict[str, Any]:
        """The row as plain values."""
        found = asdict(self)
        return {name: value for name, value in found.items() if name not in ("hot", "cold")} | {"tier": self.tier}


class BlockTable:
    """Follows blocks through a log. Owner: whoever reads it.

    A hit is counted for every full block of the chain a request restored: those before the first it committed itself,
    or before the one it read last from the SSD. A request that did neither took all from memory; the digests in its
    outline say which blocks, where an earlier outline had them, and without outlines it is not counted. `distances`
    counts how many requests later a chain was used again, by its last block.
    """

    def __init__(self) -> None:
        self.rows: dict[str, BlockRow] = {}
        self.distances: Counter[int] = Counter()
        self._anchors: dict[str, str] = {}
        self._used_by: dict[str, int] = {}
        self._made_by: dict[str, int] = {}
        self._committed: dict[str, list[str]] = {}  # full blocks of requests that have not ended
        self._outlined: dict[str, dict[str, str]] = {}  # root -> digest in an outline -> block
        self._requests = 0

    def add(self, event: Event) -> None:
        """Take note of one event."""
        if event.event == "commit":
            self._commit(event)
        elif event.event == "offload" and event.block is not None:
            row = self._row(event)
            row.cold = True
            row.written_bytes += event.bytes or 0
        elif event.event in ("evict", "quarantine", "drop") and event.block is not None:
            self._gone(event)
        elif event.event == "restore":
            self._restore(event)
        elif event.event == "request":
            self._request(event)

    def chosen(self, *, chain: str | None = None, sort: str = "born", top: int = 0) -> Iterator[BlockRow]:
        """Rows whose own or chain's name begins with `chain`, in the order asked for; 0 means all of them."""
        rows: Iterable[BlockRow] = self.rows.values()
        if chain is not None:
            rows = [row for row in rows if row.chain.startswith(chain) or row.block.startswith(chain)]
        keys = {
            "born": lambda row: row.born or "", "used": lambda row: row.last_used or "", "hits": lambda row: -row.hits,
            "bytes": lambda row: -row.bytes, "written": lambda row: -row.written_bytes,
            "chain": lambda row: (row.chain, row.index),
        }  # fmt: skip
        ordered = sorted(rows, key=keys[sort])
        yield from ordered[:top] if top else ordered

    def _commit(self, event: Event) -> None:
        if event.block is None:
            return
        row = self._row(event)
        row.hot = event.tier == "hot"
        row.tokens, row.bytes = event.tokens or 0, event.bytes or 0
        row.request = event.request
        row.born = row.born or event.time
        row.last_used = event.time
        if event.request is not None and event.parent is not None:
            self._anchors.setdefault(event.request, event.parent)
        if event.request is not None and row.tokens == BLOCK_TOKENS:
            self._committed.setdefault(event.request, []).append(event.block)

    def _row(self, event: Event) -> BlockRow:
        name = event.block or ""
        row = self.rows.get(name)
        if row is None:
            before = self.rows.get(event.parent or "")
            row = BlockRow(name, before.chain if before else name, event.index or 0, event.tokens or 64,
                           event.bytes or 0, event.model, born=event.time, parent=event.parent)  # fmt: skip
            self.rows[name] = row
        return row

    def _gone(self, event: Event) -> None:
        row = self.rows.get(event.block or "")
        if row is not None:
            if event.tier == "hot":
                row.hot = False
            else:
                row.cold = False

    def _restore(self, event: Event) -> None:
        if event.block is None:
            return
        if event.request is not None:
            self._anchors[event.request] = event.block
        elif event.block in self.rows:
            self._used(self.rows[event.block], event.time)
        elif event.source == "oMLX":
            self._used(self._row(event), event.time)

    def _request(self, event: Event) -> None:
        self._requests += 1
        anchor = self._anchors.pop(event.request or "", None)
        digests = _outlined_blocks(event)
        outlined = self._outlined.setdefault(event.root or "", {}) if digests else {}
        for name in self._committed.pop(event.request or "", ()):
            if self.rows[name].index < len(digests):
                outlined[digests[self.rows[name].index]] = name
        whole = (event.hit_tokens or 0) // BLOCK_TOKENS
        if anchor is None and 0 < whole <= len(digests):
            anchor = outlined.get(digests[whole - 1])
        row = self.rows.get(anchor or "") if event.hit_tokens else None
        if row is not None:
            before = self._used_by.get(row.block) or self._made_by.get(row.request or "")
            if before is not None:
                self.distances[self._requests - before] += 1
            self._used_by[row.block] = self._requests
        if event.request is not None:
            self._made_by[event.request] = self._requests
        while row is not None:
            self._used(row, event.time)
            parent = self.rows.get(row.parent or "")
            row = parent if parent is not None and parent.index < row.index else None  # never round in a circle

    @staticmethod
    def _used(row: BlockRow, time: str | None) -> None:
        row.hits += 1
        row.last_used = time


class _Digests(msgspec.Struct):
    """What is read of an outline here."""

    blocks: str = ""


_decode = msgspec.json.Decoder(_Digests).decode


def _outlined_blocks(event: Event) -> list[str]:
    """The digest of each full block of a request's prompt; none without an outline."""
    if not bytes(event.outline):
        return []
    try:
        blocks = _decode(event.outline).blocks
    except msgspec.DecodeError:
        return []
    return [blocks[at : at + BLOCK_DIGITS] for at in range(0, len(blocks), BLOCK_DIGITS)]
