"""What the benchmarks share: the machine, the clock, and one table at the end.

Variants that are compared run in turns within one process, in another order each round, so that a busy machine hits all
of them. A ratio is the median over the rounds of the ratio within a round: it moves less than a ratio of medians.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlxkv  # loads the fast BLAS, so it comes before mlx

# isort: split

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.core.blas import load_fast_blas
from mlxkv.core.platform import machine_description
from mlxkv.core.units import format_bytes

PACKAGES = ("mlxkv", "mlx", "mlx-lm", "numpy")


@dataclass(frozen=True)
class Samples:
    """Seconds of one variant, a number a round; `cpu_seconds` are the whole process's, all threads together.

    CPU seconds are steadier than the clock on a busy machine, unless a BLAS with several threads spins while it waits:
    OPENBLAS_NUM_THREADS=1 stops that.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p90(self) -> float:
        return (
            statistics.quantiles(self.seconds, n=10, method="inclusive")[-1] if len(self.seconds) > 1 else self.median
        )

    def over(self, other: Samples) -> float:
        """Median of the ratios round by round."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


@dataclass(frozen=True)
class Figure:
    """One line of the result. `value` is held against `most` or `least`, where there is one."""

    name: str
    value: float
    unit: str
    detail: str
    most: float | None = None
    least: float | None = None
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.most is not None:
            return self.value <= self.most
        return self.value >= self.least if self.least is not None else None

    def line(self) -> str:
        target = ""
        if self.met is not None:
            target = f"at most {self.most:g}" if self.most is not None else f"at least {self.least:g}"
            target += "   met" if self.met else "   MISSED"
        return f"{self.name:<46} {self.value:>8.3g} {self.unit:<9} {target:<22} {self.detail}"


def in_turns(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Samples]:
    """Run every variant once a round, each round beginning with another one; a variant returns its own seconds."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    names = list(variants)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            before = time.process_time()
            seconds = variants[name]()
            found[name].append((seconds, time.process_time() - before))
    return {name: Samples(*zip(*pairs, strict=True)) for name, pairs in found.items()}


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """`work` as a variant: its result is dropped after the clock has stopped."""

    def run() -> float:
        started = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - started
        del result
        return seconds

    return run


def shown(**variants: Samples) -> str:
    """`on 1.20 s (p90 1.31), off 1.18 s (p90 1.25)`."""
    return ", ".join(f"{name} {_seconds(s.median)} (p90 {_seconds(s.p90)})" for name, s in variants.items())


def rate(nbytes: int, samples: Samples) -> str:
    return f"{nbytes / samples.median / 1e9:.1f} GB/s"


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", metavar="FILE", type=Path, help="write everything measured to this file too")
    made.add_argument("--rounds", metavar="N", type=int, default=7, help="rounds of each comparison (default 7)")
    return made


def head() -> dict[str, str]:
    """What a figure means nothing without. No host name, no path."""
    blas = load_fast_blas()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    arguments = sys.argv[1:]
    if "--json" in arguments:
        del arguments[arguments.index("--json") : arguments.index("--json") + 2]
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "machine": str(machine_description()),
        "device": f"{mx.default_device()}, BLAS {blas.name or 'of MLX itself'}",
        "versions": ", ".join(versions),
        "load": f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores when it began",
    }


def report(started: Mapping[str, str], figures: Sequence[Figure], file: Path | None) -> int:
    """Print the table, write the file, and return the exit code: 1 when a target was missed."""
    print()
    for name, value in started.items():
        print(f"{name:<9} {value}")
    print()
    for figure in figures:
        print(figure.line())
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(figure), "met": figure.met} for figure in figures]
        file.write_text(json.dumps({**started, "figures": rows}, indent=1), encoding="utf-8")
    return 1 if any(figure.met is False for figure in figures) else 0


def say(text: str) -> None:
    """What is going on, on stderr."""
    print(text, file=sys.stderr, flush=True)


def greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def plain_prefill(module: nn.Module, prompt: Sequence[int], chunk_tokens: int) -> list[object]:
    """mlx-lm's own prefill loop over all tokens but the last, without any block cache."""
    prompt_cache: list[object] = make_prompt_cache(module)
    for start in range(0, len(prompt) - 1, chunk_tokens):
        stop = min(start + chunk_tokens, len(prompt) - 1)
        module(mx.array(prompt[start:stop])[None], cache=prompt_cache)
        mx.eval([cache.state for cache in prompt_cache])  # type: ignore[attr-defined]
    return prompt_cache


def first_token(module: nn.Module, prompt: Sequence[int], prompt_cache: list[object]) -> int:
    """The token after `prompt`, all but the last token of which are in `prompt_cache`."""
    logits = module(mx.array(prompt[-1:])[None], cache=prompt_cache)[:, -1, :]
    return int(greedy(logits - mx.logsumexp(logits, axis=-1, keepdims=True)).item())


def _seconds(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.1f} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.0f} us"
    )


__all__ = [
    "Figure", "Samples", "first_token", "format_bytes", "greedy", "head", "in_turns", "mlxkv", "parser",
    "plain_prefill", "rate", "report", "say", "shown", "timed",
]  # fmt: skip
