"""mlx-lm's prompt caches as blocks, and back; the only file that knows mlx-lm's cache classes.

`KVCache`, `QuantizedKVCache` and a `CacheList` of those can be cut by token: their arrays are `[1, heads, T, dim]` and
only the first `offset` tokens count. A model with any other kind runs uncached.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxkv.cache.layout import DTYPES, ArraySpec, Layout
from mlxkv.cache.names import BLOCK_TOKENS
from mlxkv.core.errors import ModelError, UsageError
from mlxkv.core.platform import keep_open_files_limit
from mlxkv.models.trace import trace_caches

with keep_open_files_limit():
    from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

STEP_TOKENS = KVCache.step
CUT_BY_TOKEN = {"KVCache", "QuantizedKVCache"}
PromptCache = list[Any]
"""What mlx-lm calls a prompt cache: one cache object a layer (some models have more or fewer than layers)."""

Payload = tuple[mx.array, ...]


class UncachedModelError(ModelError):
    """The model's cache has layers that cannot be cut by token."""


def leaves(prompt_cache: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every cache that holds arrays, with its path: `3`, or `3.1` inside a CacheList."""
    for i, cache in enumerate(prompt_cache):
        if type(cache) is CacheList:
            for path, leaf in leaves(cache.caches):
                yield f"{i}.{path}", leaf
        else:
            yield str(i), cache


def arrays_of(path: str, leaf: Any) -> list[tuple[str, mx.array]]:
    """The arrays of one leaf by path; none when nothing was ever put into it."""
    if leaf.keys is None:
        return []
    if type(leaf) is QuantizedKVCache:
        return [(f"{path}.{side}.{i}", a) for side in ("keys", "values") for i, a in enumerate(getattr(leaf, side))]
    return [(f"{path}.keys", leaf.keys), (f"{path}.values", leaf.values)]


def plain_prompt_cache(module: nn.Module) -> PromptCache:
    """What mlx-lm itself would use for this model."""
    made: PromptCache = make_prompt_cache(module)
    return made


class Adapter:
    """Cuts blocks out of one model's prompt caches and builds prompt caches from blocks.

    Owner: the thread that owns MLX. `layout` comes from a forward pass over 64 tokens that is never evaluated.
    """

    def __init__(self, module: nn.Module, *, kv_bits: int | None = None, kv_group: int = 64) -> None:
        """Trace the model's cache.

        Raises:
            UncachedModelError: a layer's cache cannot be cut by token; names the class.
            UsageError: `kv_bits` was asked for and mlx-lm cannot quantise this cache.
        """
        self._module = module
        self._kv_bits = kv_bits
        self._kv_group = kv_group
        try:
            traced = trace_caches(module, self.new_prompt_cache(), BLOCK_TOKENS)
        except ModelError as error:
            if kv_bits is None:
                raise
            raise UsageError(f"mlx-lm cannot quantise this model's KV cache ({error}); leave KV bits out.") from error
        others = sorted({cache.class_name for cache in traced} - CUT_BY_TOKEN)
        if others:
            raise UncachedModelError(
                f"this model's cache has {', '.join(others)}, which cannot be cut into blocks: it runs uncached."
            )
        self._live = {cache.path for cache in traced if cache.arrays}
        self.layout = Layout(
            tuple(
                ArraySpec(f"{cache.path}.{array.path}", array.shape[1], array.shape[3], array.dtype)
                for cache in traced
                for array in cache.arrays
            )
        )

    def new_prompt_cache(self) -> PromptCache:
        """An empty prompt cache, as mlx-lm makes it, quantised if asked for."""
        made = plain_prompt_cache(self._module)
        return made if self._kv_bits is None else [self._quantized(cache) for cache in made]

    def offset(self, prompt_cache: PromptCache) -> int:
        """How many tokens `prompt_cache` holds.

        Raises:
            ModelError: its layers disagree, so it cannot be trusted.
        """
        offsets = {leaf.offset for path, leaf in leaves(prompt_cache) if path in self._live}
        if len(offsets) > 1:
            raise ModelError(
                f"the layers of this prompt cache are at different tokens ({sorted(offsets)}); start a new one."
            )
        return int(offsets.pop()) if offsets else 0

    def cut(self, prompt_cache: PromptCache, spans: Sequence[tuple[int, int]]) -> list[Payload]:
        """Copy tokens [start, stop) of each span out of a prompt cache, evaluated: one payload a span.

        Cost: one copy of the spans' bytes; `prompt_cache` is not changed and its buffers stay its own.
        """
        found = dict(pair for path, leaf in leaves(prompt_cache) for pair in arrays_of(path, leaf))
        payloads = [
            tuple(mx.stack([found[path][0, :, start:stop] for path in t.paths]) for t in self.layout.tensors)
            for start, stop in spans
        ]
        mx.eval(payloads)
        return payloads

    def target(self, capacity_tokens: int) -> Target:
        """Room for a sequence of `capacity_tokens`, to be filled from blocks."""
        return Target(self.layout, -(-capacity_tokens // STEP_TOKENS) * STEP_TOKENS)

    def build(self, target: Target, tokens: int) -> PromptCache:
        """The prompt cache whose first `tokens` tokens are what `target` was filled with. The target is used up."""
        arrays = target.arrays()
        made = self.new_prompt_cache()
        for path, leaf in leaves(made):
            if path not in self._live:
                continue
            leaf.offset = tokens
            if type(leaf) is QuantizedKVCache:
                leaf.keys = tuple(arrays[f"{path}.keys.{i}"] for i in range(3))
                leaf.values = tuple(arrays[f"{path}.values.{i}"] for i in range(3))
            else:
                leaf.keys, leaf.values = arrays[f"{path}.keys"], arrays[f"{path}.values"]
        return made

    def _quantized(self, cache: Any) -> Any:
        if type(cache) is not KVCache:
            raise UsageError(f"mlx-lm cannot quantise a {type(cache).__name__}; leave --kv-bits out for this model.")
        return cache.to_quantized(group_size=self._kv_group, bits=self._kv_bits)


class Target:
    """The arrays of a sequence being restored, `[1, heads, capacity, dim]` each, and where a block goes in them.

    Hot payloads are copied in, cold files are read straight in; the bytes move once. Owner: the thread that owns MLX;
    readers get views of disjoint places.
    """

    def __init__(self, layout: Layout, capacity_tokens: int) -> None:
        self._layout = layout
        self._capacity = capacity_tokens
        self._arrays = _new_arrays(layout, capacity_tokens)
        self._rows = [[row for path in t.paths for row in _rows(self._arrays[path])] for t in layout.tensors]

    def put(self, index: int, payload: Payload, tokens: int) -> int:
        """Copy the first `tokens` tokens of a block to its place; returns the bytes copied."""
        copied = 0
        for tensor, packed, rows in zip(self._layout.tensors, payload, self._rows, strict=True):
            source = memoryview(packed).cast("B")
            step = len(source) // len(rows)
            start, size = index * BLOCK_TOKENS * tensor.row_bytes, tokens * tensor.row_bytes
            for i, row in enumerate(rows):
                row[start : start + size] = source[i * step : i * step + size]
            copied += size * len(rows)
        return copied

    def views(self, index: int) -> list[memoryview]:
        """Writable bytes of a block's place, in payload order: every array, every head."""
        found: list[memoryview] = []
        for tensor, rows in zip(self._layout.tensors, self._rows, strict=True):
            size = BLOCK_TOKENS * tensor.row_bytes
            found += [row[index * size : (index + 1) * size] for row in rows]
        return found

    def copy_of(self, tokens: int) -> Target:
        """A target of its own with the same first `tokens` tokens: what is used when a reader may still write here."""
        copy = Target(self._layout, self._capacity)
        for tensor, mine, theirs in zip(self._layout.tensors, self._rows, copy._rows, strict=True):
            size = tokens * tensor.row_bytes
            for source, row in zip(mine, theirs, strict=True):
                row[:size] = source[:size]
        return copy

    def arrays(self) -> dict[str, mx.array]:
        """The arrays, given away: nothing keeps a view, so the first append does not copy."""
        arrays, self._arrays, self._rows = self._arrays, {}, []
        return arrays


def _new_arrays(layout: Layout, tokens: int) -> dict[str, mx.array]:
    """Evaluated arrays `[1, heads, tokens, dim]` of the layout, whose content may be anything.

    A GPU fills them with zeros in no time. A CPU would spend a third of a restore on it, and the only call of MLX that
    gets memory without filling it is `load`: it leaves that to the file.
    """
    if mx.default_device() != mx.cpu:
        arrays = {
            spec.path: mx.zeros((1, spec.heads, tokens, spec.dim), getattr(mx, spec.dtype)) for spec in layout.arrays
        }
    else:
        arrays = mx.load(_NothingToRead(layout, tokens), format="safetensors", stream=mx.cpu)
    mx.eval(list(arrays.values()))
    return arrays


class _NothingToRead(io.RawIOBase):
    """A safetensors file whose header promises the arrays of a layout and whose payload is never read into memory."""

    def __init__(self, layout: Layout, tokens: int) -> None:
        super().__init__()
        table, size = {}, 0
        for spec in layout.arrays:
            name, width = DTYPES[spec.dtype]
            shape, start = [1, spec.heads, tokens, spec.dim], size
            size += math.prod(shape) * width
            table[spec.path] = {"dtype": name, "shape": shape, "data_offsets": [start, size]}
        text = json.dumps(table).encode()
        self._header = len(text).to_bytes(8, "little") + text
        self._size = len(self._header) + size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, memory: Any, /) -> int:
        """Fill in what belongs to the header and leave the rest of `memory` as it is."""
        part = self._header[self._at : self._at + len(memory)]
        memory[: len(part)] = part
        self._at += len(memory)
        return len(memory)


def _rows(array: mx.array) -> list[memoryview]:
    """The bytes of each head of `[1, heads, tokens, dim]`, writable."""
    flat = memoryview(array).cast("B")
    size = len(flat) // array.shape[1]
    return [flat[i : i + size] for i in range(0, len(flat), size)]
