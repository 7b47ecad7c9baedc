"""KV figures of every model in the catalog, at once: traced beforehand and shipped, for one version of mlx-lm.

`python -m mlxkv.budget.catalog` traces them again and writes the file. Under another mlx-lm they are traced on the
spot, as its caches may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from mlxkv.sizing import catalog
from mlxkv.sizing.config import context_window
from mlxkv.sizing.trace import build, trace

_FILE = "catalog_kv.json"


@dataclass(frozen=True)
class CatalogFigures:
    """One model's KV, as `KvFigures`, with its name, hub id and longest context (None where its config is silent)."""

    name: str
    hub_id: str
    bytes_per_token: int
    bytes_per_block: int
    window_tokens: int
    window_bytes_per_token: int
    fixed_bytes: int
    context_tokens: int | None


def catalog_figures() -> tuple[CatalogFigures, ...]:
    """All models, sorted by name.

    Cost: a millisecond; 5 s where another mlx-lm is installed than the shipped figures are for.
    """
    shipped = json.loads((files("mlxkv.budget") / _FILE).read_text(encoding="utf-8"))
    if shipped["mlx_lm"] == version("mlx-lm") and {row["name"] for row in shipped["models"]} == set(catalog.names()):
        return tuple(CatalogFigures(**row) for row in shipped["models"])
    return tuple(measure())


def measure() -> Iterator[CatalogFigures]:
    """Trace every model of the catalog. Cost: 5 s in all."""
    for name in catalog.names():
        model = catalog.find(name)
        traced = trace(build(model.config))
        context = context_window(model.config)
        yield CatalogFigures(
            name=name,
            hub_id=model.hub_id,
            bytes_per_token=traced.growth_bytes_per_token,
            bytes_per_block=traced.steady_block_bytes,
            window_tokens=traced.window_tokens,
            window_bytes_per_token=traced.window_bytes_per_token,
            fixed_bytes=traced.fixed_bytes,
            context_tokens=None if context is None else context.scaled_tokens,
        )


def _write() -> None:
    note = "Written by `python -m mlxkv.budget.catalog`; held against the trace by tests/budget/test_plan.py."
    data = {"_note": note, "mlx_lm": version("mlx-lm"), "models": [asdict(row) for row in measure()]}
    Path(str(files("mlxkv.budget") / _FILE)).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
