"""The weights of a model's heads as one self-contained page: no other file, no network."""

from __future__ import annotations

import base64
import html
import json
from importlib.resources import files
from string import Template

import numpy as np

from mlxkv.explain.heads import HeadWeights

_STRONG = 0.5
_WHOLE = 65535
"""The number a weight of 1 becomes in the page: two bytes, so that a tenth of a percent is right."""


class _Page(Template):
    """`@@name` is a place to fill: `$` belongs to the script."""

    delimiter = "@@"


def attention_page(found: HeadWeights, *, layer: int | None, head: int | None, token: int) -> str:
    """HTML with a heat map, every layer and head to choose from, and a token's own list.

    Args:
        layer, head: shown first; None for the mean over all.
        token: the one whose list is shown first.

    Raises:
        UsageError: there is no such layer or head.

    Cost: two bytes and two thirds for each weight.
    """
    shown = found.of(layer, head)
    data = {
        "pieces": list(found.pieces),
        "layers": found.layers,
        "heads": found.heads,
        "layer": layer,
        "head": head,
        "row": token,
        "weights": base64.b64encode(np.round(_WHOLE * found.weights).astype("<u2").tobytes()).decode(),
    }
    template = files("mlxkv.explain").joinpath("attention.html").read_text(encoding="utf-8")
    return _Page(template).substitute(
        model=html.escape(found.model),
        text=html.escape(found.text),
        layers=found.layers,
        heads=found.heads,
        table=_table(found.pieces, shown),
        chosen=f"{_which('layer', layer)}, {_which('head', head)}",
        data=json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"),
    )


def _table(pieces: tuple[str, ...], weights: np.ndarray) -> str:
    """The map as it is without a script."""
    names = [html.escape(piece) for piece in pieces]
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = []
    for i, name in enumerate(names):
        cells = "".join(_cell(float(weights[i, j])) if j <= i else "<td></td>" for j in range(len(names)))
        rows.append(f"<tr><th>{name}</th>{cells}</tr>")
    return f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"


def _cell(weight: float) -> str:
    strong = ' class="strong"' if weight > _STRONG else ""
    return f'<td{strong} style="background:rgba(var(--warm), {weight:.3f})">{round(100 * weight)}</td>'


def _which(name: str, value: int | None) -> str:
    return f"all {name}s" if value is None else f"{name} {value}"
