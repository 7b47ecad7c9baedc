"""What differs from machine to machine: open files, the cache's place, how a file is made durable."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import platformdirs

from mlxkv.core.units import format_bytes

_ENOUGH_OPEN_FILES = 8192
_F_BARRIERFSYNC = 85  # <sys/fcntl.h> of macOS; Python's fcntl does not name it


class OpenFilesLimit(NamedTuple):
    """How many files this process may hold open: now, and at most after asking. Never negative."""

    soft: int
    hard: int


def open_files_limit() -> OpenFilesLimit:
    """The limits in force; no limit reads as `sys.maxsize`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OpenFilesLimit(*(sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)))


def raise_open_files_limit(wanted: int = _ENOUGH_OPEN_FILES) -> OpenFilesLimit:
    """Raise the soft limit to `wanted`, or as near as the hard one allows; never lowers it. Returns what holds now."""
    soft, hard = open_files_limit()
    target = min(wanted, hard)
    if target > soft:
        raw_hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, raw_hard))
    return open_files_limit()


@contextmanager
def keep_open_files_limit() -> Iterator[OpenFilesLimit]:
    """Undo what the body does to the limits; yields those before it. To be put around `import mlx_lm`.

    That import sets them to (2048, 4096). Only root may raise the hard limit again, so for everybody else 4,096
    stay; the soft limit ends at the hard one or at 8,192, or where it was if that was higher.
    """
    before = open_files_limit()
    raw_before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield before
    finally:
        with suppress(ValueError):  # not root: the hard limit stays down
            resource.setrlimit(resource.RLIMIT_NOFILE, raw_before)
        raise_open_files_limit(max(before.soft, _ENOUGH_OPEN_FILES))


def default_cache_dir() -> Path:
    """The cache root when none is named: `~/Library/Caches/mlxkv/blocks`, or `~/.cache/mlxkv/blocks` on Linux."""
    return platformdirs.user_cache_path("mlxkv") / "blocks"


@dataclass(frozen=True)
class Machine:
    """This computer, as benchmarks and `mlxkv doctor` name it; `str()` gives one line."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    python: str

    def __str__(self) -> str:
        memory = format_bytes(self.memory_bytes)
        return f"{self.cpu}, {self.cores} cores, {memory}, {self.system}, Python {self.python}"


def machine_description() -> Machine:
    """Look at the machine: CPU, the cores this process may use, physical memory, system, Python."""
    return Machine(
        cpu=_cpu_name() or platform.machine(),
        cores=_usable_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"macOS {macos_version() or '(version unknown)'}"
        if sys.platform == "darwin"
        else f"Linux {platform.release()}",
        python=platform.python_version(),
    )


def macos_version() -> str | None:
    """The version of the macOS this runs on, as `15.5` or `26`; None elsewhere, and where nothing tells."""
    if sys.platform != "darwin":
        return None
    return macos_of(platform.mac_ver()[0], platform.release())


def macos_of(told: str, darwin: str) -> str | None:
    """The version of macOS from what `platform.mac_ver` told, or from the kernel's where that cannot be.

    A Python built with the SDK of an earlier numbering is told 10.16 by macOS 11, and 16 by macOS 26; some are told
    nothing. The kernel is always told by its own number: Darwin 20 to 24 are macOS 11 to 15, 25 is 26, and from 27 on
    both are the same. Sources: python/cpython#135675 and pull request 136339; andreas-kupries/critcl pull request 135.

    >>> macos_of("16.0", "25.1.0"), macos_of("", "24.6.0"), macos_of("15.5", "24.5.0"), macos_of("", "")
    ('26', '15', '15.5', None)
    """
    major = _first_number(told)
    if 11 <= major <= 15 or major >= 26:
        return told
    kernel = _first_number(darwin)
    if 20 <= kernel <= 24:
        return str(kernel - 9)
    return str(max(kernel, 26)) if kernel >= 25 else None


def _first_number(version: str) -> int:
    first = version.strip().partition(".")[0]
    return int(first) if first.isdecimal() else 0


def _usable_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    if sys.platform == "darwin":
        query = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
        for line in info:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return ""


def sync_file(fd: int) -> None:
    """Put the file's bytes in order on the disk: what is written after this cannot reach it before them.

    fdatasync on Linux; on macOS F_BARRIERFSYNC, which orders without waiting for the disk to empty its own cache.
    """
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(fd, _F_BARRIERFSYNC)
        except OSError:  # a file system that has no barriers, such as a network share
            os.fsync(fd)
    else:
        os.fdatasync(fd)


def sync_file_fully(fd: int) -> None:
    """Do not return before the file survives a power cut: F_FULLFSYNC on macOS, fsync elsewhere. Slow there."""
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        except OSError:
            os.fsync(fd)
    else:
        os.fsync(fd)


def physical_bytes(status: os.stat_result) -> int:
    """What the file takes on the disk, which is what a budget counts; its length may be more (holes) or less."""
    return status.st_blocks * 512


def process_is_alive(pid: int) -> bool:
    """Whether a process of this number exists, ours or not. A number is used again sooner or later: a hint only."""
    if pid <= 0:  # 0 and below address groups of processes
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
