"""`mlxkv explain`: attention by hand, a model's shapes and bill, and what its heads attend to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlxkv.core.errors import UsageError
from mlxkv.core.units import parse_tokens
from mlxkv_cli.explain_page import heads_page, lab_page, page_width, shapes_page
from mlxkv_cli.options import Json, examples
from mlxkv_cli.output import Output

app = typer.Typer(no_args_is_help=True, help="See how attention works, and what it costs.")


def _tokens(text: str | int) -> int:
    """Typer hands the default over too, as the number it is."""
    try:
        return parse_tokens(str(text))
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error


@app.command(epilog=examples("mlxkv explain lab 1", "mlxkv explain lab 2 --json"))
def lab(
    number: Annotated[
        int,
        typer.Argument(
            metavar="N",
            help="1: three words, one head. 2: two heads, positions, residual. 3: the causal mask. 4: one query.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Attention by hand on a few words: the numbers, what they show, and what they do not."""
    from mlxkv.explain.labs import lab as run_lab

    found = run_lab(number)
    Output(json=as_json).result(
        lab_page(found, page_width()),
        lab=found.number,
        title=found.title,
        recipe=found.recipe,
        grids=found.grids,
        shows=found.shows,
        hides=found.hides,
    )


@app.command(epilog=examples("mlxkv explain shapes Qwen2.5-0.5B-Instruct", "mlxkv explain shapes Qwen3-8B --tokens 4k"))
def shapes(
    model: Annotated[str, typer.Argument(help="A catalog name, a directory, a config.json, a .gguf file or a hub id.")],
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", parser=_tokens, help="Length of the prompt.")] = 1024,
    as_json: Json = False,
) -> None:
    """Every tensor's shape through a model, which steps grow with n and which with n x n, and the bill.

    Needs the model's config only.
    """
    from mlxkv.budget.source import find_source
    from mlxkv.explain.shapes import explain_shapes

    source = find_source(model)
    found = explain_shapes(source.config, tokens)
    Output(json=as_json).result(
        shapes_page(source.name, found, page_width()),
        model=source.name,
        tokens=found.tokens,
        stages=found.stages,
        bills=found.bills,
        formula=found.formula,
        bytes_per_token=found.bytes_per_token,
    )


@app.command(
    epilog=examples(
        'mlxkv explain attention smollm2-135m "The cat didn\'t cross the street because it was too tired." --from it',
        'mlxkv explain attention smollm2-135m "Hello world." --layer 13 --head 8 --html attention.html',
    )
)
def attention(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, a hub id, or smollm2-135m.")],
    text: Annotated[str, typer.Argument(help="A sentence.")],
    layer: Annotated[int | None, typer.Option("--layer", metavar="L", help="Only this layer, counted from 0.")] = None,
    head: Annotated[int | None, typer.Option("--head", metavar="H", help="Only this head, counted from 0.")] = None,
    word: Annotated[
        str | None, typer.Option("--from", metavar="WORD", help="Rank what this word attends to, over all heads.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with every layer and head.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What the heads of a real model attend to, as a heat map."""
    from mlxkv.explain.heads import head_weights, rank
    from mlxkv.explain.page import attention_page
    from mlxkv.models.loader import load

    output = Output(json=as_json)
    if html is not None and not html.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {html.absolute().parent} for the page; make it first.")
    if html is not None and html.is_dir():
        raise UsageError(f"{html} is a directory; name a file in it for the page.")
    output.say(f"mlxkv: loading {model} ...", "dim")
    found = head_weights(load(model), text)
    ranking = None if word is None else rank(found, word)
    weights = found.of(layer, head)
    if html is not None:
        token = len(found.pieces) - 1 if ranking is None else ranking.token
        html.write_text(attention_page(found, layer=layer, head=head, token=token), encoding="utf-8")
        output.say(f"mlxkv: wrote {html}", "dim")
    output.result(
        heads_page(found, layer, head, ranking, page_width()),
        model=found.model,
        pieces=found.pieces,
        words=found.words,
        layers=found.layers,
        heads=found.heads,
        layer=layer,
        head=head,
        weights=weights.tolist(),
        ranking=ranking,
    )
