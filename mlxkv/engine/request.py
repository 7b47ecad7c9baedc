"""What is asked of the engine and what it says back. Immutable; may cross threads."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mlxkv.cache.block_log import RequestEvent
from mlxkv.core.errors import UsageError
from mlxkv.engine.text import Segment


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 takes the likeliest; `seed` makes the rest repeatable, whoever shares
    the batch. Penalties and bias are mlx-lm's processors.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0, 100)
        _within("top_p", self.top_p, 0, 1, above=True)
        _within("min_p", self.min_p, 0, 1)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.repetition_penalty is not None:
            _within("repetition_penalty", self.repetition_penalty, 0, 10, above=True)
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; it is 0 (off) or more.")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UsageError(f"seed is {self.seed}; it is a whole number from 0 to 2**64 - 1.")

    def other(self, choice: int) -> Sampling:
        """The same for another choice of one request: what was seeded is drawn with another seed."""
        return self if self.seed is None else replace(self, seed=(self.seed + choice) % 2**64)


Processor = Callable[[Any, Any], Any]
"""One of mlx-lm's logits processors: (tokens so far, logits [1, V]) -> logits."""


@dataclass(frozen=True)
class Record:
    """What a request's record in the block log says of its prompt: `outline` is made once the reply is known."""

    outline: Callable[[Sequence[int]], Mapping[str, object]]
    text: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to generate.

    Args:
        prompt: token ids, at least one.
        max_tokens: most tokens of the reply.
        stop: texts that end the reply and are not part of it.
        logprobs: how many likeliest alternatives to report with each token; None reports nothing, 0 only the token.
        salt: prompts of another salt are never shared.
        store: False leaves nothing of this request behind.
        pin_s: how long its blocks may not be evicted after it ended.
        marks: lengths of prefixes that other prompts may share.
        initial: the state the reply begins in, see `ReplyText`; None for plain text.
        tools: whether calls of tools are told apart from text.
        record: for the block log.
        processors: makes more logits processors, one set for this sequence alone, on the engine's thread.
    """

    prompt: tuple[int, ...] = field(repr=False)
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    salt: str = ""
    store: bool = True
    pin_s: float = 0.0
    marks: tuple[int, ...] = ()
    initial: str | None = None
    tools: bool = False
    record: Record | None = None
    processors: Callable[[], list[Processor]] | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("the prompt has no tokens; give at least one.")
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}; ask for at least 1.")


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability, and the likeliest alternatives with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Started:
    """The request left the queue: how many of its prompt tokens were restored."""

    held_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Prefilled:
    """Progress of a prefill, restored tokens included."""

    done_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Piece:
    """A token and the text that became certain with it, maybe none; the last piece may be text without a token."""

    segments: tuple[Segment, ...]
    token: int | None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class Finished:
    """The end. `reason` is `stop` (a stop token or text), `length`, or `cancelled`; `stopped_by` is the stop text."""

    reason: Literal["stop", "length", "cancelled"]
    stopped_by: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    event: RequestEvent


@dataclass(frozen=True)
class Failed:
    """This request ended with an error; others go on."""

    error: Exception


Event = Started | Prefilled | Piece | Finished | Failed
Emit = Callable[[Event], None]
"""Takes the events of one request, on the engine's thread; it must not wait."""


def _within(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        raise UsageError(f"{name} is {value}; it goes from {'above ' if above else ''}{low} to {high}.")
