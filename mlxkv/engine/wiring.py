"""Which memory macOS keeps wired, neither swapped nor compressed: the weights, and nothing that comes and goes.

MLX wires what it holds up to a limit, which is 0 until somebody sets it. A limit of what is in use right after loading
has room for the weights and for little else: caches and blocks that are allocated later stay as they are.
docs/decisions/15 has the sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from mlxkv.core.platform import macos_version
from mlxkv.core.units import format_bytes

KEPT_SHARE = 1 / 3
"""Of a Mac's memory, what is never wired: for macOS, other programs and the caches, which can be swapped there."""
FIRST_MACOS = 15
"""The first that wires for MLX; source: mlx/memory.h, mlx/backend/metal/resident.cpp."""


@dataclass(frozen=True)
class Metal:
    """A GPU that MLX computes on through Metal, and its Mac; `macos` is None when nobody told its version."""

    memory_bytes: int
    working_set_bytes: int
    macos: str | None


@dataclass(frozen=True)
class Wiring:
    """How many bytes are wired, or may be; with 0, `reason` says why."""

    wired_bytes: int
    reason: str | None = None

    def __str__(self) -> str:
        return f"{format_bytes(self.wired_bytes)} wired" if self.wired_bytes else f"nothing wired: {self.reason}"


UNWIRED = Wiring(0, "nobody asked for it")


def most_wired(metal: Metal | None, *, kept_share: float = KEPT_SHARE) -> Wiring:
    """The most weights that are wired.

    Args:
        metal: None where MLX computes on something else.
        kept_share: of its memory, what macOS must be left.
    """
    if metal is None:
        return Wiring(0, "MLX computes without Metal here")
    if metal.macos is not None and int(metal.macos.partition(".")[0]) < FIRST_MACOS:
        return Wiring(0, f"macOS {metal.macos} wires nothing for MLX, {FIRST_MACOS} does")
    most = min(metal.working_set_bytes, metal.memory_bytes - math.ceil(metal.memory_bytes * kept_share))
    return Wiring(most) if most > 0 else Wiring(0, "macOS needs all of the memory")


def decide_wiring(metal: Metal | None, active_bytes: int, *, kept_share: float = KEPT_SHARE) -> Wiring:
    """What to wire while MLX holds `active_bytes`, all of it weights: what the working set takes of them, or nothing.

    Nothing where that would leave macOS too little: which part of the weights is wired cannot be chosen.
    """
    most = most_wired(metal, kept_share=kept_share)
    if metal is None or not most.wired_bytes:
        return most
    wanted = min(active_bytes, metal.working_set_bytes)
    if wanted > most.wired_bytes:
        memory, kept = metal.memory_bytes, math.ceil(metal.memory_bytes * kept_share)
        return Wiring(
            0,
            f"{format_bytes(wanted)} of weights would leave macOS less than {format_bytes(kept)} of"
            f" {format_bytes(memory)}",
        )
    return Wiring(wanted) if wanted else Wiring(0, "no weights are loaded")


def find_metal() -> Metal | None:
    """What MLX's Metal device says of itself and this Mac; None where MLX computes on something else."""
    if not mx.metal.is_available() or mx.default_device() != mx.gpu:
        return None
    info = mx.device_info(mx.gpu)
    return Metal(int(info["memory_size"]), int(info["max_recommended_working_set_size"]), macos_version())


def wire_weights() -> Wiring:
    """Wire what is loaded. To be called once: after the weights are there, before a store is opened."""
    mx.clear_cache()  # what MLX keeps of freed arrays would be wired with them
    wiring = decide_wiring(find_metal(), mx.get_active_memory())
    if wiring.wired_bytes:
        mx.set_wired_limit(wiring.wired_bytes)
    return wiring
