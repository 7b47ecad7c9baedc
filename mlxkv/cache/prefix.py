"""From tokens to what may be reused: the longest common prefix with anything the tiers hold, to the token.

Whole blocks are found by name, and their tokens are compared: a name is never trusted alone. Then inside: attention is
causal, so the first k tokens of a block are good for any prompt that shares them, whatever follows. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mlxkv.cache.names import BLOCK_TOKEN_BYTES, BLOCK_TOKENS, TOKEN_BYTES, BlockName, chain, common_tokens

TierName = Literal["hot", "cold"]


class Held(Protocol):
    """What matching needs to know of a held block or tail."""

    @property
    def name(self) -> BlockName: ...
    @property
    def tokens(self) -> bytes: ...


class Holder(Protocol):
    """What matching needs of a tier."""

    def walk(self, names: Sequence[BlockName]) -> Iterator[Held]: ...
    def children(self, parent: BlockName) -> Iterable[Held]: ...


@dataclass(frozen=True, slots=True)
class Part:
    """`tokens` leading tokens of a held block or tail, at `index` in the chain."""

    name: BlockName
    parent: BlockName
    index: int
    packed: bytes
    tokens: int
    tier: TierName

    @property
    def is_tail(self) -> bool:
        return 0 < len(self.packed) < BLOCK_TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Match:
    """The parts that together hold the first `tokens` tokens: whole blocks, and at most one used in part, the last.

    `next_name` is the name the first block that is not whole would have, if the prompt fills it; `diverged` says that
    what is held goes on otherwise where the match ends.
    """

    parts: tuple[Part, ...]
    tokens: int
    limit: int
    next_name: BlockName | None
    diverged: bool

    def tokens_of(self, tier: TierName) -> int:
        return sum(part.tokens for part in self.parts if part.tier == tier)

    @property
    def tail_tokens(self) -> int:
        return sum(part.tokens for part in self.parts if part.is_tail)

    def first(self, count: int) -> Match:
        """The same match with only its first `count` parts."""
        parts = self.parts[:count]
        return Match(parts, sum(part.tokens for part in parts), self.limit, self.next_name, self.diverged)


def match(root: BlockName, packed: bytes, hot: Holder, cold: Holder) -> Match:
    """The longest prefix of `packed` tokens that the tiers hold, and at most all but one of them.

    One token is always left, so that there is something to compute the next one from. The hot tier is asked first;
    it is prefix-closed by itself, so what it holds is a front part of the chain.

    Cost: one hash a block, one look-up a block up to the first that is not held, and one comparison a child of the
    last. No block file is opened.
    """
    limit = max(len(packed) // TOKEN_BYTES - 1, 0)
    names = list(chain(root, packed))
    whole = names[: limit // BLOCK_TOKENS]
    parts: list[Part] = []
    _take(parts, root, packed, hot.walk(whole), "hot")
    _take(parts, root, packed, cold.walk(whole[len(parts) :]), "cold")
    last = parts[-1].name if parts else root
    here = len(parts) * BLOCK_TOKENS
    rest = packed[here * TOKEN_BYTES : limit * TOKEN_BYTES]
    best, diverged = _inside(last, len(parts), rest, hot, cold)
    if best is not None:
        parts.append(best)
        here += best.tokens
    next_index = here // BLOCK_TOKENS
    next_name = names[next_index] if next_index < len(names) else None
    return Match(tuple(parts), here, limit, next_name, diverged and here < limit)


def _take(parts: list[Part], root: BlockName, packed: bytes, held: Iterator[Held], tier: TierName) -> None:
    for block in held:
        start = len(parts) * BLOCK_TOKEN_BYTES
        if block.tokens != packed[start : start + BLOCK_TOKEN_BYTES]:
            return
        parent = parts[-1].name if parts else root
        parts.append(Part(block.name, parent, len(parts), block.tokens, BLOCK_TOKENS, tier))


def _inside(parent: BlockName, index: int, rest: bytes, hot: Holder, cold: Holder) -> tuple[Part | None, bool]:
    """The child of `parent` that shares most of `rest`, a hot one on a tie; and whether one goes on otherwise there."""
    shared = [
        (common_tokens(child.tokens, rest), child, tier)
        for tier, children in _children(parent, hot, cold)
        for child in children
    ]
    most = max((tokens for tokens, _, _ in shared), default=0)
    alike = [(child, tier) for tokens, child, tier in shared if tokens == most]
    best = Part(alike[0][0].name, parent, index, alike[0][0].tokens, most, alike[0][1]) if most else None
    return best, any(len(child.tokens) > most * TOKEN_BYTES for child, _ in alike)


def _children(parent: BlockName, hot: Holder, cold: Holder) -> Iterator[tuple[TierName, Iterable[Held]]]:
    yield "hot", hot.children(parent)
    yield "cold", cold.children(parent)
