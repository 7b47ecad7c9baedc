"""Which BLAS computes: found, tried in a child process, and loaded ahead of MLX's own; and whether MLX runs at all.

A library may be built for another CPU (the wheel of OpenBLAS is built for one) and die by a signal in the first
product. So none is loaded before a fork of this process has multiplied with it and compared. The verdict is remembered
for that file and this CPU; looking it up takes under a millisecond.

Never imports MLX: a BLAS only takes effect when it is loaded before `mlx.core` is.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from mlxkv.core.errors import UnusableMlxError
from mlxkv.core.trial import PASSED, Trial, recall_path, remembered

_OPENBLAS = "libopenblas.so.0"
_NOT_INSTALLED = "not installed"
_NVIDIA = ("/dev/nvidia0", "/proc/driver/nvidia")
_SHAPES = ((1, 64, 64), (7, 33, 65), (64, 64, 64), (130, 257, 96), (300, 576, 320))
"""M, K, N: a vector, odd edges, a block, and more than the blocks of a kernel, which threads share."""
_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112
_RTLD_DI_LINKMAP = 2  # <dlfcn.h>

logger = logging.getLogger("mlxkv")


@dataclass(frozen=True)
class BlasReport:
    """Which BLAS MLX's float32 matrix products on the CPU will use.

    `name` and `path` are None when MLX keeps its own reference BLAS. `fix` is a command to type, and is there only
    when something is not as it was asked for or long prompts will be slow. `tried` is each library that was a
    candidate, best first, up to the one that is used.
    """

    name: str | None
    path: str | None
    why: str
    fix: str | None = None
    tried: tuple[Trial, ...] = ()

    @property
    def warning(self) -> str | None:
        """One sentence to show once, or None when there is nothing to fix."""
        if not self.fix:
            return None
        slow = "" if self.name else "; long prompts will be slow"
        return f"{self.why}{slow}. To fix it: {self.fix}"


@cache
def load_fast_blas() -> BlasReport:
    """Find MKL or OpenBLAS and load it ahead of the reference BLAS that `mlx[cpu]` brings; once a process.

    MLX calls plain `cblas_sgemm`, and the first library of the process that has it wins, so this must run before
    `import mlx.core`: `mlxkv/__init__.py` calls it first of all. Linux without a GPU only.
    `MLXKV_BLAS=none` leaves MLX alone, `MLXKV_BLAS=/path/to/lib.so` names the library. One that dies, computes wrong
    numbers or hangs is passed over; was it named, a warning says so.

    Cost: 1 to 4 ms, most of it mapping the library; 0.2 s more when a library is tried for the first time.
    """
    report = choose_blas()
    if report.path is not None:
        ctypes.CDLL(report.path, ctypes.RTLD_GLOBAL)
    wish = os.environ.get("MLXKV_BLAS", "")
    if wish not in ("", "none") and report.fix:
        logger.warning("%s", report.warning)
        os.environ["MLXKV_BLAS"] = report.path or "none"  # processes started from here need not find out again
    return report


def choose_blas(*, again: bool = False) -> BlasReport:
    """What `load_fast_blas` would load; loads nothing here.

    Args:
        again: try every library anew, whatever is remembered of it.
    """
    wish = os.environ.get("MLXKV_BLAS", "")
    if sys.platform == "darwin":
        return BlasReport("Accelerate", None, "macOS brings it, and MLX is built on it")
    if wish == "none":
        return BlasReport(None, None, "switched off by MLXKV_BLAS=none")
    if "mlx.core" in sys.modules and not again:
        return BlasReport(None, None, "mlx.core was imported before mlxkv", "import mlxkv before mlx")
    named = [(wish, "named by MLXKV_BLAS")] if wish else []
    if not wish and any(os.path.exists(path) for path in _NVIDIA):
        return BlasReport(None, None, "this machine has a GPU, which computes instead")
    tried: list[Trial] = []
    for library, origin in [*named, *_candidates(sys.path, sys.prefix)]:
        trial = try_blas(library, origin, again=again)
        tried.append(trial)
        if trial.passed:
            break
    chosen = tried[-1] if tried and tried[-1].passed else None
    why, fix = _explained(tried, chosen, wish)
    if chosen is None:
        return BlasReport(None, None, why, fix, tuple(tried))
    return BlasReport(_name(chosen.path), chosen.path, why, fix, tuple(tried))


def try_blas(library: str, origin: str, *, again: bool = False) -> Trial:
    """Whether `library` multiplies rightly on this CPU, found out by a child process or remembered.

    Args:
        library: a path, or a name that the dynamic linker finds.
    """
    path = library if "/" in library else recall_path(library, lambda: _mapped_path(library))
    if not path.startswith("/") and "/" not in library:
        return Trial(library, origin, path)
    if not os.path.isfile(path):
        return Trial(path, origin, "no such file")
    return Trial(path, origin, remembered(path, lambda: _multiply(path), again=again))


def check_mlx() -> None:
    """Put a sentence in the place of the signal that `import mlx.core` would die by on this CPU.

    What a child process found out is remembered for MLX's files and this CPU. Where it cannot run, importing `mlx.core`
    raises `UnusableMlxError` from now on. Cost: under 1 ms; 0.3 s the first time.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return
    spec = find_spec("mlx")
    if spec is None or not spec.submodule_search_locations:
        return  # importing it says so itself
    library = next((f for d in spec.submodule_search_locations for f in Path(d).glob("lib/libmlx.*")), None)
    if library is None:
        return
    verdict = remembered(str(library), _run_mlx)
    if verdict.startswith("died"):
        sys.meta_path.insert(0, _Refusing(verdict))


class _Refusing:
    """An importer that says why MLX cannot be imported."""

    def __init__(self, verdict: str) -> None:
        self._verdict = verdict

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        del path, target
        if name == "mlx.core":
            raise UnusableMlxError(
                f"MLX {self._verdict} on this CPU: its build needs instructions that the CPU lacks. Install an mlx that"
                f" is built for it (from source: {shlex.quote(sys.executable)} -m pip install --no-binary mlx mlx), or"
                " use another machine."
            )
        return None


def _multiply(path: str) -> str:
    """In the child: products of a few shapes, plain and transposed, against whole numbers that are exact in float32."""
    library = ctypes.CDLL(path)
    try:
        gemm = library.cblas_sgemm
    except AttributeError:
        return "has no cblas_sgemm"
    import numpy as np  # in the child only: a start would wait 80 ms for it

    random = np.random.default_rng(1)
    for m, k, n in _SHAPES:
        a, b = random.integers(-8, 9, (m, k)), random.integers(-8, 9, (k, n))
        expected = a @ b  # NumPy multiplies whole numbers itself, without a BLAS
        for left, right in ((_PLAIN, _PLAIN), (_PLAIN, _TRANSPOSED), (_TRANSPOSED, _PLAIN)):
            x = np.ascontiguousarray(a if left == _PLAIN else a.T, np.float32)
            y = np.ascontiguousarray(b if right == _PLAIN else b.T, np.float32)
            found = np.full((m, n), np.nan, np.float32)
            pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, y, found)]
            gemm(_ROW_MAJOR, left, right, m, n, k, ctypes.c_float(1), pointers[0], x.shape[1], pointers[1], y.shape[1],
                 ctypes.c_float(0), pointers[2], n)  # fmt: skip
            if not np.array_equal(found, expected):
                return f"computes wrong numbers ({m} x {k} by {k} x {n})"
    return PASSED


def _run_mlx() -> str:
    """In the child."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    a = mx.random.normal((1, 1, 64, 64))
    mx.eval(a @ a, mx.fast.scaled_dot_product_attention(a, a, a, scale=1.0), mx.softmax(a, axis=-1))
    return PASSED


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


def _explained(tried: Sequence[Trial], chosen: Trial | None, wish: str) -> tuple[str, str | None]:
    """Why it is this one, and what to type when it is not as it should be."""
    failed = [trial for trial in tried if not trial.passed and trial.verdict != _NOT_INSTALLED]
    if wish and tried and not tried[0].passed:
        instead = f"{_name(chosen.path)} is used instead" if chosen else "MLX's own BLAS is used instead"
        return f"MLXKV_BLAS={wish}: {tried[0].verdict}, so {instead}", "unset MLXKV_BLAS"
    if chosen is not None:
        return chosen.origin, None
    why = "; ".join(f"{trial.origin}: {trial.verdict}" for trial in failed)
    return why or "no OpenBLAS and no MKL found", _install_command(failed)


def _name(path: str) -> str:
    file_name = os.path.basename(path)
    return "OpenBLAS" if "openblas" in file_name else "MKL" if "mkl" in file_name else file_name


def _mapped_path(file_name: str) -> str:
    """In a child: load a library by name and ask the dynamic linker where it was."""
    try:
        handle = ctypes.CDLL(file_name)
    except OSError:
        return _NOT_INSTALLED
    linked = ctypes.POINTER(_LinkMap)()
    dlinfo = ctypes.CDLL(None).dlinfo
    dlinfo.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    if dlinfo(handle._handle, _RTLD_DI_LINKMAP, ctypes.byref(linked)) != 0:
        return _NOT_INSTALLED
    return os.path.realpath(os.fsdecode(linked.contents.path))


class _LinkMap(ctypes.Structure):
    """The head of `struct link_map`, <link.h>."""

    _fields_ = [("address", ctypes.c_void_p), ("path", ctypes.c_char_p)]


def _install_command(failed: Sequence[Trial]) -> str:
    """What brings a BLAS to this machine; the wheel needs the system's libgfortran.so.5, Debian's package brings it.

    Debian's package chooses its kernels by the CPU it runs on, so it is what to take where the wheel failed.
    """
    try:
        ctypes.CDLL("libgfortran.so.5")
        wheel = not any("cmeel" in trial.origin for trial in failed)
    except OSError:
        wheel = False
    if not wheel and shutil.which("apt-get"):
        return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install libopenblas0-pthread"
    package = "--no-deps cmeel-openblas" if wheel else "mkl"
    return f"{shlex.quote(sys.executable)} -m pip install {package}"
