"""`mlxkv doctor --prove`: run once on a new machine, whether everything that is promised holds there."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path

import typer

from mlxkv.core.platform import machine_description
from mlxkv_cli.output import Output

# MLX, the models and the checks are imported inside: `mlxkv doctor` must not wait for them.


def prove_here(output: Output, model: str | None, cache_dir: Path) -> None:
    """Run all checks in a scratch directory beside the cache root; ends the command with code 1 when one fails."""
    from mlxkv.models.loader import DEMO
    from mlxkv.prove.check import worst
    from mlxkv.prove.prove import prove
    from mlxkv.prove.scratch import scratch_beside
    from mlxkv_cli.caching import warnings_on
    from mlxkv_cli.prove_page import prove_page

    started = time.monotonic()
    name = model or DEMO
    with warnings_on(output), scratch_beside(cache_dir) as scratch, output.steps() as tell:
        groups = tuple(prove(name, scratch, tell))
    seconds = time.monotonic() - started
    machine = machine_description()
    versions = {package: importlib.metadata.version(package) for package in ("mlxkv", "mlx", "mlx-lm")}
    checks = [check for group in groups for check in group.checks]
    verdict = worst(checks)
    head = f"{Path(name).name} on {machine}; " + ", ".join(f"{name} {version}" for name, version in versions.items())
    output.result(
        prove_page(groups, head, seconds, output.width),
        verdict=verdict,
        checks=checks,
        model=Path(name).name,
        machine=machine,
        versions=versions,
        seconds=round(seconds, 1),
    )
    if verdict == "fail":
        raise typer.Exit(1)
