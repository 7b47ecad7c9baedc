"""How long the first token takes cold, hot and from the disk, and how near the restores come to what this machine can.

Times are medians and never fail a check: a busy machine is slow and not wrong. What fails is a run that did not reuse
what it should have.
"""

from __future__ import annotations

import fcntl
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mlxkv.core.platform import sync_file_fully
from mlxkv.core.units import MIB, format_bytes, format_seconds
from mlxkv.prove.check import Check, Figure
from mlxkv.prove.runs import STEPS, Run, Subject, open_blocks, run_cached

ROUNDS = 3
_ENOUGH_S = 25.0  # of cold and hot rounds, and of those from the SSD: on a busy machine there are fewer
_RATE_BYTES = 64 * MIB
_F_NOCACHE = 48  # <sys/fcntl.h> of macOS
_NO_REUSE = "Report it, with `mlxkv doctor --json`; until then every prompt is computed in full."


def check_speed(subject: Subject) -> tuple[Check, ...]:
    """First tokens, decoding and restores, each the median of up to three rounds."""
    cold, hot, ssd = [], [], []
    for turn in _rounds(ROUNDS):
        with open_blocks(subject, hot=True) as cache:
            cold.append(run_cached(subject.model, cache, subject.prompt, salt=f"speed {turn}"))
            hot.append(run_cached(subject.model, cache, subject.prompt, salt=f"speed {turn}"))
    for turn in _rounds(len(cold)):
        with open_blocks(subject, hot=False) as cache:
            ssd.append(run_cached(subject.model, cache, subject.prompt, salt=f"speed {turn}", steps=1))
    return (
        _first_tokens(subject, cold, hot, ssd),
        _decoding([*cold, *hot]),
        _restoring(subject.scratch, hot, ssd),
    )


def _rounds(most: int) -> Iterator[int]:
    """The numbers of the rounds: at least one, and none begins once enough time went by."""
    until = time.monotonic() + _ENOUGH_S
    for turn in range(most):
        if turn and time.monotonic() > until:
            return
        yield turn


def _first_tokens(subject: Subject, cold: Sequence[Run], hot: Sequence[Run], ssd: Sequence[Run]) -> Check:
    cold_s, hot_s, ssd_s = (statistics.median(run.first_token_s for run in runs) for runs in (cold, hot, ssd))
    figures: dict[str, Figure] = {
        "prompt_tokens": len(subject.prompt), "cold_s": cold_s, "hot_s": hot_s, "ssd_s": ssd_s, "rounds": len(cold),
    }  # fmt: skip
    said = (
        f"{len(subject.prompt):,} tokens: cold {format_seconds(cold_s)}, hot {format_seconds(hot_s)}, SSD"
        f" {format_seconds(ssd_s)}"
    )
    missed = [name for name, runs in (("hot", hot), ("SSD", ssd)) if not all(_reused(run, name) for run in runs)]
    if missed:
        return Check("first token", "fail", f"nothing was reused {' and '.join(missed)}; {said}", figures, _NO_REUSE)
    slower = [name for name, seconds in (("memory", hot_s), ("the SSD", ssd_s)) if seconds > cold_s]
    if slower:
        return Check("first token", "note", said, figures,
                     f"Restoring from {' and '.join(slower)} took longer than computing; on a quiet machine run it"
                     " again, and if it stays so use --no-cold with this model.")  # fmt: skip
    return Check("first token", "ok", said, figures)


def _reused(run: Run, tier: str) -> bool:
    return (run.hot_tokens if tier == "hot" else run.cold_tokens) > 0


def _decoding(runs: Sequence[Run]) -> Check:
    step_s = statistics.median(seconds for run in runs for seconds in run.step_s)
    figures: dict[str, Figure] = {"tokens_per_s": 1 / step_s, "steps": len(runs) * (STEPS - 1)}
    return Check("decode", "ok", f"{1 / step_s:,.1f} tokens/s, one sequence", figures)


def _restoring(scratch: Path, hot: Sequence[Run], ssd: Sequence[Run]) -> Check:
    """Rates of the restores beside a plain copy in memory and a plain read of a file, cached and not."""
    copy = copy_rate()
    cached, uncached = read_rates(scratch / "plain")
    hot_rate, ssd_rate = (_median_rate(runs) for runs in (hot, ssd))
    figures: dict[str, Figure] = {
        "restored_bytes": hot[0].restored_bytes,
        "hot_bytes_per_s": hot_rate,
        "copy_bytes_per_s": copy,
        "ssd_bytes_per_s": ssd_rate,
        "cached_read_bytes_per_s": cached,
        "disk_read_bytes_per_s": uncached,
    }
    disk = "not to be had" if uncached is None else _rate(uncached)
    said = (
        f"{format_bytes(hot[0].restored_bytes)} hot at {_rate(hot_rate)} (a copy: {_rate(copy)}), SSD {_rate(ssd_rate)}"
        f" (a plain read: {_rate(cached)} from the file cache, {disk} from the disk)"
    )
    return Check("restore rate", "ok", said, figures)


def _median_rate(runs: Sequence[Run]) -> float:
    return statistics.median(run.restored_bytes / run.restore_s if run.restore_s else 0.0 for run in runs)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s"


def copy_rate() -> float:
    """Bytes per second of a copy in memory that is already there."""
    source = np.ones(_RATE_BYTES, np.uint8)
    target = np.ones_like(source)
    return _median(lambda: np.copyto(target, source))


def read_rates(path: Path) -> tuple[float, float | None]:
    """Bytes per second of reading a file in one piece: from the system's file cache, and past it where one can."""
    target = np.zeros(_RATE_BYTES, np.uint8)
    with open(path, "w+b", buffering=0) as file:
        file.write(np.random.default_rng(0).bytes(_RATE_BYTES))
        sync_file_fully(file.fileno())
        cached = _median(lambda: os.preadv(file.fileno(), [target.data], 0))
        past = _median(lambda: os.preadv(file.fileno(), [target.data], 0), lambda: _drop(file.fileno()))
        dropped = _drop(file.fileno())
    path.unlink()
    return cached, past if dropped else None


def _drop(fd: int) -> bool:
    """Make the next read come from the disk; False where nobody can."""
    try:
        if sys.platform == "darwin":
            fcntl.fcntl(fd, _F_NOCACHE, 1)
        else:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        return False
    return True


def _median(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    rates = []
    for _ in range(ROUNDS):
        before()
        started = time.perf_counter()
        work()
        rates.append(_RATE_BYTES / (time.perf_counter() - started))
    return statistics.median(rates)
