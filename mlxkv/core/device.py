"""What a device says when it fails, and the sentence that becomes of it: what happened, then what to change.

MLX raises a RuntimeError with a text of its own. Where it comes from (mlx 846d17622):

    [METAL] Command buffer execution failed: ...     mlx/backend/metal/device.cpp, `CommandEncoder::commit`
    [metal::malloc] ..., [malloc] Unable to ...      mlx/backend/metal/allocator.cpp, mlx/backend/cuda/allocator.cpp
    cudaMalloc...(...) failed: out of memory         mlx/backend/cuda/utils.cpp

What follows "failed:" is macOS' description, in the user's language, and a name in parentheses that is the same in all.
MLX's CPU backend checks no allocation; what it runs out of comes as a MemoryError, if the process lives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from mlxkv.core.errors import DeviceError
from mlxkv.core.units import format_bytes

Kind = Literal["memory", "array", "count", "time", "refused", "fault"]
Advice = Mapping[Kind, str]
"""What to change, by what went wrong. `refused` and `fault` need not be there: nothing that can be set helps."""

_TOLD: tuple[tuple[re.Pattern[str], Kind, str], ...] = (
    (re.compile(r"CallbackErrorOutOfMemory"), "memory", "the GPU ran out of memory"),
    (re.compile(r"\[malloc\] Unable to allocate|failed: out of memory"), "memory", "the GPU ran out of memory"),
    (re.compile(r"\[metal::malloc\] Attempting to allocate (\d+) bytes .* buffer size of (\d+)"), "array",
     "an array of {} was needed, and one may have {}"),
    (re.compile(r"\[metal::malloc\] Resource limit"), "count", "the GPU holds as many arrays as Metal allows"),
    (re.compile(r"CallbackError(Timeout|Hang|ImpactingInteractivity)"), "time",
     "macOS ended the GPU's work because it took too long"),
    (re.compile(r"CallbackErrorSubmissionsIgnored"), "refused",
     "macOS lets this process use the GPU no more after its earlier errors"),
    (re.compile(r"\[METAL\] Command buffer execution failed"), "fault", "the GPU failed"),
)  # fmt: skip
_ALWAYS: Advice = {"refused": "stop it and start it again", "fault": "try again; if it stays, start mlxkv again"}
_MAY_PASS = {"memory", "count", "fault"}
"""Not `time`: tried again, it fails again, and after the third macOS ignores the process (jundot/omlx#3706)."""


def device_error(error: BaseException, advice: Advice) -> DeviceError | None:
    """The sentence for an error that a device raised; None for any other error.

    >>> text = "[METAL] Command buffer execution failed: x (00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
    >>> device_error(RuntimeError(text), {"time": "compute shorter chunks"}).kind
    'time'
    """
    told = _read(error)
    if told is None:
        return None
    kind, what = told
    said = str(error).strip().partition("\n")[0].rstrip(".")
    known = {**_ALWAYS, **advice}
    return DeviceError(
        f"{what} ({said or type(error).__name__}); {known[kind]}.", kind=kind, may_pass=kind in _MAY_PASS
    )


def is_device_error(error: BaseException) -> bool:
    """Whether an error is what a device said, which may be about more than who heard it."""
    return _read(error) is not None


def _read(error: BaseException) -> tuple[Kind, str] | None:
    """What went wrong, and what happened in words."""
    if isinstance(error, MemoryError):
        return "memory", "there was no memory left"
    if not isinstance(error, RuntimeError):
        return None
    for pattern, kind, what in _TOLD:
        if match := pattern.search(str(error)):
            sizes = [format_bytes(int(size)) for size in match.groups() if size.isdigit()]
            return kind, what.format(*sizes)
    return None
