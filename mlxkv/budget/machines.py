"""What a machine can hold and how fast it is: this Mac as MLX reports it, or one described by its memory and macOS.

The limits of described machines come from `macs.json`, figures people read off their Macs. What nobody posted is filled
by a rule and named in `Machine.estimated`. Sizes of memory are binary: a 24 GB Mac has 24 GiB.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

from mlxkv.core.errors import UsageError
from mlxkv.core.platform import macos_of, macos_version
from mlxkv.core.units import GIB, format_bytes

DEFAULT_MEMORY_BYTES = 24 * GIB
DEFAULT_MACOS = "26"
MOST_MEMORY_BYTES = 4096 * GIB

_LAST_OLD_MACOS, _FIRST_NEW_MACOS, _MACOS = 15, 26, range(13, 40)
_SMALL_GIB = 32  # up to here two thirds of memory under old systems, above it three quarters
_BUFFER_SHARE = 0.75
_MACOS_TEXT = re.compile(r"(\d{2})(\.\d+)*")


@dataclass(frozen=True)
class Kernels:
    """Which attention MLX computes without writing scores [heads, L, S] to memory, for more than 8 queries.

    Attributes:
        fused_dims: head sizes with a fused kernel; keys and values must have the same.
        causal_256_from_queries: steps of so many queries are fused for head size 256 too, when the mask is causal and
            no array; None where they never are.

    Source: mlx/backend/metal/scaled_dot_product_attention.cpp, `use_fallback`, mlx 0.32.2 (846d17622). There is a
    kernel for 192 and 256, but MLX prefers the unfused path for them.
    """

    fused_dims: frozenset[int]
    causal_256_from_queries: int | None = None


METAL = Kernels(frozenset({64, 72, 80, 96, 128}))
METAL_WITH_NEURAL_ACCELERATORS = replace(METAL, causal_256_from_queries=1024)
UNFUSED = Kernels(frozenset())
"""The CPU, and Metal before mlx 0.21 (2024-11-22)."""


@dataclass(frozen=True)
class Rates:
    """Peak rates of a chip: what the maker states, before any efficiency."""

    flops_per_s: float
    memory_bytes_per_s: float
    ssd_bytes_per_s: float


@dataclass(frozen=True)
class Speed:
    """A chip's rates from the slowest machine sold with it to the fastest; `worst`, `typical` and `best`.

    Attributes:
        neural_accelerators: matrix units in the GPU, which exceed `flops_per_s` in matrix products.
    """

    worst: Rates
    typical: Rates
    best: Rates
    neural_accelerators: bool


@dataclass(frozen=True)
class RuntimeShare:
    """What the runtime took beyond weights, KV and transient, as `mlxkv doctor --prove` saw it on this machine.

    Attributes:
        model, hidden_size, step_tokens: what it was measured with.
        date: when, ISO 8601.
    """

    bytes: int
    model: str
    hidden_size: int
    step_tokens: int
    date: str

    def of(self, hidden_size: int, step_tokens: int) -> int:
        """Of another model. A step's activations grow with both numbers: all of it is taken to, and never less."""
        measured = self.hidden_size * self.step_tokens
        return self.bytes * max(hidden_size * step_tokens, measured) // measured if measured else self.bytes


@dataclass(frozen=True)
class Machine:
    """What a model may use.

    Attributes:
        gpu_limit_bytes: Metal's recommended working set; MLX's allocations beyond it fail or freeze the Mac.
        max_buffer_bytes: the largest single array, None where there is no such limit.
        macos: its version as text, None on other systems.
        chip: `M4 Pro`; None when unknown, and then no seconds are estimated.
        source: where the figures come from, one line for a person.
        estimated: names of the fields that a rule gave because nobody posted them.
        here: it is the machine this runs on, and not one that is described.
        runtime: measured here; None where it was not.
    """

    memory_bytes: int
    gpu_limit_bytes: int
    max_buffer_bytes: int | None
    macos: str | None
    chip: str | None
    source: str
    estimated: tuple[str, ...] = ()
    kernels: Kernels = METAL
    speed: Speed | None = None
    on_cpu: bool = False
    here: bool = False
    runtime: RuntimeShare | None = None

    @property
    def system_bytes(self) -> int:
        """What macOS and other programs need: an eighth of memory, 2 to 8 GiB. A judgement, not a measurement."""
        return min(max(self.memory_bytes // 8, 2 * GIB), 8 * GIB)


def find_machine(
    *,
    memory_bytes: int | None = None,
    macos: str | None = None,
    chip: str | None = None,
    wired_limit_bytes: int | None = None,
) -> Machine:
    """The machine that is asked about: this Mac, changed by what is given; elsewhere a Mac of 24 GB under macOS 26.

    Args:
        memory_bytes: as sold, in binary units.
        macos: `15`, `26` or a full version.
        chip: `M4 Pro`, upper and lower case alike; `CPU` is this computer without a GPU.
        wired_limit_bytes: what `sysctl iogpu.wired_limit_mb` is set to; 0 is the system's default.

    Raises `UsageError` for a chip, macOS, memory or limit that cannot be.
    """
    if chip is not None and chip.strip().casefold() == "cpu":
        return this_cpu()
    here = this_mac() if mx.metal.is_available() else None
    if here is not None and memory_bytes is None and macos is None and chip is None:
        machine = here
    else:
        machine = described_machine(
            memory_bytes=here.memory_bytes if here and memory_bytes is None else memory_bytes,
            macos=here.macos if here and macos is None else macos,
            chip=here.chip if here and chip is None and memory_bytes is None else chip,
        )
    return with_wired_limit(machine, wired_limit_bytes)


def this_mac() -> Machine:
    """This Mac, as MLX's Metal device reports it. Only where `mx.metal.is_available()`."""
    return replace(machine_from_device(mx.device_info(mx.gpu), macos=macos_version() or ""), here=True)


def machine_from_device(info: Mapping[str, Any], *, macos: str) -> Machine:
    """The machine of `mx.device_info()`, which already holds what a sysctl changed.

    Args:
        macos: the version as it was read; one that cannot be is taken for the default, and the source says so.
    """
    version = _readable(macos)
    name = str(info["device_name"]).removeprefix("Apple ").strip()
    known = name if name in _chips() else None
    return Machine(
        memory_bytes=int(info["memory_size"]),
        gpu_limit_bytes=int(info["max_recommended_working_set_size"]),
        max_buffer_bytes=int(info["max_buffer_length"]),
        macos=version,
        chip=name,
        source="this Mac, read with mx.device_info()"
        + ("" if version == macos else f"; its macOS is read as {macos!r} and taken for {version}"),
        kernels=_kernels(known, _is_new(version)),
        speed=None if known is None else _speed(known),
    )


def this_cpu() -> Machine:
    """This computer without a GPU: what MLX's CPU build may use is all of its memory."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        memory_bytes=memory_bytes,
        gpu_limit_bytes=memory_bytes,
        max_buffer_bytes=None,
        macos=macos_version(),
        chip="CPU",
        source="this computer's memory; no GPU",
        kernels=UNFUSED,
        on_cpu=True,
        here=True,
    )


def described_machine(*, memory_bytes: int | None = None, macos: str | None = None, chip: str | None = None) -> Machine:
    """A Mac by its memory, macOS and chip, from the tables; None takes 24 GB, macOS 26 and the usual chip.

    >>> described_machine(macos="15").gpu_limit_bytes / GIB, round(described_machine().gpu_limit_bytes / GIB, 2)
    (16.0, 17.76)
    """
    size = DEFAULT_MEMORY_BYTES if memory_bytes is None else memory_bytes
    if not GIB <= size <= MOST_MEMORY_BYTES:
        raise UsageError(
            f"a Mac with {format_bytes(size)} of memory does not exist; give a size from 1GB to 4096GB, such as 24GB."
        )
    version = DEFAULT_MACOS if macos is None else macos.strip()
    new = _is_new(version)
    limit, measured = _default_limit(size, new=new)
    named = _chip_name(chip) if chip is not None else _usual_chip(size)
    estimated = () if measured else ("gpu_limit_bytes",)
    said = "macs.json" if measured else "estimated by the rule for sizes nobody posted"
    return Machine(
        memory_bytes=size,
        gpu_limit_bytes=limit,
        max_buffer_bytes=_default_buffer(size, limit, new=new),
        macos=version,
        chip=named,
        source=f"a Mac of {size / GIB:g} GB under macOS {version}, limit from {said}"
        + ("" if chip is not None else f"; the chip {named} is assumed, change it with --chip"),
        estimated=(*estimated, "max_buffer_bytes"),
        kernels=_kernels(named, new),
        speed=_speed(named),
    )


def with_wired_limit(machine: Machine, wired_limit_bytes: int | None) -> Machine:
    """`machine` with the GPU limit set by `sysctl iogpu.wired_limit_mb`; the largest buffer does not rise with it.

    Raises `UsageError` for a limit above the machine's memory.
    """
    if not wired_limit_bytes:
        return machine
    if wired_limit_bytes > machine.memory_bytes:
        raise UsageError(
            f"a wired limit of {format_bytes(wired_limit_bytes)} is more than the machine's"
            f" {format_bytes(machine.memory_bytes)} of memory; leave some of it to the system."
        )
    return replace(
        machine,
        gpu_limit_bytes=wired_limit_bytes,
        estimated=tuple(name for name in machine.estimated if name != "gpu_limit_bytes"),
        source=f"{machine.source}; GPU limit replaced by --wired-limit",
    )


def table_sizes() -> tuple[int, ...]:
    """The memory sizes in the table, ascending, in bytes."""
    return tuple(sorted(int(gib) * GIB for gib in _macs()["gpu_limit_bytes"] if gib.isdigit()))


@cache
def _macs() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((files("mlxkv.budget") / "macs.json").read_text(encoding="utf-8"))
    return data


@cache
def _chip_file() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((files("mlxkv.budget") / "chips.json").read_text(encoding="utf-8"))
    return data


def _chips() -> dict[str, Any]:
    chips: dict[str, Any] = _chip_file()["chips"]
    return chips


def _chip_name(text: str) -> str:
    """The chip's spelling in the tables. Raises `UsageError` with the nearest ones."""
    wanted = " ".join(text.split()).casefold().removeprefix("apple ")
    spelled = {name.casefold(): name for name in _chips()}
    if wanted not in spelled:
        near = [spelled[key] for key in difflib.get_close_matches(wanted, spelled, n=3, cutoff=0)]
        raise UsageError(f"no chip {text!r} in the tables; did you mean {', '.join(near)}? CPU is this computer's own.")
    return spelled[wanted]


def _usual_chip(memory_bytes: int) -> str:
    """The chip most sold with so much memory, or with the next smaller size."""
    usual: dict[str, str] = _chip_file()["usual_chip_by_gb"]
    sizes = sorted(int(gib) for gib in usual if gib.isdigit())
    return usual[str(max((gib for gib in sizes if gib * GIB <= memory_bytes), default=sizes[0]))]


def _is_new(macos: str) -> bool:
    """Whether the limits of macOS 26 hold. Raises `UsageError` for what is no version of macOS."""
    match = _MACOS_TEXT.fullmatch(macos)
    major = int(match[1]) if match else 0
    if major not in _MACOS or _LAST_OLD_MACOS < major < _FIRST_NEW_MACOS:
        raise UsageError(f"there is no macOS {macos!r} that runs MLX; give 13 to 15, or 26 and later.")
    return major >= _FIRST_NEW_MACOS


def _readable(macos: str) -> str:
    """A version that was read and not typed, as one that `_is_new` takes: nobody can mend what a Mac says of itself."""
    version = macos_of(macos, "") or DEFAULT_MACOS
    try:
        _is_new(version)
    except UsageError:
        return DEFAULT_MACOS
    return version


def _default_limit(memory_bytes: int, *, new: bool) -> tuple[int, bool]:
    """The working set of a machine, and whether somebody posted it.

    Gaps are filled under old systems by the rule macs.json states, two thirds of memory up to 32 GiB and three quarters
    above, and no less than a smaller machine has; under new ones by the share of the next smaller size that was
    posted: shares grow with size, so it is not too much.
    """
    era = "new" if new else "old"
    table: dict[str, Any] = _macs()["gpu_limit_bytes"]
    posted = {int(gib) * GIB: row[era] for gib, row in table.items() if gib.isdigit() and row[era] is not None}
    if memory_bytes in posted:
        return int(posted[memory_bytes]), True
    smaller = max((size for size in posted if size < memory_bytes), default=min(posted))
    if new:
        return int(memory_bytes * posted[smaller] / smaller), False
    by_rule = memory_bytes * 2 // 3 if memory_bytes <= _SMALL_GIB * GIB else memory_bytes * 3 // 4
    return by_rule if memory_bytes < smaller else max(by_rule, posted[smaller]), False


def _default_buffer(memory_bytes: int, limit_bytes: int, *, new: bool) -> int:
    """The longest buffer: 0.75 of the default working set; under old systems half of memory on small machines."""
    if not new and memory_bytes <= _SMALL_GIB * GIB:
        return memory_bytes // 2
    return int(limit_bytes * _BUFFER_SHARE)


def _kernels(chip: str | None, new_macos: bool) -> Kernels:
    accelerated = new_macos and chip is not None and bool(_chips()[chip].get("neural_accelerators"))
    return METAL_WITH_NEURAL_ACCELERATORS if accelerated else METAL


def _speed(chip: str) -> Speed:
    """The chip's rates. An SSD's class is the chip's own; the worst and best case take the class beside it."""
    facts = _chips()[chip]
    stated = _macs()["bandwidth_GBps"][chip]
    slow, fast = (stated[0], stated[-1]) if isinstance(stated, list) else (stated, stated)
    classes: dict[str, float] = _macs()["ssd_read_write_MBps"]["classes_GBps"]
    ssd = classes[facts["ssd"]]
    slower = max((rate for rate in classes.values() if rate < ssd), default=ssd)
    faster = min((rate for rate in classes.values() if rate > ssd), default=ssd)
    peak = facts["peak_tflops"] * 1e12
    return Speed(
        worst=Rates(peak, slow * 1e9, slower * 1e9),
        typical=Rates(peak, (slow + fast) / 2 * 1e9, ssd * 1e9),
        best=Rates(peak, fast * 1e9, faster * 1e9),
        neural_accelerators=bool(facts.get("neural_accelerators")),
    )
