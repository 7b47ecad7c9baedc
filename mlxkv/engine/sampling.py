"""How the next token of each row is chosen: mlx-lm's samplers and processors, each row's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlxkv.core.device import is_device_error
from mlxkv.engine.request import Request, TokenLogprob

_SEED_STEP = 1_000_003
_entropy = random.SystemRandom()


class RowSampler:
    """One row's sampling. Owner: the engine's thread.

    A seeded row draws with a key of its own for every token: who shares the batch neither moves it nor is moved by it.
    An exception in its processors stays in `error` and ends this row alone, unless it is the device's, which all hear.
    """

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self.output: list[int] = []
        self.error: Exception | None = None
        self._seed = sampling.seed if sampling.temperature else None
        self._drawn = 0
        self._wanted = request.logprobs
        self._prompt = mx.array(request.prompt)
        self._sample: Callable[[mx.array], mx.array] = make_sampler(
            temp=sampling.temperature, top_p=sampling.top_p, min_p=sampling.min_p, top_k=sampling.top_k
        )
        self._processors = make_logits_processors(
            dict(sampling.logit_bias) or None,
            sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty or None,
            frequency_penalty=sampling.frequency_penalty or None,
        )
        self._processors += request.processors() if request.processors else []
        self.is_greedy = not sampling.temperature and not self._processors and self._wanted is None

    def next(self, logits: mx.array, last: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """The next token [1] from its logits [1, V], not evaluated, and its log-probabilities [V] when they are wanted.

        Args:
            last: the token before it, [1], when that is not in `output` yet.
        """
        self._drawn += 1
        try:
            if self._processors:
                so_far = self._so_far(last)
                for process in self._processors:
                    logits = process(so_far, logits)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            token = self._sample(logprobs) if self._seed is None else self._draw(self._seed, logprobs)
            return token, logprobs[0] if self._wanted is not None else None
        except Exception as error:
            if is_device_error(error):
                raise
            self.error = error  # a processor may raise anything; it ends this request alone
            return mx.argmax(logits, axis=-1), None

    def told(self, token: int, logprobs: mx.array | None) -> TokenLogprob | None:
        """The token's own log-probability and the likeliest with theirs, when they were asked for."""
        if logprobs is None or self._wanted is None:
            return None
        count = self._wanted
        top: list[int] = mx.argsort(-logprobs)[:count].tolist() if count else []
        values = logprobs[mx.array([token, *top])].tolist()
        return TokenLogprob(token, values[0], tuple(zip(top, values[1:], strict=True)))

    def _so_far(self, last: mx.array | None) -> mx.array:
        parts = [self._prompt, mx.array(self.output, mx.int32)] if self.output else [self._prompt]
        return mx.concatenate([*parts, last.astype(mx.int32)] if last is not None else parts)

    def _draw(self, seed: int, logprobs: mx.array) -> mx.array:
        mx.random.seed((seed * _SEED_STEP + self._drawn) % 2**64)
        try:
            return self._sample(logprobs)
        finally:
            mx.random.seed(_entropy.getrandbits(64))  # MLX has one generator for all: rows without a seed stay random


class Sampled(NamedTuple):
    """The next token of every row, `[rows]`, maybe not evaluated; log-probabilities [V] of those that want them."""

    tokens: mx.array
    logprobs: list[mx.array | None]


def sample_rows(rows: Sequence[RowSampler], logits: mx.array, last: Sequence[mx.array | None]) -> Sampled:
    """Choose the next token of every row from its logits `[rows, V]`; `last` as for `RowSampler.next`."""
    if all(row.is_greedy for row in rows):
        return Sampled(mx.argmax(logits, axis=-1), [None] * len(rows))
    chosen = [row.next(logits[i : i + 1], last[i]) for i, row in enumerate(rows)]
    return Sampled(mx.concatenate([token for token, _ in chosen]), [logprobs for _, logprobs in chosen])
