"""One sequence from prompt to reply, through the block cache. The caller's thread owns MLX while it iterates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from mlxkv.cache.block_log import RequestEvent
from mlxkv.core.errors import UsageError
from mlxkv.engine.chunks import Chunks, default_chunks
from mlxkv.models.computing import computing
from mlxkv.models.loader import on_cpu
from mlxkv.prompt_cache.block_cache import BlockCache, CachedSequence

Sampler = Callable[[mx.array], mx.array]
"""Log-probabilities [1, vocabulary] -> token [1]; one of mlx-lm's."""
Progress = Callable[[int, int], None]
"""Called with prompt tokens done and prompt tokens in all, restored ones included."""


@dataclass
class Generation:
    """An iterator of token ids; `event` is the request's line once it has ended, however it ended.

    Closing it (or leaving the loop and calling `close`) commits what is full and lets go of the pins. After an error
    nothing more is committed, see `CachedSequence.fail`. What a device says when it fails is a `DeviceError`.
    """

    sequence: CachedSequence
    _tokens: Iterator[int]
    event: RequestEvent | None = field(default=None)

    def __iter__(self) -> Iterator[int]:
        try:
            yield from self._tokens
        finally:
            self.close()

    def close(self) -> RequestEvent:
        """End the request now."""
        if self.event is None:
            with computing():
                self.event = self.sequence.finish()
        return self.event


def generate(
    module: nn.Module,
    cache: BlockCache,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampler: Sampler,
    stop_tokens: frozenset[int] = frozenset(),
    chunk_tokens: int | Chunks | None = None,
    salt: str = "",
    marks: Sequence[int] = (),
    on_progress: Progress | None = None,
) -> Generation:
    """Restore the longest held prefix of `prompt`, compute the rest, and sample up to `max_tokens`.

    A token in `stop_tokens` ends the reply and is not yielded. Full blocks are published after every chunk and as
    they fill, so an aborted request leaves its work behind.

    Args:
        chunk_tokens: prompt tokens a step, or a plan of them by depth; chunks are cut at absolute multiples of it, so
            that a cold and a warm run cut at the same places. None is `default_chunks`.
        marks: lengths of prefixes that other prompts may share; see `BlockCache.start`.

    Raises:
        UsageError: an empty prompt, or `max_tokens` below 1.
        DeviceError: the GPU failed; says how, and what to change.
    """
    if max_tokens < 1:
        raise UsageError(f"max tokens is {max_tokens}; ask for at least 1.")
    chunks = Chunks.of(chunk_tokens) if isinstance(chunk_tokens, int) else chunk_tokens or default_chunks()
    with computing():
        sequence = cache.start(prompt, salt=salt, marks=marks)
    tokens = _run(module, sequence, prompt, max_tokens, sampler, stop_tokens, chunks, on_progress or _ignore)
    return Generation(sequence, tokens)


def _run(
    module: nn.Module,
    sequence: CachedSequence,
    prompt: Sequence[int],
    max_tokens: int,
    sampler: Sampler,
    stop_tokens: frozenset[int],
    chunks: Chunks,
    on_progress: Progress,
) -> Iterator[int]:
    # An error while computing publishes nothing more of the sequence, unlike a run that is given up.
    prefill(module, sequence, prompt, chunks, on_progress)
    with computing(failed=sequence.fail):
        token = _queue(module, sequence, mx.array(prompt[-1:]), sampler)
    ahead: mx.array | None = None
    for count in range(1, max_tokens + 1):
        # The next step is queued before this token is read, so that the device never waits for Python; but the first
        # token is handed out before: on a CPU, queueing a step waits for most of the one before.
        with computing(failed=sequence.fail):
            if 1 < count < max_tokens:
                ahead = _queue(module, sequence, token, sampler)
            value = int(token.item())
        if count == 1:
            sequence.first_token()
            on_progress(len(prompt), len(prompt))
        sequence.extend(value)
        if value in stop_tokens:
            return
        yield value
        with computing(failed=sequence.fail):
            sequence.commit()
            if count < max_tokens:
                token = _queue(module, sequence, token, sampler) if ahead is None else ahead


def prefill(
    module: nn.Module, sequence: CachedSequence, prompt: Sequence[int], chunks: Chunks, on_progress: Progress
) -> None:
    """Compute all prompt tokens but the last that are not held, and publish every full block as it is there."""
    started = time.perf_counter()
    first, last = sequence.held, len(prompt) - 1
    at = first
    on_progress(at, len(prompt))
    while at < last:
        stop = min(chunks.end(at), last, sequence.next_stop(at))
        with computing(failed=sequence.fail):
            module(mx.array(prompt[at:stop])[None], cache=sequence.prompt_cache)
            mx.eval([cache.state for cache in sequence.prompt_cache])
            mx.synchronize()  # an error of the device that `eval` did not tell is told here
            sequence.advance(stop - at)
            at = stop
            sequence.commit()
        if not on_cpu():
            mx.clear_cache()  # a GPU's buffers of this chunk's sizes; on a CPU they are used again
        on_progress(at, len(prompt))
    sequence.prefilled(at - first, time.perf_counter() - started)


def _queue(module: nn.Module, sequence: CachedSequence, token: mx.array, sampler: Sampler) -> mx.array:
    """Start one forward pass of `token` [1] and the sampling of the next, which is returned before it is there."""
    logits = module(token[None], cache=sequence.prompt_cache)[:, -1, :]
    sequence.advance(1)
    sampled = sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    mx.async_eval(sampled)
    return sampled


def _ignore(done: int, total: int) -> None:
    del done, total
