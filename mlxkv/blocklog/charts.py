"""Plots as rectangles: what is where, in the units of an SVG picture. The template draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mlxkv.blocklog.blocks import BlockRow
from mlxkv.blocklog.summary import Bins
from mlxkv.core.units import format_bytes

WIDTH, HEIGHT = 720.0, 160.0
LEFT, BOTTOM = 56.0, 18.0
DEEPEST_ROWS = 24
MOST_BOXES = 1_500
NARROWEST = 1.5


@dataclass(frozen=True)
class Box:
    """A rectangle; `kind` is its class in the style sheet, `says` what a pointer over it shows."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    says: str


@dataclass(frozen=True)
class Mark:
    """A word at a place."""

    x: float
    y: float
    text: str
    anchor: str = "middle"


@dataclass(frozen=True)
class Chart:
    """A picture of `width` x `height`; `shown` of `of` things are in it."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    marks: tuple[Mark, ...]
    shown: int = 0
    of: int = 0


def columns(bins: Bins) -> Chart:
    """Prompt tokens over time: what was reused below, what was computed on top."""
    top = max(bins.prompt, default=0) or 1
    step = (WIDTH - LEFT) / max(len(bins.prompt), 1)
    full = HEIGHT - BOTTOM - 8
    boxes = []
    for i, (hot, cold, untiered, prompt) in enumerate(
        zip(bins.hot, bins.cold, bins.untiered, bins.prompt, strict=True)
    ):
        base = HEIGHT - BOTTOM
        for kind, count in (
            ("hot", hot),
            ("cold", cold),
            ("untiered", untiered),
            ("computed", prompt - hot - cold - untiered),
        ):
            if count > 0:
                height = full * count / top
                base -= height
                boxes.append(
                    Box(LEFT + i * step, base, max(step - 0.5, 0.5), height, kind, f"{kind}: {count:,} tokens")
                )
    marks = (
        Mark(LEFT - 4, HEIGHT - BOTTOM, "0", "end"),
        Mark(LEFT - 4, 14, f"{top:,}", "end"),
        Mark(LEFT, HEIGHT - 4, "start", "start"),
        Mark(WIDTH, HEIGHT - 4, "end", "end"),
    )
    return Chart(WIDTH, HEIGHT, tuple(boxes), marks, len(bins.prompt), len(bins.prompt))


def bars(distances: Counter[int]) -> Chart:
    """How many requests lie between two uses of a chain: 1, 2, 3 to 4, 5 to 8 and so on."""
    groups: Counter[int] = Counter()
    for distance, count in distances.items():
        groups[max(distance - 1, 0).bit_length()] += count
    last = max(groups, default=-1)
    top = max(groups.values(), default=0) or 1
    step = (WIDTH - LEFT) / max(last + 1, 1)
    full = HEIGHT - BOTTOM - 8
    boxes, marks = [], [Mark(LEFT - 4, HEIGHT - BOTTOM, "0", "end"), Mark(LEFT - 4, 14, f"{top:,}", "end")]
    for group in range(last + 1):
        name = _span(group)
        height = full * groups[group] / top
        x = LEFT + group * step
        if groups[group]:
            says = f"{name} requests later: {groups[group]:,} times"
            boxes.append(Box(x + 2, HEIGHT - BOTTOM - height, max(min(step - 4, 80), 1), height, "hot", says))
        marks.append(Mark(x + min(step, 84) / 2, HEIGHT - 4, name))
    return Chart(WIDTH, HEIGHT, tuple(boxes), tuple(marks), sum(groups.values()), sum(groups.values()))


def _span(group: int) -> str:
    if group < 2:
        return str(group + 1)
    return f"{2 ** (group - 1) + 1} to {2**group}"


@dataclass
class _Run:
    """Blocks of a chain that nothing parts from: drawn as one box."""

    rows: list[BlockRow]
    after: list[_Run]
    leaves: int = 1


def icicle(rows: Iterable[BlockRow]) -> Chart:
    """Chains from the top down: what several prompts share is wide, where they part it splits."""
    held = {row.block: row for row in rows}
    children: dict[str, list[BlockRow]] = {}
    tops = []
    for row in held.values():
        if row.parent in held:
            children.setdefault(row.parent or "", []).append(row)
        else:
            tops.append(row)
    runs = [_run(top, children) for top in tops]
    for run in _deepest_first(runs):
        run.leaves = sum(each.leaves for each in run.after) or 1
    runs.sort(key=lambda run: (-run.leaves, -len(run.rows)))
    del runs[int(WIDTH / NARROWEST) :]
    boxes, shown, deepest = _draw(runs)
    row_height = 14.0
    drawn = tuple(
        Box(box.x, box.y * row_height, box.width, box.height * row_height - 1, box.kind, box.says) for box in boxes
    )
    return Chart(WIDTH, max(deepest, 1) * row_height, drawn, (), shown, len(held))


def _run(first: BlockRow, children: dict[str, list[BlockRow]]) -> _Run:
    """The run that begins with a block, and those after it; without recursion, for chains are long."""
    start = _Run([first], [])
    waiting = [start]
    while waiting:
        run = waiting.pop()
        after = children.get(run.rows[-1].block, [])
        while len(after) == 1:
            run.rows.append(after[0])
            after = children.get(after[0].block, [])
        run.after = [_Run([row], []) for row in after]
        waiting += run.after
    return start


def _deepest_first(runs: list[_Run]) -> list[_Run]:
    ordered, waiting = [], list(runs)
    while waiting:
        run = waiting.pop()
        ordered.append(run)
        waiting += run.after
    return ordered[::-1]


def _draw(runs: list[_Run]) -> tuple[list[Box], int, int]:
    """Boxes in rows; a run takes as many rows as the logarithm of its length."""
    boxes: list[Box] = []
    shown = deepest = 0
    leaves = sum(run.leaves for run in runs) or 1
    waiting = []
    at = 0.0
    for run in runs:
        width = WIDTH * run.leaves / leaves
        waiting.append((run, at, 0, width))
        at += width
    for run, x, y, width in waiting:
        height = len(run.rows).bit_length()
        if width < NARROWEST or y + height > DEEPEST_ROWS or len(boxes) >= MOST_BOXES:
            continue
        first, last = run.rows[0], run.rows[-1]
        hits = max(row.hits for row in run.rows)
        nbytes = sum(row.bytes for row in run.rows)
        says = (
            f"blocks {first.index} to {last.index}, {sum(row.tokens for row in run.rows):,} tokens,"
            f" {format_bytes(nbytes)}, used again {hits:,} times, {first.block[:12]}"
        )
        boxes.append(Box(x, float(y), max(width - 0.7, 0.7), float(height), f"use{min(hits.bit_length(), 4)}", says))
        shown += len(run.rows)
        deepest = max(deepest, y + height)
        for after in sorted(run.after, key=lambda each: -each.leaves):
            part = width * after.leaves / run.leaves
            waiting.append((after, x, y + height, part))
            x += part
    return boxes, shown, deepest
