"""Which kinds of cache a model has, layer by layer: what a block and a checkpoint cost, and where a match resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.nn as nn

from mlxkv.cache.checkpoint import cadence_tokens
from mlxkv.cache.layout import Layout
from mlxkv.prompt_cache.adapter import layout_of, not_kept
from mlxkv.sizing.trace import Kind, TracedCache, trace


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose caches are alike.

    Attributes:
        layers: places in the model's list of caches, `0-2, 4-6`; inside a `CacheList` `0.1`.
        class_name: mlx-lm's class.
        window_tokens: 0 unless the kind is `window`.
        block_bytes: what these layers add to a block of 64 tokens.
        state_bytes: what they add to a checkpoint.
    """

    kind: Kind
    layers: str
    count: int
    class_name: str
    window_tokens: int
    block_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class Kinds:
    """A model's caches in groups. `uncached` says why none of it is kept; then the costs are 0.

    Attributes:
        cadence_tokens: tokens from one checkpoint of a prompt to the next, beside those at its ends; 0 without states.
        resumes: where a match can resume, a sentence.
    """

    groups: tuple[LayerGroup, ...]
    block_bytes: int
    checkpoint_bytes: int
    cadence_tokens: int
    resumes: str
    uncached: str | None


def kinds_of(module: nn.Module, *, kv_bits: int | None = None) -> Kinds:
    """Trace a module and group its caches.

    Args:
        module: loaded by mlx-lm, or from `weights.build`: nothing is evaluated.

    Raises:
        ModelError: the forward pass fails.
        UsageError: mlx-lm cannot quantise this cache.

    Cost: of `trace.trace`.
    """
    traced = trace(module, kv_bits=kv_bits)
    growing = {a.class_name for a, b in zip(traced.caches, traced.costs, strict=True) if b.kind == "unknown"}
    others = not_kept(traced.caches) or [f"{name} with arrays that grow" for name in sorted(growing)]
    live = [cache for cache in traced.caches if cache.arrays]
    layout = Layout(()) if others else layout_of(live)
    cadence = cadence_tokens(layout)
    return Kinds(
        groups=tuple(_groups(live)),
        block_bytes=layout.block_bytes,
        checkpoint_bytes=layout.checkpoint_bytes,
        cadence_tokens=cadence,
        resumes="nowhere: it runs uncached" if others else _resumes(layout, cadence),
        uncached=f"its cache has {', '.join(others)}, which mlxkv cannot keep" if others else None,
    )


def _groups(live: Sequence[TracedCache]) -> list[LayerGroup]:
    alike: dict[tuple[Kind, str, int, int, int], list[str]] = {}
    for cache in live:
        per_block = 0 if cache.kind == "state" else 64 * cache.bytes_per_token
        state = cache.allocated_bytes if cache.kind == "state" else 0
        alike.setdefault((cache.kind, cache.class_name, cache.window_tokens, per_block, state), []).append(cache.path)
    return [
        LayerGroup(kind, _ranges(paths), len(paths), name, window, len(paths) * per_block, len(paths) * state)
        for (kind, name, window, per_block, state), paths in alike.items()
    ]


def _ranges(paths: Sequence[str]) -> str:
    """`0-2, 4` for 0, 1, 2, 4; paths inside lists stay as they are.

    >>> _ranges(["0", "1", "2", "4", "6.1"])
    '0-2, 4, 6.1'
    """
    found: list[list[str]] = []
    for path in paths:
        if found and path.isdigit() and found[-1][-1].isdigit() and int(path) == int(found[-1][-1]) + 1:
            found[-1].append(path)
        else:
            found.append([path])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def _resumes(layout: Layout, cadence: int) -> str:
    if not layout.states:
        return "at any token that is held"
    every = "every block" if cadence == 64 else f"every {cadence:,} tokens"
    return f"at checkpoints: the end of the system prompt, of the prompt and of the reply, and {every} of a prompt"
