"""What differs from machine to machine: BLAS, open files, the cache's place, how a file is made durable.

Never imports MLX, and must not: a fast BLAS only takes effect when it is loaded before `mlx.core` is.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import platformdirs

from mlxkv.core.units import format_bytes

_OPENBLAS = "libopenblas.so.0"
_NVIDIA = ("/dev/nvidia0", "/proc/driver/nvidia")
_ENOUGH_OPEN_FILES = 8192
_F_BARRIERFSYNC = 85  # <sys/fcntl.h> of macOS; Python's fcntl does not name it


@dataclass(frozen=True)
class BlasReport:
    """Which BLAS MLX's float32 matrix products on the CPU will use.

    `name` and `path` are None when MLX keeps its own reference BLAS. `fix` is a command to type, and is there only
    when long prompts will be slow without anybody having asked for it.
    """

    name: str | None
    path: str | None
    why: str
    fix: str | None = None

    @property
    def warning(self) -> str | None:
        """One sentence to show once, or None when there is nothing to fix."""
        return f"{self.why}; long prompts will be slow. To fix it: {self.fix}" if self.fix else None


@cache
def load_fast_blas() -> BlasReport:
    """Find MKL or OpenBLAS and load it ahead of the reference BLAS that `mlx[cpu]` brings; once a process.

    MLX calls plain `cblas_sgemm`, and the first library of the process that has it wins, so this must run before
    `import mlx.core`: `mlxkv/__init__.py` calls it first of all. Linux without a GPU only.
    `MLXKV_BLAS=none` leaves MLX alone, `MLXKV_BLAS=/path/to/lib.so` names the library.

    Cost: 1 to 4 ms, most of it mapping the library.
    """
    wish = os.environ.get("MLXKV_BLAS", "")
    if sys.platform == "darwin":
        return BlasReport("Accelerate", None, "macOS brings it, and MLX is built on it")
    if wish == "none":
        return BlasReport(None, None, "switched off by MLXKV_BLAS=none")
    if "mlx.core" in sys.modules:
        return BlasReport(None, None, "mlx.core was imported before mlxkv", "import mlxkv before mlx")
    if wish:
        try:
            return BlasReport(*_load(wish), "named by MLXKV_BLAS")
        except OSError as error:
            return BlasReport(None, None, f"MLXKV_BLAS={wish} cannot be loaded ({error})", "unset MLXKV_BLAS")
    if any(os.path.exists(path) for path in _NVIDIA):
        return BlasReport(None, None, "this machine has a GPU, which computes instead")
    failures: list[str] = []
    for library, origin in _candidates(sys.path, sys.prefix):
        try:
            return BlasReport(*_load(library), origin)
        except OSError as error:
            if library != _OPENBLAS:
                failures.append(f"{origin} cannot be loaded ({error})")
    return BlasReport(None, None, "; ".join(failures) or "no OpenBLAS and no MKL found", _install_command())


def _candidates(search_path: list[str], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (library, where it comes from), best first; those given by path exist.

    Wheels come before the system's library: someone put them here on purpose, and they are newer. Float32 products
    of 768 x 768 on two cores of a 2023 Xeon: reference 2.7 GFLOP/s, Debian 12's OpenBLAS 0.3.21 35,
    cmeel-openblas 0.3.31 200, mkl 2026.2 240.
    """
    for library in sorted(Path(prefix, "lib").glob("libmkl_rt.so.*"), reverse=True):
        yield str(library), "the wheel mkl"
    for folder in search_path:
        wheel = Path(folder, "cmeel.prefix", "lib", _OPENBLAS)
        if wheel.is_file():
            yield str(wheel), "the wheel cmeel-openblas"
    yield _OPENBLAS, "the system's OpenBLAS"


def _load(library: str) -> tuple[str, str]:
    """Load `library` for every later library to see; its name and path. Raises OSError when it is no BLAS."""
    handle = ctypes.CDLL(library)
    try:
        handle.cblas_sgemm  # noqa: B018 - reading the attribute is the look-up
    except AttributeError:
        raise OSError(f"{library} has no cblas_sgemm") from None
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    file_name = os.path.basename(library)
    name = "OpenBLAS" if "openblas" in file_name else "MKL" if "mkl" in file_name else file_name
    return name, library if "/" in library else _mapped_path(library)


def _mapped_path(file_name: str) -> str:
    """Where the dynamic linker found a library that was asked for by name; the name itself when it does not say."""
    stem = file_name.partition(".so")[0]
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if os.path.basename(path).startswith(stem):
                return f"/{path}"
    return file_name


def _install_command() -> str:
    """What brings a BLAS to this machine; the wheel needs the system's libgfortran.so.5, Debian's package brings it."""
    try:
        ctypes.CDLL("libgfortran.so.5")
    except OSError:
        if shutil.which("apt-get"):
            return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install libopenblas0-pthread"
    return f"{shlex.quote(sys.executable)} -m pip install --no-deps cmeel-openblas"


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
        system=f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else f"Linux {platform.release()}",
        python=platform.python_version(),
    )


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
