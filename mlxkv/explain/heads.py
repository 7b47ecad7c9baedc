"""The attention weights of a real model: every layer and head, for one text.

The model runs once, with mlx-lm's attention replaced by one that also keeps the weights, computed by
`attention.reference`. A weight says how much of a token's value goes into another's output in that head; it is not the
reason for anything the model says. A model that writes text is causal: a token attends to itself and those before it.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from mlxkv.attention.dispatch import ATTENTION, attention_files
from mlxkv.attention.reference import attention_steps
from mlxkv.core.errors import ModelError, UsageError
from mlxkv.models.loader import LoadedModel
from mlxkv.sizing.architecture import replaced

MOST_TOKENS = 128
_CHINESE = "\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_CHINESE}]|[^\W{_CHINESE}]+(?:['’][^\W{_CHINESE}]+)*|[^\w\s]")
"""Chinese is written without blanks: each of its characters is a word, unless a token holds several."""


@dataclass(frozen=True)
class HeadWeights:
    """Weights of one text.

    Attributes:
        pieces: the text of each token.
        words: the words and marks, in order.
        word_of: the word each token is in, -1 for none.
        weights: [layers, heads, L, L] float32; row i is what token i attends to.
    """

    model: str
    text: str
    pieces: tuple[str, ...]
    words: tuple[str, ...]
    word_of: tuple[int, ...]
    weights: np.ndarray

    @property
    def layers(self) -> int:
        return int(self.weights.shape[0])

    @property
    def heads(self) -> int:
        return int(self.weights.shape[1])

    def of(self, layer: int | None, head: int | None) -> np.ndarray:
        """[L, L]: of one head, or the mean over all heads of a layer, or over all layers where None.

        Raises:
            UsageError: there is no such layer or head.
        """
        for name, value, count in (("layer", layer, self.layers), ("head", head, self.heads)):
            if value is not None and not 0 <= value < count:
                raise UsageError(f"there is no {name} {value}; this model has {name}s 0 to {count - 1}.")
        chosen = self.weights if layer is None else self.weights[layer : layer + 1]
        chosen = chosen if head is None else chosen[:, head : head + 1]
        mean: np.ndarray = chosen.mean(axis=(0, 1))
        return mean


@dataclass(frozen=True)
class RankedWord:
    """A word that another one attends to.

    Attributes:
        word, place: its text, and its place among the words.
        mean: its share of the weight, the mean over all heads.
        top_heads: heads in which no other word has more.
        layer, head, most: the head that gives it most, and how much.
    """

    word: str
    place: int
    mean: float
    top_heads: int
    layer: int
    head: int
    most: float


@dataclass(frozen=True)
class Ranking:
    """What a word attends to, over all heads; `words` with the largest mean first.

    Attributes:
        token: the token asked: the last one of the word, which has seen all of it.
        after: words behind it, which it cannot see.
    """

    word: str
    place: int
    token: int
    heads: int
    words: tuple[RankedWord, ...]
    after: tuple[str, ...]


def head_weights(model: LoadedModel, text: str) -> HeadWeights:
    """Run the model on a text and keep every head's weights.

    Raises:
        UsageError: no text, text that is not UTF-8, or more than 128 tokens.
        ModelError: the architecture writes its attention out itself, keeps windows, or lets no weights be seen.

    Cost: one forward pass, and layers x heads x L x L numbers.
    """
    try:
        text.encode()  # bytes of a command line that are no UTF-8 are half surrogates here
    except UnicodeEncodeError as error:
        raise UsageError("the text is not UTF-8; check what the terminal sends.") from error
    tokens = model.tokenizer.encode(text)
    if not text.strip() or not tokens:
        raise UsageError("there is no text to attend to; give a sentence.")
    if len(tokens) > MOST_TOKENS:
        raise UsageError(f"the text has {len(tokens)} tokens; a map of more than {MOST_TOKENS} cannot be read.")
    pieces = _pieces(model, tokens)
    words, word_of = _words(pieces)
    weights = _run(model, tokens)
    return HeadWeights(model.name, text, pieces, words, word_of, weights)


def rank(found: HeadWeights, word: str) -> Ranking:
    """What a word attends to: the weights of the tokens of each word added up, over all heads.

    The last occurrence counts, as a word of its own, upper and lower case alike.

    Raises:
        UsageError: the text has no such word.
    """
    places = [i for i, other in enumerate(found.words) if other.casefold() == word.strip().casefold()]
    if not places:
        raise UsageError(f"the text has no word {word!r}; its words are {' '.join(found.words)}.")
    place = places[-1]
    token = max(i for i, other in enumerate(found.word_of) if other == place)
    rows = found.weights[:, :, token, :].reshape(-1, len(found.pieces))
    shares = np.zeros((rows.shape[0], place + 1))
    for i, other in enumerate(found.word_of[: token + 1]):
        if other >= 0:
            shares[:, other] += rows[:, i]
    tops = np.bincount(shares.argmax(axis=1), minlength=place + 1)
    ranked = []
    for i, text in enumerate(found.words[: place + 1]):
        best = int(shares[:, i].argmax())
        layer, head = divmod(best, found.heads)
        ranked.append(
            RankedWord(text, i, float(shares[:, i].mean()), int(tops[i]), layer, head, float(shares[best, i]))
        )
    ranked.sort(key=lambda other: -other.mean)
    return Ranking(found.words[place], place, token, rows.shape[0], tuple(ranked), found.words[place + 1 :])


def _run(model: LoadedModel, tokens: Sequence[int]) -> np.ndarray:
    """[layers, heads, L, L] of one forward pass without a cache."""
    kept: list[mx.array] = []

    def keeping(
        queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any, sinks: Any = None, **_: Any
    ) -> mx.array:
        steps = attention_steps(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        kept.append(steps.weights[0])
        return steps.output.astype(queries.dtype)

    with contextlib.ExitStack() as stack:
        for file in attention_files(model.module):
            stack.enter_context(replaced(sys.modules[file], ATTENTION, keeping))
        logits = model.module(mx.array(tokens)[None])
        mx.eval(logits, kept)
    if len({weights.shape for weights in kept}) != 1:
        raise ModelError(
            f"{model.name} ({type(model.module).__module__.rpartition('.')[2]}) does not hand its attention to mlx-lm's"
            " function in every layer, so its weights cannot be seen; try a llama, qwen, phi or olmo model."
        )
    return np.stack([np.array(weights) for weights in kept])


def _pieces(model: LoadedModel, tokens: Sequence[int]) -> tuple[str, ...]:
    """What each token adds to the text; a character of several tokens belongs to the last of them."""
    whole = model.tokenizer.decode(list(tokens))
    begun = (model.tokenizer.decode(list(tokens[:end])) for end in range(len(tokens)))
    ends = [*accumulate((_common(text, whole) for text in begun), max), len(whole)]
    return tuple(whole[start:stop] for start, stop in pairwise(ends))


def _common(a: str, b: str) -> int:
    """Letters that two texts begin alike with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _words(pieces: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The words of the joined pieces, and for each piece the one its last letter is in.

    Words that no piece ends in are one with the next: a token may hold several. A piece without text belongs to the
    character that it begins.
    """
    text = "".join(pieces)
    ends = list(accumulate(map(len, pieces)))
    letters = [end - _blank(piece) for end, piece in zip(ends, pieces, strict=True)]
    for i in reversed(range(len(pieces) - 1)):
        if not pieces[i]:
            letters[i] = letters[i + 1]
    spans: list[tuple[int, int]] = []
    begun: int | None = None
    for match in _WORD.finditer(text):
        start = match.start() if begun is None else begun
        ended = any(match.start() < letter <= match.end() for letter in letters)
        begun = None if ended else start
        if ended:
            spans.append((start, match.end()))
    word_of = tuple(
        next((i for i, (start, stop) in enumerate(spans) if start < letter <= stop), -1) for letter in letters
    )
    return tuple(text[start:stop] for start, stop in spans), word_of


def _blank(piece: str) -> int:
    """Blanks at the end of a piece."""
    return len(piece) - len(piece.rstrip()) if piece.strip() else 0
