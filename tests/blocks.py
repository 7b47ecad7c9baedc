"""Blocks without a model: identities from token lists, payloads of bytes, and layouts as small as a test likes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from mlxkv.cache.codec import BlockIdentity
from mlxkv.cache.layout import ArraySpec, Layout
from mlxkv.cache.names import BLOCK_TOKEN_BYTES, BLOCK_TOKENS, BlockName, block_name, pack, root_name

ROOT = root_name({"model": "tiny"})
OTHER_ROOT = root_name({"model": "another"})

SMALL = Layout((ArraySpec("0.keys", 1, 1, "uint8"), ArraySpec("0.values", 1, 2, "uint8")))
"""Two tensors, 192 bytes a block: a whole file is under 1 KiB."""


def block_layout(block_bytes: int) -> Layout:
    """A layout of one tensor whose payload has `block_bytes` bytes, a multiple of 64."""
    return Layout((ArraySpec("0.keys", 1, block_bytes // BLOCK_TOKENS, "uint8"),))


def blocks_of(tokens: Sequence[int], root: BlockName = ROOT) -> list[BlockIdentity]:
    """The full blocks of a token list, in order, and its tail when it has one."""
    packed, parent, found = pack(tokens), root, []
    for index, start in enumerate(range(0, len(packed), BLOCK_TOKEN_BYTES)):
        part = packed[start : start + BLOCK_TOKEN_BYTES]
        found.append(BlockIdentity(root, block_name(parent, part), parent, index, part))
        parent = found[-1].name
    return found


def random_blocks(count: int, seed: int, root: BlockName = ROOT) -> list[BlockIdentity]:
    """A chain of `count` full blocks that no other seed shares."""
    source = random.Random(seed)
    return blocks_of([source.randrange(2**32) for _ in range(count * BLOCK_TOKENS)], root)


def payload_of(block: BlockIdentity, layout: Layout) -> list[np.ndarray]:
    """One array a tensor of the layout, its bytes drawn from the block's name."""
    source = random.Random(block.name)
    return [np.frombuffer(source.randbytes(t.nbytes()), np.uint8) for t in layout.tensors]


def views_of(payload: Sequence[np.ndarray]) -> list[memoryview]:
    return [memoryview(array).cast("B") for array in payload]


def empty_payload(layout: Layout) -> list[np.ndarray]:
    """Arrays to read a block into."""
    return [np.zeros(t.nbytes(), np.uint8) for t in layout.tensors]
