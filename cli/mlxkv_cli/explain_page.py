"""The pages of `mlxkv explain`: they fit the terminal, 60 columns and more, and say the same without colour."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from mlxkv.core.units import format_bytes

if TYPE_CHECKING:
    from mlxkv.explain.heads import HeadWeights, Ranking
    from mlxkv.explain.labs import Grid, Lab
    from mlxkv.explain.shapes import Bill, Shapes, Stage

_LEAST_WIDTH, _MOST_WIDTH = 40, 100
_LABEL = 12
_RANKED = 10
_SEEN = 0.0005  # a share that one decimal of a percent shows
_QUADRUPLED = 3.99
_BRIGHT = 0.4
_SHADES = " .:-=+*#%@"
_COOL, _WARM = (30, 33, 48), (250, 200, 90)
_FLOP_UNITS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))


def page_width() -> int:
    """Columns to fill: the terminal's, or COLUMNS, or 80; one is left free."""
    return max(_LEAST_WIDTH, min(shutil.get_terminal_size().columns - 1, _MOST_WIDTH))


def lab_page(lab: Lab, width: int) -> RenderableType:
    """A lab's numbers, what they show, and what they do not."""
    parts: list[RenderableType] = [*_wrapped(f"Lab {lab.number}: {lab.title}", width), *_wrapped(lab.recipe, width)]
    for grid in lab.grids:
        parts += ["", *_grid(grid, width)]
    parts += ["", "What it shows", *_bullets(lab.shows, width)]
    parts += ["", "What it does not show", *_bullets(lab.hides, width)]
    return Group(*parts)


def shapes_page(name: str, shapes: Shapes, width: int) -> RenderableType:
    """Every tensor's shape, the bill, and why it grows as it does."""
    parts: list[RenderableType] = [f"{name}, {shapes.tokens:,} tokens"]
    for stage in shapes.stages:
        if stage.tensors:
            parts += ["", _stage(stage)]
    parts += ["", _bills(shapes.bills), "", *_growth(shapes, width)]
    return Group(*parts)


def heads_page(
    found: HeadWeights, layer: int | None, head: int | None, ranking: Ranking | None, width: int
) -> RenderableType:
    """The map of one head or of a mean, and what a word attends to."""
    which = f"{_which('layer', layer)}, {_which('head', head)}"
    count = len(found.pieces)
    about = f"{found.model}: {count} token{'s' * (count != 1)}, {found.layers} layers of {found.heads} heads"
    parts: list[RenderableType] = [*_wrapped(about, width)]
    parts += _wrapped(f"Weights in percent, {which}: a row's token attends to the column's", width)
    names = [shown(piece).strip() for piece in found.pieces]
    drawn = _heat(names, found.of(layer, head).tolist(), width)
    if drawn is None:
        parts += _wrapped(f"{len(names)} tokens are too wide for this terminal; --html FILE shows the map.", width)
    else:
        parts += ["", *drawn]
    if ranking is not None:
        parts += ["", *_ranking(ranking, width)]
    return Group(*parts)


def shown(text: str) -> str:
    """Text with what could steer a terminal left out."""
    return "".join(letter if letter.isprintable() else "·" for letter in text)


def _grid(grid: Grid, width: int) -> Iterator[RenderableType]:
    """A table of numbers, in as many parts as its width asks for."""
    label = max(cell_len(row) for row in grid.rows)
    texts = [[f"{value:.{grid.digits}f}" for value in row] for row in grid.values]
    cell = 1 + max(*(len(text) for row in texts for text in row), *(cell_len(column) for column in grid.columns))
    fit = max(1, (width - label) // cell)
    yield grid.title
    for first in range(0, len(grid.columns), fit):
        chosen = slice(first, first + fit)
        yield Text(" " * label + "".join(_right(column, cell) for column in grid.columns[chosen]), style="bold")
        for row, texts_of, values in zip(grid.rows, texts, grid.values, strict=True):
            line = Text(set_cell_size(row, label))
            for text, value in zip(texts_of[chosen], values[chosen], strict=True):
                line.append(_right(text, cell), _warmth(value) if grid.heat else "")
            yield line


def _heat(names: Sequence[str], weights: Sequence[Sequence[float]], width: int) -> list[RenderableType] | None:
    """A causal map with numbers, or with shades where those are too wide; None where both are."""
    number = len(str(len(names)))
    label = number + 1 + min(_LABEL, max(map(cell_len, names)))
    whole = any(round(100 * value) == 100 for row in weights for value in row[1:])  # 100 wants a blank before it
    sizes = (4,) if whole else (4, 3)
    cell = next((size for size in sizes if label + size * len(names) <= width), None)
    lines: list[RenderableType] = []
    if cell is not None:
        columns = "".join(f"{i + 1:>{cell}}" for i in range(len(names)))
        lines.append(Text(" " * label + columns, style="bold"))
    elif label + 1 + len(names) > width:
        return None
    for i, name in enumerate(names):
        line = Text(set_cell_size(f"{i + 1:>{number}} {name}", label))
        if cell is None:
            line.append(" ")
        for value in weights[i][: i + 1]:
            if cell is None:  # one letter: the square root tells small weights apart
                root = math.sqrt(value)
                line.append(_SHADES[min(9, int(10 * root))], _warmth(root))
            else:
                line.append(f"{round(100 * value):>{cell}}", _warmth(value))
        lines.append(line)
    return lines


def _ranking(ranking: Ranking, width: int) -> Iterator[RenderableType]:
    name = shown(ranking.word)
    yield from _wrapped(f'What "{name}" attends to, over all {ranking.heads} heads', width)
    table = Table(
        Column("word", max_width=16, overflow="fold"), Column("mean", justify="right"),
        Column("most in", justify="right"), "strongest head", box=None, pad_edge=False, header_style="bold",
    )  # fmt: skip
    for word in ranking.words[:_RANKED]:
        best = f"layer {word.layer}, head {word.head}: {word.most:.0%}"
        table.add_row(shown(word.word), f"{word.mean:.1%}", f"{word.top_heads:,}", best)
    yield table
    if further := ranking.words[_RANKED:]:
        share = sum(word.mean for word in further)
        yield from _wrapped(
            f"{len(further)} more {'word has' if len(further) == 1 else 'words have'} {share:.1%}.", width
        )
    blank = 1 - sum(word.mean for word in ranking.words)
    if blank >= _SEEN:
        yield from _wrapped(f"The other {blank:.1%} are on blanks, which are in no word.", width)
    yield ""
    first = next((word for word in ranking.words if word.place == 0), None)
    if first is not None and first is ranking.words[0] and ranking.place > 0:
        yield from _wrapped(
            f'"{shown(first.word)}" is the first word: heads put there what they have no use for (an attention sink,'
            " arXiv:2309.17453), so look at the words below it.",
            width,
        )
    if ranking.after:
        yield from _wrapped(
            f'"{name}" cannot see what follows it ({shown(" ".join(ranking.after))}): the model is causal, and these'
            " weights would be the same had the sentence ended otherwise.",
            width,
        )
    yield from _wrapped("A weight is no reason: it says where a head reads from, not what the model concludes.", width)


def _stage(stage: Stage) -> RenderableType:
    table = Table(
        Column("tensor", overflow="fold"), Column("shape", justify="right"), "grows",
        box=None, pad_edge=False, header_style="bold", title=stage.title, title_justify="left", title_style="",
    )  # fmt: skip
    for tensor in stage.tensors:
        path = ".".join(_short(tensor.path.split("."))) or "logits"
        table.add_row(path, " x ".join(f"{size:,}" for size in tensor.shape), f"with {tensor.grows}")
    return table


def _short(parts: Sequence[str]) -> Sequence[str]:
    """A path without what leads to the layer."""
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if number is None:
        return parts[-1:]
    return parts[number + 1 :] or ["the layer"]


def _bills(bills: Sequence[Bill]) -> Table:
    right = ("context", "the rest", "QK^T and AV", "decode", "KV cache")
    table = Table(
        *(Column(title, justify="right") for title in right),
        box=None, pad_edge=False, header_style="bold", title="Prefill of the context, then one token more",
        title_justify="left", title_style="",
    )  # fmt: skip
    for bill in bills:
        decode = bill.decode_linear_flops + bill.decode_attention_flops
        table.add_row(
            f"{bill.tokens:,}", _flops(bill.linear_flops), _flops(bill.attention_flops), _flops(decode),
            format_bytes(bill.kv_bytes),
        )  # fmt: skip
    return table


def _growth(shapes: Shapes, width: int) -> Iterator[RenderableType]:
    linear, attention = shapes.doubling
    before, after = shapes.bills[-2:]
    first = shapes.bills[0]
    if not attention:
        yield from _wrapped("This model has no attention: everything grows with n.", width)
    else:
        windows = "; layers with a window add a part that only doubles" if attention < _QUADRUPLED else ""
        yield from _wrapped(
            f"From {before.tokens:,} to {after.tokens:,} tokens QK^T and AV grow {attention:.2f} times and the rest"
            f" {linear:.2f} times: twice as many queries each meet twice as many keys{windows}. All else is done once a"
            " token.",
            width,
        )
        crossing = next((bill.tokens for bill in shapes.bills if bill.attention_flops > bill.linear_flops), None)
        if crossing is not None:
            yield from _wrapped(
                f"Of these contexts, {crossing:,} tokens is the first where attention is more than half of a prefill.",
                width,
            )
        yield from _wrapped(
            f"Prefill fills an [n, n] matrix a head, decode one row of it: {first.tokens:,} x {first.tokens:,} scores"
            f" against {first.tokens:,}.",
            width,
        )
    yield from _wrapped(
        f"One token more takes {_flops(first.decode_linear_flops)} outside attention and reads"
        f" {format_bytes(first.decode_weight_bytes)} of weights at any length, and the whole KV cache besides.",
        width,
    )
    yield ""
    yield "KV cache"
    for line in shapes.formula:
        yield from textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="    ")


def _flops(count: float) -> str:
    unit, name = next(((unit, name) for unit, name in _FLOP_UNITS if count >= unit), (1, "FLOP"))
    return f"{count / unit:,.1f} {name}" if count else "0"


def _warmth(value: float) -> str:
    """A background between cool and warm for a weight, and a colour of text that can be read on it."""
    red, green, blue = (round(low + (high - low) * value) for low, high in zip(_COOL, _WARM, strict=True))
    ink = 0 if value > _BRIGHT else 255
    return f"rgb({ink},{ink},{ink}) on rgb({red},{green},{blue})"


def _right(text: str, width: int) -> str:
    return " " * (width - cell_len(text)) + text


def _which(name: str, value: int | None) -> str:
    return f"mean over all {name}s" if value is None else f"{name} {value}"


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Lines no wider than the page, CJK letters counted as the two columns they take."""
    line = ""
    for word in text.split():
        if line and cell_len(line) + 1 + cell_len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line


def _bullets(sentences: Sequence[str], width: int) -> Iterator[str]:
    for sentence in sentences:
        first, *rest = _wrapped(sentence, width - 2)
        yield f"- {first}"
        yield from (f"  {line}" for line in rest)
