"""What a tier holds, without the data: sizes, who continues whom, order of use, pins.

Only leaves may go: a block with children in the tier stays, so what is held is prefix-closed after any sequence of
operations. Using a block uses its ancestors too. That is kept lazily: when a leaf goes, its parent is at least as
recently used as the leaf was, so a touch or a pin of the deepest block is enough and costs O(1), not O(chain).
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from mlxkv.cache.names import BlockName


@dataclass(slots=True)
class Entry:
    """One held block or tail. `tokens` is packed; `used` counts up with every use in the tier.

    `used_at` is the time of that use for people, in seconds since 1970; nothing is decided by it.
    """

    name: BlockName
    parent: BlockName
    tokens: bytes
    nbytes: int
    used: int
    used_at: float
    hits: int = 0
    pins: int = 0
    children: set[BlockName] = field(default_factory=set)


class Ledger:
    """Owner: the tier that holds it; never shared between threads.

    Invariants (`check_integrity`): `used_bytes` is the sum of the entries; every parent that is not a root is held;
    children and parents agree; no pin count is below zero.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._entries: dict[BlockName, Entry] = {}
        self._first_blocks: dict[BlockName, set[BlockName]] = {}  # root -> children
        self._forgotten_pins: Counter[BlockName] = Counter()  # of withdrawn blocks; their `unpin` is to come
        self._clock = 0
        self._leaves: list[tuple[int, BlockName]] = []  # heap; a row is stale unless it still says the entry's `used`

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, name: BlockName) -> Entry | None:
        return self._entries.get(name)

    def children(self, parent: BlockName) -> list[Entry]:
        """What is held that continues `parent` (a name or a root)."""
        entry = self._entries.get(parent)
        names = entry.children if entry else self._first_blocks.get(parent, ())
        return [self._entries[name] for name in names]

    def add(self, name: BlockName, parent: BlockName, tokens: bytes, nbytes: int, *, first: bool) -> None:
        """Record a block; `first` says that `parent` is a root. Raises KeyError when the parent is not held."""
        if name in self._entries:
            raise ValueError(f"block {name.hex()[:12]} is already in the ledger")
        siblings = self._first_blocks.setdefault(parent, set()) if first else self._entries[parent].children
        self._clock += 1
        self._entries[name] = Entry(name, parent, tokens, nbytes, self._clock, time.time())
        siblings.add(name)
        self.used_bytes += nbytes
        heapq.heappush(self._leaves, (self._clock, name))

    def remove(self, name: BlockName) -> Entry:
        """Forget a leaf. Raises ValueError for a block that has children or pins: nothing may point at nothing."""
        entry = self._entries[name]
        if entry.children or entry.pins:
            raise ValueError(f"block {name.hex()[:12]} has {len(entry.children)} children and {entry.pins} pins")
        del self._entries[name]
        self.used_bytes -= entry.nbytes
        parent = self._entries.get(entry.parent)
        if parent is None:
            siblings = self._first_blocks[entry.parent]
            siblings.discard(name)
            if not siblings:
                del self._first_blocks[entry.parent]
        else:
            parent.children.discard(name)
            parent.used = max(parent.used, entry.used)
            parent.used_at = max(parent.used_at, entry.used_at)
            self._offer(parent)
        return entry

    def withdraw(self, name: BlockName) -> list[Entry]:
        """Forget a block that must not be used again, with all that continues it, pinned or not; deepest first.

        Returns what was forgotten, nothing when it is not held. Later `unpin`s of it do nothing.
        """
        chain = [self._entries[name]] if name in self._entries else []
        for entry in chain:
            chain += (self._entries[child] for child in entry.children)
        for entry in reversed(chain):
            if entry.pins:
                self._forgotten_pins[entry.name] += entry.pins
                entry.pins = 0
            self.remove(entry.name)
        return chain[::-1]

    def touch(self, name: BlockName) -> None:
        """Mark a block, and with it its ancestors, as just used."""
        entry = self._entries[name]
        self._clock += 1
        entry.used = self._clock
        entry.used_at = time.time()
        self._offer(entry)

    def pin(self, name: BlockName) -> None:
        """Keep a block, and with it its ancestors, until `unpin`."""
        self._entries[name].pins += 1

    def unpin(self, name: BlockName) -> None:
        if self._forgotten_pins[name]:
            self._forgotten_pins.subtract([name])
            return
        entry = self._entries[name]
        if entry.pins == 0:
            raise ValueError(f"block {name.hex()[:12]} is not pinned")
        entry.pins -= 1
        self._offer(entry)

    def victim(self, keep: BlockName | None = None) -> Entry | None:
        """The least recently used leaf without pins, other than `keep`; None when there is none."""
        kept: tuple[int, BlockName] | None = None
        found: Entry | None = None
        while self._leaves:
            used, name = self._leaves[0]
            entry = self._entries.get(name)
            if entry is None or entry.used != used or entry.children or entry.pins:
                heapq.heappop(self._leaves)  # stale, or offered again when its last pin or child goes
            elif name == keep:
                kept = heapq.heappop(self._leaves)
            else:
                found = entry
                break
        if kept:
            heapq.heappush(self._leaves, kept)
        return found

    def pins(self) -> int:
        return sum(entry.pins for entry in self._entries.values()) + self._forgotten_pins.total()

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant of the class does not hold. Cost: O(entries)."""
        total = 0
        for name, entry in self._entries.items():
            total += entry.nbytes
            parent = self._entries.get(entry.parent)
            siblings = parent.children if parent else self._first_blocks.get(entry.parent, set())
            assert name in siblings, f"{name.hex()[:12]} is unknown to its parent"
            assert entry.pins >= 0, f"{name.hex()[:12]} has {entry.pins} pins"
            assert entry.children <= self._entries.keys(), f"{name.hex()[:12]} has children that are gone"
        assert total == self.used_bytes, f"entries hold {total} B, the ledger says {self.used_bytes} B"
        for root, names in self._first_blocks.items():
            assert root not in self._entries, f"{root.hex()[:12]} is a root and a block"
            assert names, f"root {root.hex()[:12]} has no blocks"
            assert names <= self._entries.keys(), f"root {root.hex()[:12]} lists blocks that are gone"

    def _offer(self, entry: Entry) -> None:
        if not entry.children and not entry.pins:
            heapq.heappush(self._leaves, (entry.used, entry.name))
        if len(self._leaves) > 4 * len(self._entries) + 64:
            self._leaves = [(e.used, e.name) for e in self._entries.values() if not e.children and not e.pins]
            heapq.heapify(self._leaves)
