"""What `mlxkv cache info MODEL` shows: the layers of a model by the kind of their cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column, Table

from mlxkv.core.units import KIB, format_bytes

if TYPE_CHECKING:
    from mlxkv.prompt_cache.kinds import Kinds

_LAYERS_WIDTH = 40


def page(name: str, origin: str, kinds: Kinds) -> RenderableType:
    """A table of the groups, and what they make together."""
    right = [Column(title, justify="right") for title in ("window", "KiB a block", "KiB a checkpoint")]
    table = Table("kind", "layers", "class", *right, box=None, pad_edge=False, header_style="bold")
    for group in kinds.groups:
        window = f"{group.window_tokens:,}" if group.window_tokens else ""
        table.add_row(group.kind, f"{group.count}: {_shortened(group.layers)}", group.class_name, window,
                      _kib(group.block_bytes), _kib(group.state_bytes))  # fmt: skip
    lines = [f"a block       {format_bytes(kinds.block_bytes)}, 64 tokens"]
    if kinds.checkpoint_bytes:
        lines.append(f"a checkpoint  {format_bytes(kinds.checkpoint_bytes)}")
    if any(group.kind == "window" for group in kinds.groups):
        lines.append("restored      all of the full layers, and the last window of the others")
    if kinds.uncached:
        lines = [f"not kept      {kinds.uncached}"]
    lines.append(f"resumes       {kinds.resumes}")
    return Group(f"{name} ({origin})", "", table, "", *lines)


def _kib(nbytes: int) -> str:
    return f"{nbytes / KIB:,.2f}".removesuffix(".00") if nbytes else ""


def _shortened(layers: str) -> str:
    """`3, 7, 11 ... 63`: the first ones that fit, and the last."""
    if len(layers) <= _LAYERS_WIDTH:
        return layers
    head = layers[:_LAYERS_WIDTH].rpartition(", ")[0]
    return f"{head} ... {layers.rpartition(', ')[2]}"
