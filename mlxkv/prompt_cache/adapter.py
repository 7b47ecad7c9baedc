"""mlx-lm's prompt caches as blocks and checkpoints, and back; the only file that knows mlx-lm's cache classes.

Three kinds. *Full* (`KVCache`, `QuantizedKVCache`): arrays `[1, heads, T, dim]`, cut by token, all of them restored.
*Window* (`RotatingKVCache`, `ChunkedKVCache`): cut by token as they are computed, only the last window restored.
*State* (`ArraysCache`): cannot be cut; copied whole at block boundaries as a checkpoint. A `CacheList` holds any of
them. A model with any other kind runs uncached.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlxkv.cache.layout import DTYPES, ArraySpec, Layout, StateSpec, TensorSpec
from mlxkv.cache.names import BLOCK_TOKENS
from mlxkv.core.errors import ModelError, UsageError
from mlxkv.core.platform import keep_open_files_limit
from mlxkv.prompt_cache.windows import RECORDED, recorded
from mlxkv.sizing.trace import TracedCache, check_quantizable, trace_caches

with keep_open_files_limit():
    from mlx_lm.models.cache import (
        ArraysCache,
        CacheList,
        ChunkedKVCache,
        KVCache,
        QuantizedKVCache,
        RotatingKVCache,
        make_prompt_cache,
    )

STEP_TOKENS = KVCache.step
KNOWN = {"KVCache", "QuantizedKVCache", "RotatingKVCache", "ChunkedKVCache", "ArraysCache"}
PromptCache = list[Any]
"""What mlx-lm calls a prompt cache: one cache object a layer (some models have more or fewer than layers)."""

Payload = tuple[mx.array, ...]


class UncachedModelError(ModelError):
    """The model's cache has layers of a kind that is neither cut nor checkpointed."""


def leaves(prompt_cache: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every cache that holds arrays, with its path: `3`, or `3.1` inside a CacheList."""
    for i, cache in enumerate(prompt_cache):
        if type(cache) is CacheList:
            for path, leaf in leaves(cache.caches):
                yield f"{i}.{path}", leaf
        else:
            yield str(i), cache


def held_bytes(prompt_cache: PromptCache) -> int:
    """Bytes of the arrays that a prompt cache holds, reserve and records included, of one sequence or of a batch."""
    total = 0
    for _, leaf in leaves(prompt_cache):
        if isinstance(leaf, QuantizedKVCache) and leaf.keys is None:
            continue  # its own count fails on it
        total += int(leaf.nbytes)
        if isinstance(leaf, RECORDED):
            total += leaf.record.nbytes
    return total


def plain_prompt_cache(module: nn.Module) -> PromptCache:
    """What mlx-lm itself would use for this model."""
    made: PromptCache = make_prompt_cache(module)
    return made


class Source(Protocol):
    """One sequence's caches, as blocks are cut out of them: a prompt cache of its own, or a row of a batch."""

    def tokens(self) -> int | None:
        """How many tokens are held; None when only states are, which do not say."""

    def rows(self, path: str, start: int, stop: int) -> mx.array:
        """Rows [start, stop) of an array by its path in the layout, `[heads, n, dim]`."""

    def state(self, path: str) -> mx.array:
        """A state's array by its path in the layout, batch axis 1."""

    def can_cut(self, start: int) -> bool:
        """Whether the rows from `start` on are still there in every window layer."""

    def forget(self, before: int) -> None:
        """Let the window layers drop their record of tokens below `before`: they were cut."""


class PromptSource:
    """A prompt cache of mlx-lm's, batch 1."""

    def __init__(self, held: dict[str, Any], by_token: Sequence[str]) -> None:
        self._held = held
        self._by_token = by_token

    def tokens(self) -> int | None:
        """As `Source.tokens`.

        Raises:
            ModelError: the layers disagree, so the cache cannot be trusted.
        """
        offsets = {int(self._held[path].offset) for path in self._by_token}
        if len(offsets) > 1:
            raise ModelError(
                f"the layers of this prompt cache are at different tokens ({sorted(offsets)}); start a new one."
            )
        return offsets.pop() if offsets else None

    def rows(self, path: str, start: int, stop: int) -> mx.array:
        leaf_path, side, part = split_path(path)
        leaf = self._held[leaf_path]
        if isinstance(leaf, RECORDED):
            return leaf.record.rows(side, start, stop)
        array = leaf.keys if side == "keys" else leaf.values
        return (array if part is None else array[part])[0, :, start:stop]

    def state(self, path: str) -> mx.array:
        leaf_path, _, index = split_path(path)
        return self._held[leaf_path].cache[index]

    def can_cut(self, start: int) -> bool:
        forgetful = [leaf for leaf in self._held.values() if isinstance(leaf, (RotatingKVCache, ChunkedKVCache))]
        return all(isinstance(leaf, RECORDED) and leaf.record.start <= start for leaf in forgetful)

    def forget(self, before: int) -> None:
        for leaf in self._held.values():
            if isinstance(leaf, RECORDED):
                leaf.record.forget(before)


class Adapter:
    """Cuts blocks and checkpoints out of one model's prompt caches and builds prompt caches from them.

    Owner: the thread that owns MLX. `layout` comes from a forward pass over 64 tokens that is never evaluated.
    """

    def __init__(self, module: nn.Module, *, kv_bits: int | None = None, kv_group: int = 64) -> None:
        """Trace the model's cache.

        Raises:
            UncachedModelError: a layer's cache is of a kind that cannot be kept; names the class.
            UsageError: `kv_bits` was asked for and mlx-lm cannot quantise this cache.
        """
        self._module = module
        self._kv_bits = kv_bits
        self._kv_group = kv_group
        plain = plain_prompt_cache(module)
        keeping = any(type(leaf) is RotatingKVCache and leaf.keep for _, leaf in leaves(plain))
        traced = trace_caches(module, plain, BLOCK_TOKENS)
        others = not_kept(traced) + ["RotatingKVCache with keep"] * keeping
        if not others and any(cache.kind == "state" for cache in traced):
            others += _growing(traced, trace_caches(module, plain, 1))
        if others:
            raise UncachedModelError(
                f"this model's cache has {', '.join(others)}, which mlxkv cannot keep: it runs uncached."
            )
        if kv_bits is not None:
            check_quantizable(traced, kv_bits, kv_group)
            traced = self._trace_quantized()
        self._live = {cache.path: cache for cache in traced if cache.arrays}
        self._by_token = [cache.path for cache in self._live.values() if cache.kind != "state"]
        self.layout = layout_of(self._live.values())

    def new_prompt_cache(self) -> PromptCache:
        """An empty prompt cache as mlx-lm makes it, windows recorded, full ones quantised if asked for."""
        return [self._made(cache) for cache in plain_prompt_cache(self._module)]

    def source(self, prompt_cache: PromptCache) -> Source:
        """Where the blocks of one sequence are cut out of."""
        return PromptSource(dict(leaves(prompt_cache)), self._by_token)

    def cut(self, source: Source, spans: Sequence[tuple[int, int]]) -> list[Payload]:
        """Copy tokens [start, stop) of each span out of a sequence, evaluated: one payload a span.

        Raises whatever MLX has to say by then of this thread's stream, also of earlier work.

        Cost: one copy of the spans' bytes; the source is not changed and its buffers stay its own.
        """
        payloads = [
            tuple(mx.stack([source.rows(path, *span) for path in t.paths]) for t in self.layout.tensors)
            for span in spans
        ]
        _evaluate(payloads)
        return payloads

    def state(self, source: Source) -> Payload:
        """The arrays of every state as they are now: handles of their own, the bytes are not copied."""
        return tuple(mx.array(source.state(spec.path)) for spec in self.layout.states)

    def checkpoint(self, state: Payload) -> Payload:
        """A copy of `state` that holds its own bytes only, evaluated.

        Right after a prefill a state can be a view of the whole chunk: up to 257 times its own bytes were seen.
        """
        # As bytes: adding zero copies, and to a float it would turn -0.0 into 0.0.
        flat = [mx.contiguous(array, allow_col_major=False).view(mx.uint8) for array in state]
        copies = tuple((a + mx.zeros((), mx.uint8)).view(array.dtype) for a, array in zip(flat, state, strict=True))
        _evaluate(copies)
        return copies

    def target(self, capacity_tokens: int, held_tokens: int) -> Target:
        """Room for a sequence of `capacity_tokens` whose first `held_tokens` will be filled from blocks."""
        return Target(self.layout, -(-capacity_tokens // STEP_TOKENS) * STEP_TOKENS, held_tokens)

    def build(self, target: Target, tokens: int, state: Payload) -> PromptCache:
        """The prompt cache whose first `tokens` tokens are what `target` was filled with. The target is used up.

        Args:
            state: the arrays of the checkpoint at `tokens`, in the order of `layout.states`.
        """
        arrays, first = target.arrays(), target.first_block * BLOCK_TOKENS
        states = {spec.path: array for spec, array in zip(self.layout.states, state, strict=True)}
        made = self.new_prompt_cache()
        for path, leaf in leaves(made):
            if path not in self._live:
                continue
            if isinstance(leaf, RECORDED):
                _fill_window(leaf, arrays[f"{path}.keys"], arrays[f"{path}.values"], first, tokens)
            elif type(leaf) is ArraysCache:
                leaf.cache = [states.get(f"{path}.cache.{i}") for i in range(len(leaf.cache))]
            elif type(leaf) is QuantizedKVCache:
                leaf.keys = tuple(arrays[f"{path}.keys.{i}"] for i in range(3))
                leaf.values = tuple(arrays[f"{path}.values.{i}"] for i in range(3))
                leaf.offset = tokens
            else:
                leaf.keys, leaf.values, leaf.offset = arrays[f"{path}.keys"], arrays[f"{path}.values"], tokens
        return made

    def _made(self, cache: Any) -> Any:
        if type(cache) is CacheList:
            return CacheList(*(self._made(inner) for inner in cache.caches))
        if self._kv_bits is not None and type(cache) is KVCache:
            return cache.to_quantized(group_size=self._kv_group, bits=self._kv_bits)
        return recorded(cache)

    def _trace_quantized(self) -> tuple[TracedCache, ...]:
        try:
            return trace_caches(self._module, self.new_prompt_cache(), BLOCK_TOKENS)
        except ModelError as error:
            raise UsageError(f"mlx-lm cannot run this model with quantised KV ({error}); leave KV bits out.") from error


def _evaluate(arrays: Any) -> None:
    """Evaluate what is about to be published, and wait until no stream has anything to say against it.

    A GPU's error is told once, and maybe not by the `eval` it belongs to: MLX keeps it for the next call that looks, a
    stream at a time. mlx-lm generates on a stream of its own.
    """
    mx.eval(arrays)
    mx.synchronize()
    if "mlx_lm.generate" in sys.modules:
        mx.synchronize(sys.modules["mlx_lm.generate"].generation_stream)


def _growing(short: Sequence[TracedCache], long: Sequence[TracedCache]) -> list[str]:
    """The classes of states that did not keep their shapes: no checkpoint of a fixed size can hold them."""
    pairs = [pair for pair in zip(short, long, strict=True) if pair[0].kind == "state"]
    grown = {a.class_name for a, b in pairs if [x.shape for x in a.arrays] != [x.shape for x in b.arrays]}
    return [f"{name} with arrays that grow" for name in sorted(grown)]


def not_kept(traced: Sequence[TracedCache]) -> list[str]:
    """What in a model's cache can be neither cut nor checkpointed: classes, then dtypes."""
    dtypes = {array.dtype for cache in traced for array in cache.arrays}
    classes = {cache.class_name for cache in traced}
    return [*sorted(classes - KNOWN), *(f"arrays of {dtype}" for dtype in sorted(dtypes - DTYPES.keys()))]


def layout_of(live: Iterable[TracedCache]) -> Layout:
    """The layout of traced caches, in their order."""
    arrays, states = [], []
    for cache in live:
        for array in cache.arrays:
            path = f"{cache.path}.{array.path}"
            if cache.kind == "state":
                states.append(StateSpec(path, array.shape, array.dtype))
            else:
                arrays.append(ArraySpec(path, array.shape[1], array.shape[3], array.dtype, cache.window_tokens))
    return Layout(tuple(arrays), tuple(states))


def split_path(path: str) -> tuple[str, str, int | None]:
    """`3.1.keys.0` -> (`3.1`, `keys`, 0)."""
    parts = path.split(".")
    part = int(parts.pop()) if parts[-1].isdigit() else None
    side = parts.pop()
    return ".".join(parts), side, part


def _fill_window(leaf: Any, keys: mx.array, values: mx.array, first: int, tokens: int) -> None:
    """Give a window cache its last rows, and its record those of the block being filled.

    Args:
        keys, values: `[1, heads, n, dim]` whose row 0 is position `first`.
    """
    window = max(tokens - leaf.window, first)
    sides = [mx.contiguous(side[:, :, window - first : tokens - first]) for side in (keys, values)]
    leaf.fill(*sides, tokens)
    block = tokens // BLOCK_TOKENS * BLOCK_TOKENS
    leaf.record.start = block
    if block < tokens:
        leaf.record.add(*(mx.contiguous(side[:, :, block - first : tokens - first]) for side in (keys, values)))


class Target:
    """The arrays of a sequence being restored and where a block goes in them.

    Arrays of full layers are `[1, heads, capacity, dim]`; those of window layers begin with block `first_block`, the
    first that a window of theirs reaches back to. Hot payloads are copied in, cold files are read straight in; the
    bytes move once. Owner: the thread that owns MLX; readers get views of disjoint places.
    """

    def __init__(self, layout: Layout, capacity_tokens: int, held_tokens: int) -> None:
        self._layout = layout
        self._size = (capacity_tokens, held_tokens)
        widest = max(layout.windows, default=0)
        self.first_block = max(held_tokens - widest, 0) // BLOCK_TOKENS if widest else 0
        last = -(-held_tokens // BLOCK_TOKENS)
        rows = {0: capacity_tokens}
        rows |= dict.fromkeys(layout.windows, max(last - self.first_block, 1) * BLOCK_TOKENS)
        self._arrays = _new_arrays(layout, rows)
        self._rows = [[row for path in t.paths for row in _rows(self._arrays[path])] for t in layout.tensors]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def wanted(self, index: int) -> list[int]:
        """Which tensors of block `index` are needed: all of the last window, only full layers before it."""
        return [i for i, t in enumerate(self._layout.tensors) if not t.window or index >= self.first_block]

    def put(self, index: int, payload: Payload, tokens: int) -> int:
        """Copy the first `tokens` tokens of a block to its place; returns the bytes copied."""
        copied = 0
        for i in self.wanted(index):
            tensor, rows = self._layout.tensors[i], self._rows[i]
            source = memoryview(payload[i]).cast("B")
            step = len(source) // len(rows)
            start, size = self._start(tensor, index), tokens * tensor.row_bytes
            for j, row in enumerate(rows):
                row[start : start + size] = source[j * step : j * step + size]
            copied += size * len(rows)
        return copied

    def views(self, index: int) -> tuple[list[memoryview], list[int]]:
        """Writable bytes of a block's place, every array and head of the wanted tensors, and which those are."""
        wanted = self.wanted(index)
        found: list[memoryview] = []
        for i in wanted:
            tensor = self._layout.tensors[i]
            start, size = self._start(tensor, index), BLOCK_TOKENS * tensor.row_bytes
            found += [row[start : start + size] for row in self._rows[i]]
        return found, wanted

    def copy_of(self, tokens: int) -> Target:
        """A target of its own with the same first `tokens` tokens: what is used when a reader may still write here."""
        copy = Target(self._layout, *self._size)
        for tensor, mine, theirs in zip(self._layout.tensors, self._rows, copy._rows, strict=True):
            size = tokens * tensor.row_bytes
            for source, row in zip(mine, theirs, strict=True):
                row[:size] = source[:size]
        return copy

    def arrays(self) -> dict[str, mx.array]:
        """The arrays, given away: nothing keeps a view, so the first append does not copy."""
        arrays, self._arrays, self._rows = self._arrays, {}, []
        return arrays

    def _start(self, tensor: TensorSpec, index: int) -> int:
        return (index - (self.first_block if tensor.window else 0)) * BLOCK_TOKENS * tensor.row_bytes


def _new_arrays(layout: Layout, tokens: Mapping[int, int]) -> dict[str, mx.array]:
    """Evaluated arrays `[1, heads, tokens[window], dim]` of the layout, whose content may be anything.

    A GPU fills them with zeros in no time. A CPU has to write them once more, and the only call of MLX that
    gets memory without filling it is `load`: it leaves that to the file.
    """
    if mx.default_device() != mx.cpu:
        arrays = {
            spec.path: mx.zeros((1, spec.heads, tokens[spec.window], spec.dim), getattr(mx, spec.dtype))
            for spec in layout.arrays
        }
    else:
        arrays = mx.load(_NothingToRead(layout, tokens), format="safetensors", stream=mx.cpu)
    mx.eval(list(arrays.values()))
    return arrays


class _NothingToRead(io.RawIOBase):
    """A safetensors file whose header promises the arrays of a layout and whose payload is never read into memory."""

    def __init__(self, layout: Layout, tokens: Mapping[int, int]) -> None:
        super().__init__()
        table, size = {}, 0
        for spec in layout.arrays:
            name, width = DTYPES[spec.dtype]
            shape, start = [1, spec.heads, tokens[spec.window], spec.dim], size
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
