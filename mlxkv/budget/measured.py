"""The runtime share that `mlxkv doctor --prove` measured on this machine, kept for `budget` and `serve`.

One file in the user's cache directory, one entry for each machine and version of MLX. It is a hint of ours to
ourselves: whatever is wrong with it, it is left out with one line and the share of the model is used.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs

from mlxkv.budget.machines import Machine, RuntimeShare
from mlxkv.core.platform import machine_description

FORMAT = "mlxkv-runtime-share-1"
MOST_SHARE_BYTES = 2**40
_MOST_FILE_BYTES = 1 << 20
_MOST_ENTRIES = 50
_AGAIN = "run `mlxkv doctor --prove` to measure it again"

logger = logging.getLogger("mlxkv")


@dataclass(frozen=True)
class _Damage(Exception):
    reason: str


def measured_file() -> Path:
    """Where it is kept."""
    return platformdirs.user_cache_path("mlxkv") / "runtime-share.json"


def with_measured(machine: Machine) -> Machine:
    """`machine` with the share that was measured on it; unchanged when there is none, or it is not this machine."""
    if not machine.here:
        return machine
    try:
        return replace(machine, runtime=_entry(_load(measured_file()), machine_key(machine)))
    except FileNotFoundError:
        return machine
    except (OSError, _Damage) as error:
        reason = error.reason if isinstance(error, _Damage) else error.strerror
        logger.warning("the measured runtime share is left out (%s %s); %s", measured_file(), reason, _AGAIN)
        return machine


def remember(machine: Machine, share: RuntimeShare) -> None:
    """Keep a share for this machine and this MLX; what was kept for others stays.

    Raises:
        OSError: it cannot be written.
    """
    path = measured_file()
    try:
        held = _load(path)
    except (OSError, _Damage):
        held = {}
    held.pop(machine_key(machine), None)
    held[machine_key(machine)] = asdict(share)
    newest = dict(list(held.items())[-_MOST_ENTRIES:])
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "shares": newest}, file, indent=1)
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def machine_key(machine: Machine) -> str:
    """What the share depends on: the chip, its memory, what computes, and MLX."""
    here = machine_description()
    device = "cpu" if machine.on_cpu else "gpu"
    return f"{here.cpu}; {here.memory_bytes} B; {device} {machine.chip}; mlx {version('mlx')}"


def _but_for_device(key: str) -> tuple[str, str]:
    """A Mac has a CPU and a GPU; what was measured on one says nothing wrong of the other."""
    first, _, rest = key.rpartition("; mlx ")
    return first.rpartition("; ")[0], rest


def _load(path: Path) -> dict[str, Any]:
    """Every entry of a file of ours.

    Raises:
        _Damage: it is not ours, or not what we write.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise _Damage("is not ours alone")
        text = file.read(_MOST_FILE_BYTES + 1)
    try:
        held = json.loads(text)
        shares = held["shares"] if held["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Damage("is damaged") from error
    if len(text) > _MOST_FILE_BYTES or not isinstance(shares, dict):
        raise _Damage("is of another format")
    return shares


def _entry(shares: dict[str, Any], key: str) -> RuntimeShare | None:
    if key not in shares:
        if any(_but_for_device(other) == _but_for_device(key) for other in shares):
            return None
        raise _Damage("is of another machine or MLX")
    try:
        share = RuntimeShare(**shares[key])
    except TypeError as error:
        raise _Damage("is damaged") from error
    numbers = (share.bytes, share.hidden_size, share.step_tokens)
    texts = (share.model, share.date)
    whole = all(type(number) is int for number in numbers) and all(type(text) is str for text in texts)
    if not whole or not 0 <= share.bytes <= MOST_SHARE_BYTES or share.hidden_size < 0 or share.step_tokens < 1:
        raise _Damage("is damaged")
    return share
