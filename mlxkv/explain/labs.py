"""Four small labs of attention, computed with `mlxkv.attention.reference` in float64 on the CPU.

Each gives tables of numbers, what they show, and what so small a model cannot show.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxkv.attention.masks import causal_mask
from mlxkv.attention.reference import Steps, attention_steps
from mlxkv.core.errors import UsageError

Numbers = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Grid:
    """A table of numbers.

    Attributes:
        rows, columns: their labels.
        values: row by row.
        digits: behind the point.
        heat: whether the numbers are weights between 0 and 1, to be shown by colour too.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Numbers
    digits: int
    heat: bool = False


@dataclass(frozen=True)
class Lab:
    """One lab: `grids` are its numbers, `shows` says what is seen in them, `hides` what is not."""

    number: int
    title: str
    recipe: str
    grids: tuple[Grid, ...]
    shows: tuple[str, ...]
    hides: tuple[str, ...]


def lab(number: int) -> Lab:
    """Run lab 1 to 4.

    Raises:
        UsageError: there is no such lab.

    Cost: milliseconds.
    """
    if number not in LABS:
        raise UsageError(f"there is no lab {number}; choose one of {', '.join(map(str, LABS))}.")
    with mx.stream(mx.cpu):  # float64 is only there
        return LABS[number]()


def three_words() -> Lab:
    """Three words, one head, queries = keys = values = embeddings."""
    words = ("猫", "追", "老鼠")
    x = _array([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]])
    steps = _attend(x, x, x)
    order = [2, 1, 0]
    swapped = _attend(x[mx.array(order)], x[mx.array(order)], x[mx.array(order)])
    moved = _largest(swapped.output - steps.output[:, :, mx.array(order)])
    return Lab(
        1,
        "three words, one head",
        "q = k = v = embedding; weights = softmax(q k^T / sqrt(4)); output = weights v",
        (
            Grid("weights: row attends to column", words, words, _numbers(steps.weights), 2, heat=True),
            Grid("outputs", words, ("1", "2", "3", "4"), _numbers(steps.output), 2),
        ),
        (
            f"Every row of weights sums to 1 (furthest off: {_off_one(steps.weights):.0e}).",
            "Each word attends most to itself: its embedding is most like itself.",
            f"老鼠 追 猫 gives the outputs of 猫 追 老鼠 in the other order, largest difference {moved:.0e}: without"
            ' positions "A hits B" equals "B hits A".',
        ),
        (
            "Queries, keys and values are the same here; a model learns a projection for each.",
            "Nothing is trained: the numbers follow from embeddings made by hand.",
        ),
    )


def mini_transformer() -> Lab:
    """Five words, two heads with random projections, additive positions, residual and LayerNorm."""
    words = ("小明", "把", "书", "给", "小红")
    draw = random.Random(42)
    embedded = _array([[draw.uniform(-1, 1) for _ in range(8)] for _ in words])
    x = embedded + _array([_position(i) for i in range(len(words))])
    q, k, v = (x @ _projection(seed) for seed in (1, 2, 3))
    steps = _attend(*(a.reshape(5, 2, 4).swapaxes(0, 1) for a in (q, k, v)))
    joined = steps.output[0].swapaxes(0, 1).reshape(5, 8)
    normed = _layer_norm(x + joined)
    weights = [_numbers(steps.weights[:, head]) for head in range(2)]
    tops = [[max(range(5), key=row.__getitem__) for row in head] for head in weights]
    top_grids = [
        Grid(
            f"head {head}: whom each word attends to most",
            tuple(f"{word} → {words[top]}" for word, top in zip(words, tops[head], strict=True)),
            ("weight",),
            tuple((max(row),) for row in weights[head]),
            2,
        )
        for head in range(2)
    ]
    heat_grids = [Grid(f"head {head}: weights", words, words, weights[head], 2, heat=True) for head in range(2)]
    alike = sum(a == b for a, b in zip(*tops, strict=True))
    largest = _largest(normed)
    return Lab(
        2,
        "a mini transformer: two heads, positions, residual, LayerNorm",
        "x = embedding + position; two heads of 4 numbers; LayerNorm(x + both heads side by side)",
        (
            *heat_grids,
            *top_grids,
            Grid("output, first three of eight numbers", words, ("1", "2", "3"), _numbers(normed[:, :3]), 2),
        ),
        (
            f"The two heads agree on the word attended to most for {alike} of 5 words.",
            f"Residual and LayerNorm keep the output small: no number beyond {largest:.2f}.",
        ),
        (
            "The positions are additive, one vector added to each embedding. Today's models turn queries and keys"
            " instead (RoPE), so that a score depends on the distance.",
            "The projections are random. They show that heads can divide the work, not that they do: that takes"
            " training.",
            "There is no mask: each word sees those behind it too, which a model that writes text never does.",
        ),
    )


def numpy_forward() -> Lab:
    """A forward pass as one writes it in NumPy, and the causal mask that belongs to it."""
    rng = np.random.default_rng(0)
    x = _array(rng.normal(size=(5, 8)))
    q, k, v = (x @ _array(rng.normal(size=(8, 8)) / np.sqrt(8)) for _ in range(3))
    steps, masked = _attend(q, k, v), _attend(q, k, v, mask="causal")
    names, numbers = tuple(f"x{i}" for i in range(5)), tuple(map(str, range(1, 9)))
    hidden = 1 - causal_mask(5, 5).astype(mx.float32)
    first = _largest(masked.output[0, 0, 0] - v[0])
    return Lab(
        3,
        "the forward pass in NumPy's terms, and its causal mask",
        "q, k, v = x Wq, x Wk, x Wv; softmax(q k^T / sqrt(8)) v; output shape (5, 8)",
        (
            Grid("output, no mask", names, numbers, _numbers(steps.output), 6),
            Grid("weights, no mask", names, names, _numbers(steps.weights), 6, heat=True),
            Grid("causal mask, 1 is hidden", names, names, _numbers(hidden), 0),
            Grid("weights behind the mask", names, names, _numbers(masked.weights), 6, heat=True),
        ),
        (
            f"Every row sums to 1 (furthest off: {_off_one(steps.weights):.0e}), behind the mask too.",
            f"Behind the mask x0 sees itself only: its output is its own value (difference {first:.0e}).",
            "All five rows at once are prefill, an [n, n] matrix. Decode computes the last row of it only.",
        ),
        (
            "One layer, one head, random weights. The output above was computed without the mask.",
            "What later layers make of the rows is not here, nor what keeping k and v saves: `mlxkv explain shapes`.",
        ),
    )


def one_query() -> Lab:
    """One query over seven characters, without scaling."""
    characters = tuple("写代码的中年人")
    x = _array(np.random.RandomState(42).randn(7, 4))
    query = x[characters.index("年")][None]
    steps, scaled = _attend(query, x, x, scale=1.0), _attend(query, x, x)
    own, calmer = (_numbers(s.weights)[0][characters.index("年")] for s in (steps, scaled))
    return Lab(
        4,
        "one query over seven characters",
        "scores = 年 . each character; weights = softmax(scores), not scaled; context = weights x embeddings",
        (
            Grid("scores of 年", ("年",), characters, _numbers(steps.scores), 4),
            Grid("weights", ("年",), characters, _numbers(steps.weights), 4, heat=True),
            Grid("context", ("年",), ("1", "2", "3", "4"), _numbers(steps.output), 8),
        ),
        (
            f"年 gives {own:.0%} of its weight to itself: a product of a vector with itself is its squared length.",
            f"Scaled by 1/sqrt(4), as models do, it would be {calmer:.0%}: without the scale large scores leave nothing"
            " to the others.",
        ),
        (
            "The embeddings are random, so that 年 attends to 的 here says nothing about Chinese.",
            "Queries, keys and values are one and the same, and there are no positions.",
        ),
    )


LABS: dict[int, Callable[[], Lab]] = {1: three_words, 2: mini_transformer, 3: numpy_forward, 4: one_query}


def _attend(q: mx.array, k: mx.array, v: mx.array, *, scale: float | None = None, mask: str | None = None) -> Steps:
    """Attention of [L, D] or [heads, L, D] arrays, as one batch."""
    return attention_steps(*(a.reshape(1, -1, *a.shape[-2:]) for a in (q, k, v)), scale=scale, mask=mask)


def _array(rows: Sequence[Sequence[float]] | np.ndarray) -> mx.array:
    return mx.array(np.asarray(rows, np.float64), mx.float64)


def _position(i: int) -> list[float]:
    """Lab 2's own formula: the angle depends on the word, the component picks sine or cosine."""
    angle = i / 10_000 ** (2 * (i % 2) / 8)
    return [math.cos(angle) if d % 2 == 0 else math.sin(angle) for d in range(8)]


def _projection(seed: int) -> mx.array:
    draw = random.Random(seed)
    return _array([[draw.uniform(-0.5, 0.5) for _ in range(8)] for _ in range(8)])


def _layer_norm(x: mx.array) -> mx.array:
    mean = mx.mean(x, axis=-1, keepdims=True)
    spread = mx.mean(mx.square(x - mean), axis=-1, keepdims=True)
    return (x - mean) / mx.sqrt(spread + mx.array(1e-6, mx.float64))


def _numbers(array: mx.array) -> Numbers:
    """The rows of an array whose leading axes are 1."""
    return tuple(tuple(row) for row in np.array(array).reshape(-1, array.shape[-1]).tolist())


def _largest(array: mx.array) -> float:
    return float(np.abs(np.array(array)).max())


def _off_one(weights: mx.array) -> float:
    return float(np.abs(np.array(weights).sum(axis=-1) - 1).max())
