"""How a model's cache is cut, told from its config: kinds of layers, what a block and a checkpoint cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlxkv.cache.checkpoint import SHARE, cadence_tokens
from mlxkv.cache.layout import Layout
from mlxkv.cache.names import BLOCK_TOKENS
from mlxkv.core.units import format_bytes
from mlxkv.models.adapter import KNOWN, layout_of
from mlxkv.models.trace import TracedCache, build, trace

RESUMES = {"full": "at any token", "window": "at any token, the last window restored", "state": "at checkpoints"}


@dataclass(frozen=True)
class Group:
    """Layers alike. `block_bytes` and `checkpoint_bytes` are of all of them together."""

    class_name: str
    kind: str
    layers: int
    window_tokens: int
    block_bytes: int
    checkpoint_bytes: int
    resumes: str


@dataclass(frozen=True)
class Kinds:
    """A model's layers by kind. `cadence_tokens` is 0 without states; `uncached` names classes that cannot be kept."""

    groups: tuple[Group, ...]
    block_bytes: int
    checkpoint_bytes: int
    cadence_tokens: int
    uncached: tuple[str, ...]

    @property
    def sentence(self) -> str:
        if self.uncached:
            return f"This model runs uncached: {', '.join(self.uncached)} can neither be cut nor checkpointed."
        block = f"A block of {BLOCK_TOKENS} tokens takes {format_bytes(self.block_bytes)}"
        if not self.cadence_tokens:
            return f"{block}; a prompt resumes at any token."
        return (
            f"{block}, a checkpoint {format_bytes(self.checkpoint_bytes)}; a prompt resumes at checkpoints: the ends of"
            f" the system prompt, of the prompt and of the reply, and every {self.cadence_tokens:,} tokens"
            f" (checkpoints stay under {SHARE:.0%} of the blocks' bytes)."
        )

    def as_fields(self) -> dict[str, Any]:
        return asdict(self)


def describe(config: Mapping[str, Any]) -> Kinds:
    """Trace a checked config; nothing is evaluated. Cost: as `trace`."""
    caches = trace(build(config)).caches
    grouped: dict[tuple[str, str, int], list[TracedCache]] = {}
    for cache in caches:
        if cache.arrays:
            grouped.setdefault((cache.class_name, cache.kind, cache.window_tokens), []).append(cache)
    layout = layout_of(cache for cache in caches if cache.arrays)
    return Kinds(
        groups=tuple(_group(name, kind, window, alike) for (name, kind, window), alike in grouped.items()),
        block_bytes=layout.block_bytes,
        checkpoint_bytes=layout.checkpoint_bytes,
        cadence_tokens=cadence_tokens(layout),
        uncached=tuple(sorted({cache.class_name for cache in caches} - KNOWN)),
    )


def _group(name: str, kind: str, window: int, alike: list[TracedCache]) -> Group:
    layout: Layout = layout_of(alike)
    return Group(
        class_name=name,
        kind=kind,
        layers=len(alike),
        window_tokens=window,
        block_bytes=layout.block_bytes,
        checkpoint_bytes=layout.checkpoint_bytes,
        resumes=RESUMES.get(kind, "nowhere: it runs uncached"),
    )
