"""How long a prefill chunk may be, by where it begins: long ones while the prompt is short, shorter ones deep in it.

What a chunk costs for a while, in memory and in time of one command, grows with the tokens before it. The lengths
depend on the model, the machine and the settings, never on the prompt: whoever computes a prefix cuts it at the same
places, and a restored run goes on in the steps of a fresh one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from mlxkv.budget.memory import largest
from mlxkv.cache.names import BLOCK_TOKENS
from mlxkv.models.loader import on_cpu

CPU_CHUNK_TOKENS = 256
GPU_CHUNK_TOKENS = 2048
"""A CPU prefills small chunks faster (scores of a chunk stay in its caches); a GPU wants large ones."""
LEAST_CHUNK_TOKENS = BLOCK_TOKENS
"""The shortest chunk."""
MOST_PAIRS = GPU_CHUNK_TOKENS * 65_536
"""Queries x keys of one chunk on a GPU, beyond which macOS may end it for taking too long.

Sources: ml-explore/mlx-lm pull request 1087 (M2 Ultra: 2,048 at 65,536 and 1,024 at 131,072 run, 2,048 at 131,072 is
killed), jundot/omlx#1387 (M2 and M3: 2,048 is killed past 90,000 to 130,000). Not tried here, where there is no GPU.
"""
MOST_TOKENS = 2**27


@dataclass(frozen=True)
class Chunks:
    """`steps` are (first position, length), ascending: a chunk that begins there or later has that length.

    Each position is a multiple of the length before it, and each length divides the one before.
    """

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tokens: int) -> Chunks:
        """The same length everywhere."""
        return cls(((0, tokens),))

    @property
    def longest(self) -> int:
        return self.steps[0][1]

    def at(self, position: int) -> int:
        """The length of the chunk that `position` lies in."""
        return self.steps[bisect_right(self.steps, position, key=lambda step: step[0]) - 1][1]

    def end(self, position: int) -> int:
        """Where the chunk ends that `position` lies in: an absolute multiple of its length."""
        length = self.at(position)
        return (position // length + 1) * length

    def peaks(self, tokens: int) -> list[tuple[int, int]]:
        """(length, its last end) of each length that a prompt of `tokens` tokens comes to."""
        ends = [*(first for first, _ in self.steps[1:]), tokens]
        return [
            (length, min(end, tokens)) for (first, length), end in zip(self.steps, ends, strict=True) if first < tokens
        ]

    def __str__(self) -> str:
        first, *others = [f"{length:,} tokens" + (f" from {at:,}" if at else "") for at, length in self.steps]
        return ", ".join([first, *others])


def plan_chunks(fits: Callable[[int, int], bool], longest: int) -> Chunks:
    """The longest chunks that fit: `longest`, halved wherever it no longer does, down to 64 tokens.

    Args:
        fits: whether a chunk of (length, that ends at so many tokens) may be computed; no longer, once it did not.

    The shortest is used where nothing fits: a prompt that was admitted has to be computed somehow.
    """
    steps: list[tuple[int, int]] = []
    length, at = longest, 0
    while length % 2 == 0 and length // 2 >= LEAST_CHUNK_TOKENS:
        end = _last_end(fits, length)
        if end > at:
            steps.append((at, length))
            at = end
        if end >= MOST_TOKENS - length:
            return Chunks(tuple(steps))
        length //= 2
    return Chunks((*steps, (at, length)))


def _last_end(fits: Callable[[int, int], bool], length: int) -> int:
    return length * largest(lambda count: fits(length, count * length), MOST_TOKENS // length)


def in_time(length: int, end: int) -> bool:
    """Whether a GPU computes the chunk before macOS ends it."""
    return length * end <= MOST_PAIRS


def default_chunks() -> Chunks:
    """What is known without a model: a CPU's length, or a GPU's as its time allows."""
    return Chunks.of(CPU_CHUNK_TOKENS) if on_cpu() else plan_chunks(in_time, GPU_CHUNK_TOKENS)
