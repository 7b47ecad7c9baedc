"""Memory against context as a picture, with the limit as a line. matplotlib is the extra `plot`."""

from __future__ import annotations

import sys
from pathlib import Path

from mlxkv.budget.memory import MOST_SHARE
from mlxkv.budget.plan import Plan
from mlxkv.core.errors import UsageError
from mlxkv.core.units import GIB

_SUFFIXES = (".svg", ".png")
_POINTS = 256
_LAYERS = ("weights", "runtime and hot tier", "KV", "prefill transient")


def check_plot_file(path: Path) -> None:
    """Raise `UsageError` unless the picture can be written there: before anything is computed for it."""
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"a plot is an .svg or .png file, and {path.name} is neither; name it {path.stem}.svg.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {path.absolute().parent} for the plot; make it first.")


def plot(plan: Plan, path: Path) -> None:
    """Draw the terms of the total, stacked, from one token to the longest row, and write it to `path`.

    Raises `UsageError` when matplotlib is missing, with what to type.
    """
    check_plot_file(path)
    try:
        from matplotlib.figure import Figure  # an extra, and 0.5 s to import
    except ImportError as error:
        raise UsageError(
            f"--plot needs matplotlib; run `{sys.executable} -m pip install 'mlxkv[plot]'` first."
        ) from error
    last = plan.contexts[-1].tokens
    even = {1 + (last - 1) * point // _POINTS for point in range(_POINTS)}
    tokens = sorted(even | {row.tokens for row in plan.contexts})
    bills = [plan.deployment.memory(count, plan.contexts[0].sequences) for count in tokens]
    layers = [
        [bill.weights_bytes / GIB for bill in bills],
        [(bill.runtime_bytes + bill.hot_bytes) / GIB for bill in bills],
        [(bill.kv_bytes + bill.slack_bytes) / GIB for bill in bills],
        [bill.transient_bytes / GIB for bill in bills],
    ]
    limit = plan.machine.gpu_limit_bytes / GIB
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.stackplot(tokens, layers, labels=_LAYERS)
    axes.axhline(limit, color="black", label=f"GPU limit {limit:.2f} GiB")
    axes.axhline(limit * MOST_SHARE, color="black", linestyle="--", label=f"{MOST_SHARE:.0%} of it")
    axes.set(title=f"{plan.model} on {plan.machine.chip or 'this machine'}", xlabel="context, tokens", ylabel="GiB")
    axes.set_xlim(1, last)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(loc="upper left", reverse=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
