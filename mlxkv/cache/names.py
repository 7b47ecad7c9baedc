"""Names of blocks, chained: equal names mean equal prefixes under one root.

    name[0] = sha256(root        | count | tokens of block 0)
    name[i] = sha256(name[i - 1] | count | tokens of block i)

`count` and every token are u32, little-endian. The cold tier uses names as file names, so nothing here may depend
on the process: no `hash()`, no `str()` of a value, no order of a dict.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256

from mlxkv.core.errors import UsageError

BLOCK_TOKENS = 64
TOKEN_BYTES = 4
BLOCK_TOKEN_BYTES = BLOCK_TOKENS * TOKEN_BYTES

BlockName = bytes
"""32 bytes; a root is one too, so that it can stand where the first block's parent stands."""


def pack(tokens: Sequence[int]) -> bytes:
    """`tokens` as u32 little-endian, the form in which blocks keep and compare them.

    Raises:
        UsageError: a token is not an integer from 0 to 2**32 - 1.
    """
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise UsageError(f"token ids are whole numbers from 0 to 2**32 - 1 ({error}); check the tokenizer.") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> list[int]:
    """The inverse of `pack`."""
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def root_name(fields: Mapping[str, str]) -> BlockName:
    """Fingerprint of everything that makes two KV caches incompatible.

    Keys and values are framed by their length, so no two different mappings give one name: `{"a": "bc"}` is not
    `{"ab": "c"}`.
    """
    digest = sha256(b"mlxkv root\0")
    for key in sorted(fields):
        for part in (key.encode(), fields[key].encode()):
            digest.update(len(part).to_bytes(4, "little"))
            digest.update(part)
    return digest.digest()


def block_name(parent: BlockName, packed: bytes) -> BlockName:
    """Name of the block (or tail) of `packed` tokens whose parent is `parent`: the previous block's name, or the root.

    Cost: one SHA-256 of 36 + 4 bytes a token.
    """
    return sha256(parent + (len(packed) // TOKEN_BYTES).to_bytes(4, "little") + packed).digest()


def checkpoint_name(block: BlockName) -> BlockName:
    """Name of the checkpoint that ends with `block`: one for each block, and no block's own."""
    return sha256(b"mlxkv checkpoint\0" + block).digest()


def chain(root: BlockName, packed: bytes) -> Iterator[BlockName]:
    """Yield the name of each full block of `packed` tokens; a partial last block has none.

    >>> len(list(chain(root_name({"model": "tiny"}), pack(range(130)))))
    2
    """
    parent = root
    for start in range(0, len(packed) - BLOCK_TOKEN_BYTES + 1, BLOCK_TOKEN_BYTES):
        parent = block_name(parent, packed[start : start + BLOCK_TOKEN_BYTES])
        yield parent


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two packed sequences share.

    >>> common_tokens(pack([1, 2, 3]), pack([1, 2, 4, 5]))
    2
    """
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // TOKEN_BYTES
    difference = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    lowest_bit = (difference & -difference).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)
