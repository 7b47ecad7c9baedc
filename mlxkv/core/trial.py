"""Trying native code in a child process, where it may crash or hang, and remembering how it went on this CPU.

The child is a fork: it sees the same CPU (a program started anew does not under an emulator), the same search paths and
the same variables. Linux and other systems with `fork` only; nothing here is needed on macOS.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import platformdirs

PASSED, UNUSABLE = "passed", "cannot be used"
TRIAL_S = 20.0  # a loaded machine under an emulator took 2
_FILE_NAME = "trials.json"
_MOST_REMEMBERED = 200
_AT_HWCAP, _AT_HWCAP2 = 16, 26  # <elf.h>
_LEAVES = 9  # of cpuid, all that glibc keeps
_VARIABLES = ("OPENBLAS_", "MKL_")


@dataclass(frozen=True)
class Trial:
    """A library and how it did: `verdict` is `passed`, or what was wrong, as a person reads it."""

    path: str
    origin: str
    verdict: str

    @property
    def passed(self) -> bool:
        return self.verdict == PASSED


def remembered(path: str, work: Callable[[], str], *, again: bool = False) -> str:
    """The verdict of `work` in a child on the file at `path`: the remembered one, or a new one, which is remembered.

    Another file at the path, another CPU, or other variables that choose kernels are another question. What may be
    different the next time is not remembered: a library that lacks another one, a child that hung beside threads.
    """
    key = _key(path)
    verdict = None if again else _recall(key)
    if verdict is None:
        verdict = run_apart(work)
        passing = verdict.startswith(UNUSABLE) or (verdict == "hung" and _threads() > 1)
        if not passing:
            _remember(key, verdict)
    return verdict


def run_apart(work: Callable[[], str]) -> str:
    """What `work` returns in a forked child; else how that ended: `died by SIGILL`, `hung`, `cannot be used (...)`.

    Cost: a fork, about 1 ms for a process of 30 MB.
    """
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child only calls `work`
        child = os.fork()
    if child == 0:
        _be_the_child(work, receiver, sender)
    os.close(sender)
    try:
        said = _said(receiver, TRIAL_S)
    finally:
        os.close(receiver)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # it has said what it had to say, or never will
        status = _status(child)
    if said:
        return said
    if said is None:
        return "hung"
    return f"died by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "ended without a word"


def _be_the_child(work: Callable[[], str], receiver: int, sender: int) -> None:
    """Never returns, and leaves nothing behind: no core file, no output, no handler of the parent's that runs."""
    try:
        os.close(receiver)
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT):
            signal.signal(number, signal.SIG_DFL)
        try:
            said = work()
        except Exception as error:  # noqa: BLE001 - told to the parent: no exception of a child may go further
            said = f"{UNUSABLE} ({error})"
        os.write(sender, said.encode()[:2000])
    finally:
        os._exit(0)


def _said(receiver: int, seconds: float) -> str | None:
    """What the child wrote before it closed its end: empty when it died without a word; None when time was up."""
    until, parts = time.monotonic() + seconds, b""
    while True:
        ready, _, _ = select.select([receiver], [], [], max(until - time.monotonic(), 0))
        if not ready:
            return None
        part = os.read(receiver, 4096)
        if not part:
            return parts.decode(errors="replace")
        parts += part


def _status(child: int) -> int:
    try:
        return os.waitpid(child, 0)[1]
    except ChildProcessError:  # somebody else in this process waits for every child
        return 0


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def recall_path(name: str, find: Callable[[], str]) -> str:
    """Where the dynamic linker found `name`: remembered while the file is there, else what `find` says in a child."""
    key = json.dumps(["where", name, os.environ.get("LD_LIBRARY_PATH", ""), platform.machine()])
    path = _recall(key)
    if path is None or not os.path.isfile(path):
        path = run_apart(find)
        if path.startswith("/"):
            _remember(key, path)
    return path


def _key(path: str) -> str:
    status = os.stat(path)
    chosen = sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES))
    file = [os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ino]
    return json.dumps([file, cpu_identity(), chosen])


@cache
def cpu_identity() -> tuple[object, ...]:
    """What the CPU that this process sees can do, by glibc: under an emulator the emulated one."""
    found: list[object] = [platform.machine(), sys.maxsize]
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.getauxval.restype = ctypes.c_ulong
        found += [libc.getauxval(ctypes.c_ulong(kind)) for kind in (_AT_HWCAP, _AT_HWCAP2)]
    with contextlib.suppress(AttributeError):  # glibc 2.33 and later, x86 only; <sys/platform/x86.h>
        leaf = libc.__x86_get_cpuid_feature_leaf
        leaf.restype = ctypes.POINTER(_Leaf)
        return (*found, *(tuple(leaf(i).contents.active) for i in range(_LEAVES)))
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        wanted = ("model name", "flags", "Features", "CPU part")
        found += sorted({line for line in lines if line.startswith(wanted)})
    return tuple(found)


class _Leaf(ctypes.Structure):
    """`struct cpuid_feature`: what the CPU says of itself, and what of it may be used."""

    _fields_ = [("cpuid", ctypes.c_uint * 4), ("active", ctypes.c_uint * 4)]


def _file() -> Path:
    return platformdirs.user_cache_path("mlxkv") / _FILE_NAME


def _load() -> dict[str, str]:
    """What is remembered; nothing where the file is missing, damaged or another's."""
    try:
        held = json.loads(_file().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(held, dict):
        return {}
    return {key: value for key, value in held.items() if isinstance(value, str)}


def _recall(key: str) -> str | None:
    return _load().get(key)


def _remember(key: str, value: str) -> None:
    """Add one answer. Of two processes that do so at once one may be forgotten; it is asked again then."""
    held = _load()
    held.pop(key, None)
    held[key] = value
    newest = dict(list(held.items())[-_MOST_REMEMBERED:])
    temporary = _file().with_name(f".{_FILE_NAME}.{os.getpid()}.{time.monotonic_ns()}")
    with contextlib.suppress(OSError):  # a folder that cannot be written: then each start asks
        temporary.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps(newest, indent=1), encoding="utf-8")
            os.replace(temporary, _file())
        finally:
            temporary.unlink(missing_ok=True)
