"""Which arrays a block holds, their shapes and bytes; never a formula, always what a trace of the model found.

Arrays of equal heads, size and dtype are packed into one tensor `[n_arrays, heads, tokens, dim]`, so that a block is
a few tensors in one flat file and not one array a layer: 48 small arrays write at a fifth of the speed of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlxkv.cache.names import BLOCK_TOKENS

DTYPES = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "uint8": ("U8", 1),
}
"""MLX's name of a dtype -> its name in a safetensors header, and bytes an element."""


@dataclass(frozen=True)
class ArraySpec:
    """One array that grows by token, `[1, heads, tokens, dim]` in the model's cache.

    `path` says where it is: `12.keys`, `3.1.values` inside a CacheList, `0.keys.1` for a quantised cache's scales.
    """

    path: str
    heads: int
    dim: int
    dtype: str


@dataclass(frozen=True)
class TensorSpec:
    """Arrays packed together in a block: `[len(paths), heads, tokens, dim]`."""

    name: str
    paths: tuple[str, ...]
    heads: int
    dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head of one array."""
        return self.dim * DTYPES[self.dtype][1]

    def shape(self, tokens: int = BLOCK_TOKENS) -> tuple[int, int, int, int]:
        return (len(self.paths), self.heads, tokens, self.dim)

    def nbytes(self, tokens: int = BLOCK_TOKENS) -> int:
        return len(self.paths) * self.heads * tokens * self.row_bytes


@dataclass(frozen=True)
class Layout:
    """The arrays of one model's block, in the order of its cache."""

    arrays: tuple[ArraySpec, ...]

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The packed tensors, in order of first appearance. Arrays of no bytes are left out."""
        groups: dict[tuple[int, int, str], list[str]] = {}
        for array in self.arrays:
            if array.heads * array.dim:
                groups.setdefault((array.heads, array.dim, array.dtype), []).append(array.path)
        return tuple(
            TensorSpec(f"kv{i}", tuple(paths), heads, dim, dtype)
            for i, ((heads, dim, dtype), paths) in enumerate(groups.items())
        )

    @cached_property
    def bytes_per_token(self) -> int:
        return sum(tensor.nbytes(1) for tensor in self.tensors)

    @cached_property
    def block_bytes(self) -> int:
        """Payload bytes of a full block."""
        return self.bytes_per_token * BLOCK_TOKENS

    def to_json(self) -> str:
        """A canonical text: equal layouts give equal texts. It is part of the root."""
        return json.dumps([[a.path, a.heads, a.dim, a.dtype] for a in self.arrays], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        rows: Iterable[Any] = json.loads(text)
        return cls(tuple(ArraySpec(path, heads, dim, dtype) for path, heads, dim, dtype in rows))
