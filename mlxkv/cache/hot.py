"""The hot tier: blocks and tails as evaluated MLX arrays in unified memory, within a budget of exact bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from mlxkv.cache.ledger import Entry, Ledger
from mlxkv.cache.names import BlockName


class Array(Protocol):
    """All that this tier needs to know of an array."""

    @property
    def nbytes(self) -> int: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...


Payload = tuple[Array, ...]
"""One packed tensor per entry of `Layout.tensors`, `[n_arrays, heads, tokens, dim]`, evaluated and contiguous."""


class HotTier:
    """Owner: the thread that owns MLX. `used_bytes <= budget_bytes` at every instant; always prefix-closed by itself.

    Payloads are never changed after `put`: a restore copies out of them.
    """

    name = "hot"

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.evicted_blocks = 0
        self._ledger = Ledger()
        self._payloads: dict[BlockName, Payload] = {}

    @property
    def used_bytes(self) -> int:
        return self._ledger.used_bytes

    def __len__(self) -> int:
        return len(self._ledger)

    def __contains__(self, name: object) -> bool:
        return name in self._ledger

    def get(self, name: BlockName) -> Entry | None:
        return self._ledger.get(name)

    def walk(self, names: Sequence[BlockName]) -> Iterator[Entry]:
        """The held blocks of a chain in order, up to the first that is not held."""
        for name in names:
            entry = self._ledger.get(name)
            if entry is None:
                return
            yield entry

    def children(self, parent: BlockName) -> list[Entry]:
        return self._ledger.children(parent)

    def entries(self) -> Iterator[Entry]:
        return iter(self._ledger)

    def payload(self, name: BlockName) -> Payload:
        return self._payloads[name]

    def put(
        self, name: BlockName, parent: BlockName, tokens: bytes, payload: Payload, *, first: bool
    ) -> tuple[bool, list[Entry]]:
        """Hold a block; returns whether it is held and what had to go for it.

        It is not held when its parent is not (there would be a hole) or when what is left cannot go.
        """
        if name in self._ledger:
            self._ledger.touch(name)
            return True, []
        if not first and parent not in self._ledger:
            return False, []
        nbytes = sum(array.nbytes for array in payload)
        held, gone = self._make_room(nbytes, keep=parent)
        if held:
            self._ledger.add(name, parent, tokens, nbytes, first=first)
            self._payloads[name] = payload
        return held, gone

    def remove(self, name: BlockName) -> None:
        """Forget one leaf, such as a tail that a longer one replaces."""
        self._ledger.remove(name)
        del self._payloads[name]

    def withdraw(self, name: BlockName) -> list[Entry]:
        """Forget a block that must not be used again, and all that continues it; as `Ledger.withdraw`."""
        gone = self._ledger.withdraw(name)
        for entry in gone:
            del self._payloads[entry.name]
        return gone

    def evict(self, keep: BlockName | None = None) -> Entry | None:
        """Drop the least recently used leaf, other than `keep`; None when nothing may go."""
        entry = self._ledger.victim(keep)
        if entry is not None:
            self.remove(entry.name)
            self.evicted_blocks += 1
        return entry

    def hit(self, names: list[BlockName]) -> None:
        """Count a hit for each of `names` (a prefix, in order) and mark it as used."""
        for name in names:
            entry = self._ledger.get(name)
            if entry is not None:
                entry.hits += 1
        if names:
            self._ledger.touch(names[-1])

    def pin(self, name: BlockName) -> None:
        self._ledger.pin(name)

    def unpin(self, name: BlockName) -> None:
        self._ledger.unpin(name)

    def pins(self) -> int:
        return self._ledger.pins()

    def check_integrity(self) -> None:
        """Raise AssertionError when ledger, payloads and budget disagree."""
        self._ledger.check_integrity()
        assert self._payloads.keys() == {entry.name for entry in self._ledger}, "payloads and ledger differ"
        held = sum(array.nbytes for payload in self._payloads.values() for array in payload)
        assert held == self.used_bytes, f"payloads hold {held} B, the ledger says {self.used_bytes} B"
        assert held <= self.budget_bytes, f"hot tier holds {held} B of a budget of {self.budget_bytes} B"

    def _make_room(self, nbytes: int, keep: BlockName) -> tuple[bool, list[Entry]]:
        gone: list[Entry] = []
        while self.used_bytes + nbytes > self.budget_bytes:
            entry = self.evict(keep) if nbytes <= self.budget_bytes else None
            if entry is None:
                return False, gone
            gone.append(entry)
        return True, gone
