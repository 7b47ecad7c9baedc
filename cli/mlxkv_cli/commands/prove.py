"""`mlxkv doctor --prove`: run once on a new machine, whether everything that is promised holds there."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path

import typer

from mlxkv.core.blas import load_fast_blas
from mlxkv.core.errors import MlxkvError, UsageError
from mlxkv.core.platform import machine_description
from mlxkv_cli.caching import warnings_on
from mlxkv_cli.output import Output

_PACKAGES = ("mlxkv", "mlx", "mlx-lm")

# MLX, the models and the checks are imported inside: `mlxkv doctor` must not wait for them.


def prove_here(output: Output, model: str | None, cache_dir: Path, report: Path | None) -> None:
    """Run all checks in a scratch directory beside the cache root; ends the command with code 1 when one fails."""
    from mlxkv.models.loader import DEMO, on_cpu
    from mlxkv.prove.check import worst
    from mlxkv.prove.prove import prove
    from mlxkv.prove.report import markdown
    from mlxkv.prove.scratch import scratch_beside
    from mlxkv_cli.prove_page import prove_page

    if report is not None and not report.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {report.absolute().parent} for the report; make it first.")
    started = time.monotonic()
    chosen = model or DEMO
    with warnings_on(output), scratch_beside(cache_dir) as scratch, output.steps() as tell:
        groups = tuple(prove(chosen, scratch, tell))
    seconds = time.monotonic() - started
    machine = machine_description()
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    device = f"CPU, BLAS {load_fast_blas().name or 'reference'}" if on_cpu() else "GPU"
    facts = {
        "model": Path(chosen).name,
        "machine": str(machine),
        "device": device,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    if report is not None:
        try:
            report.write_text(markdown(groups, facts | {"time": f"{seconds:.0f} s"}), encoding="utf-8")
        except OSError as error:
            raise MlxkvError(f"{report} cannot be written ({error.strerror}); choose another --report.") from error
    checks = [check for group in groups for check in group.checks]
    output.result(
        prove_page(groups, facts, seconds),
        verdict=worst(checks),
        checks=checks,
        model=facts["model"],
        machine=machine,
        device=device,
        versions=versions,
        seconds=round(seconds, 1),
    )
    if report is not None:
        output.say(f"mlxkv: wrote {report}", "dim")
    if worst(checks) == "fail":
        raise typer.Exit(1)
