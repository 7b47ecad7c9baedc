"""`mlxkv models`: the models `mlxkv budget` knows without a network, with what their KV costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column

from mlxkv.core.units import KIB
from mlxkv_cli.options import Json
from mlxkv_cli.output import Output

if TYPE_CHECKING:
    from mlxkv.budget.catalog import CatalogFigures


def models(as_json: Json = False) -> None:
    """List the built-in catalog: KiB of KV a token and a 64-token block, windows, state, longest context."""
    from mlxkv.budget.catalog import catalog_figures

    output = Output(json=as_json)
    figures = catalog_figures()
    right = [Column(title, justify="right") for title in ("KiB/token", "KiB/block", "window", "state", "context")]
    output.table(["model", *right], [_row(model) for model in figures], models=figures)
    if not as_json:
        output.say("window: tokens some layers keep at most; state: MiB at any length. More: mlxkv budget MODEL", "dim")


def _row(model: CatalogFigures) -> list[str]:
    per_token, per_block = (
        f"{count / KIB:,.2f}".removesuffix(".00") for count in (model.bytes_per_token, model.bytes_per_block)
    )
    return [
        model.name,
        per_token,
        per_block,
        f"{model.window_tokens:,}" if model.window_tokens else "",
        f"{model.fixed_bytes / KIB / KIB:,.1f}" if model.fixed_bytes else "",
        "?" if model.context_tokens is None else f"{model.context_tokens:,}",
    ]
