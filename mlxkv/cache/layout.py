"""Which arrays a block or a checkpoint holds, their shapes and bytes; never a formula, always what a trace found.

Arrays of equal heads, size and dtype are packed into one tensor `[n_arrays, heads, tokens, dim]`, so that a block is
a few tensors in one flat file and not one array a layer: 48 small arrays write at a fifth of the speed of one.
"""

from __future__ import annotations

import json
import math
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
    "int32": ("I32", 4),
    "int64": ("I64", 8),
}
"""MLX's name of a dtype -> its name in a safetensors header, and bytes an element."""


@dataclass(frozen=True)
class ArraySpec:
    """One array that grows by token, `[1, heads, tokens, dim]` in the model's cache.

    `path` says where it is: `12.keys`, `3.1.values` inside a CacheList, `0.keys.1` for a quantised cache's scales.
    `window` is how many tokens the layer looks back, 0 for all of them.
    """

    path: str
    heads: int
    dim: int
    dtype: str
    window: int = 0


@dataclass(frozen=True)
class StateSpec:
    """One array of fixed size that a layer carries from token to token; it cannot be cut, only checkpointed."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its name, safetensors dtype, shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


Table = tuple[Stored, ...]
"""The tensors of a file, in payload order."""


@dataclass(frozen=True)
class TensorSpec:
    """Arrays packed together in a block: `[len(paths), heads, tokens, dim]`."""

    name: str
    paths: tuple[str, ...]
    heads: int
    dim: int
    dtype: str
    window: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head of one array."""
        return self.dim * DTYPES[self.dtype][1]

    def shape(self, tokens: int = BLOCK_TOKENS) -> tuple[int, int, int, int]:
        return (len(self.paths), self.heads, tokens, self.dim)

    def nbytes(self, tokens: int = BLOCK_TOKENS) -> int:
        return len(self.paths) * self.heads * tokens * self.row_bytes


ARRAY_STEP = 256
"""Rows that mlx-lm's growing arrays take at a time: `KVCache.step`."""


@dataclass(frozen=True)
class Layout:
    """The arrays of one model's block and of its checkpoint, in the order of its cache."""

    arrays: tuple[ArraySpec, ...]
    states: tuple[StateSpec, ...] = ()

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The packed tensors, in order of first appearance. Arrays of no bytes are left out."""
        groups: dict[tuple[int, int, str, int], list[str]] = {}
        for array in self.arrays:
            if array.heads * array.dim:
                groups.setdefault((array.heads, array.dim, array.dtype, array.window), []).append(array.path)
        return tuple(
            TensorSpec(f"kv{i}", tuple(paths), heads, dim, dtype, window)
            for i, ((heads, dim, dtype, window), paths) in enumerate(groups.items())
        )

    @cached_property
    def bytes_per_token(self) -> int:
        return sum(tensor.nbytes(1) for tensor in self.tensors)

    @cached_property
    def block_bytes(self) -> int:
        """Payload bytes of a full block."""
        return self.bytes_per_token * BLOCK_TOKENS

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of the state of one sequence; 0 for a model whose every layer can be cut by token."""
        return sum(state.nbytes for state in self.states)

    def rows_bytes(self, start: int, stop: int, held: int) -> int:
        """Bytes of the rows [start, stop) that a restore of `held` tokens moves: of a window layer its last window."""
        return sum(t.nbytes(1) * max(stop - max(start, held - t.window if t.window else 0), 0) for t in self.tensors)

    def restored_bytes(self, tokens: int) -> int:
        """Bytes that restoring `tokens` tokens moves, the states included."""
        return self.rows_bytes(0, tokens, tokens) + self.checkpoint_bytes if tokens else 0

    def live_bytes(self, tokens: int, chunk_tokens: int) -> int:
        """Most bytes that the arrays of a live sequence take until it has `tokens` tokens.

        mlx-lm's arrays grow by 256 rows (`KVCache.step`). A window layer holds its window and the chunk that is being
        prefilled; so does its record, for the block that is being filled instead of a window.
        """
        rows = tokens + ARRAY_STEP
        total = self.checkpoint_bytes
        for tensor in self.tensors:
            held = rows
            if tensor.window:
                record = min(BLOCK_TOKENS + chunk_tokens, rows)
                held = min(tensor.window + chunk_tokens + ARRAY_STEP, rows) + record
            total += tensor.nbytes(1) * held
        return total

    @property
    def windows(self) -> tuple[int, ...]:
        """The different windows, ascending."""
        return tuple(sorted({tensor.window for tensor in self.tensors if tensor.window}))

    @cached_property
    def block_table(self) -> Table:
        """The tensors of a block's file."""
        return tuple(Stored(t.name, DTYPES[t.dtype][0], t.shape(), t.nbytes()) for t in self.tensors)

    @cached_property
    def checkpoint_table(self) -> Table:
        """The tensors of a checkpoint's file, named by their place in the cache."""
        return tuple(Stored(s.path, DTYPES[s.dtype][0], s.shape, s.nbytes) for s in self.states)

    def to_json(self) -> str:
        """A canonical text: equal layouts give equal texts. It is part of the root."""
        arrays = [[a.path, a.heads, a.dim, a.dtype, a.window] for a in self.arrays]
        states = [[s.path, list(s.shape), s.dtype] for s in self.states]
        return json.dumps({"arrays": arrays, "states": states}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        found: dict[str, Any] = json.loads(text)
        return cls(
            tuple(ArraySpec(*row) for row in found["arrays"]),
            tuple(StateSpec(path, tuple(shape), dtype) for path, shape, dtype in found["states"]),
        )
