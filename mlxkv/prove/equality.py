"""Restored = fresh on this device and in this dtype: from memory, from the disk, and in a new process.

Two comparisons. The restored keys and values against those that were published: to the bit, for they are copies. The
logits against a run of mlx-lm alone: to the bit, or within a bound where the device rounds the same product in
different ways; which of the two it was is said.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxkv.prove.check import Check, Figure
from mlxkv.prove.runs import Run, Subject, open_blocks, run_apart, run_cached, run_plain

LOGIT_BOUNDS = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""Largest difference of two logits over the spread of all (their standard deviation), by the dtype computed in."""
_SALT = "equality"
_ADVICE = "Do not use the cache with this model on this device (`--hot 0 --no-cold`), and report it."


def check_equality(subject: Subject, *, apart: bool = True) -> tuple[Check, ...]:
    """Publish a prompt, find it hot and cold and, if `apart`, from a new process; compare each with a fresh run."""
    fresh = run_plain(subject.model, subject.prompt)
    with open_blocks(subject, hot=True) as cache:
        uncached = cache.uncached
        if uncached is None:
            published = run_cached(subject.model, cache, subject.prompt, salt=_SALT)
            hot = run_cached(subject.model, cache, subject.prompt, salt=_SALT)
    if uncached is not None:
        advice = "The model runs, and every prompt is computed; docs/kinds.md says which kinds are kept."
        return (Check("restored = fresh", "note", f"nothing is kept of this model: {uncached}", {}, advice),)
    with open_blocks(subject, hot=False) as cache:
        cold = run_cached(subject.model, cache, subject.prompt, salt=_SALT)
    dtype = dtype_of(subject)
    restored = {"hot": hot, "cold": cold} | ({"new process": run_apart(subject, _SALT)} if apart else {})
    return (
        compare("published = fresh", published, published, fresh, dtype, restores=False),
        *(compare(f"{name} = fresh", run, published, fresh, dtype) for name, run in restored.items()),
    )


def compare(name: str, run: Run, published: Run, fresh: Run, dtype: str, *, restores: bool = True) -> Check:
    """One run against the one that published and one without any cache."""
    held = run.hot_tokens + run.cold_tokens
    difference = logit_difference(run.logits, fresh.logits)
    figures: dict[str, Figure] = {
        "dtype": dtype,
        "restored_tokens": held,
        "state_equal": run.state == published.state if run.state else None,
        "logits_equal": difference == 0,
        "logit_difference": difference if np.isfinite(difference) else None,
        "logit_bound": LOGIT_BOUNDS[dtype],
    }
    if restores and not held:
        return Check(name, "fail", "nothing was restored", figures, _ADVICE)
    if run.state != published.state:
        return Check(name, "fail", "restored keys and values are not those that were published", figures, _ADVICE)
    if not difference <= LOGIT_BOUNDS[dtype]:
        said = f"logits differ by {difference:.1e} of their spread, where {dtype} allows {LOGIT_BOUNDS[dtype]:.0e}"
        return Check(name, "fail", said, figures, _ADVICE)
    near = f"logits within {difference:.0e}, where {dtype} allows {LOGIT_BOUNDS[dtype]:.0e}"
    logits = "logits equal to the bit" if difference == 0 else near
    if not restores:
        return Check(name, "ok", f"{dtype}, {logits}", figures)
    state = "state equal to the bit" if run.state else "windows or states seen through the logits"
    return Check(name, "ok", f"{dtype}, {held:,} tokens restored: {state}, {logits}", figures)


def logit_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference over the spread of what is expected; infinity where one is not a number."""
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return float("inf")
    return float(np.abs(found - expected).max() / max(float(expected.std()), 1e-30))


def dtype_of(subject: Subject) -> str:
    """The dtype the model computes in, seen in the logits of one token."""
    dtype = subject.model.module(mx.array([[subject.prompt[0]]])).dtype
    return str(dtype).rpartition(".")[2]
