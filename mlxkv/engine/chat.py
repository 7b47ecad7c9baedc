"""A conversation: messages in, text out, every turn through the block cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from mlxkv.blocklog.outline import Outliner, load_key
from mlxkv.cache.block_log import RequestEvent
from mlxkv.core.errors import DeviceError, MlxkvError, UsageError
from mlxkv.engine.generate import Progress, generate
from mlxkv.models.chat import render, system_tokens
from mlxkv.models.loader import LoadedModel
from mlxkv.prompt_cache.block_cache import BlockCache, CachedSequence


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled. `temperature` 0 takes the likeliest token; `seed` makes the rest repeatable."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise UsageError(f"temperature is {self.temperature}; it goes from 0 up, 1 is the model's own.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p is {self.top_p}; it is above 0 and at most 1.")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UsageError(f"the seed is {self.seed}; it is a whole number from 0 to 2**64 - 1.")
        if self.max_tokens < 1:
            raise UsageError(f"max tokens is {self.max_tokens}; ask for at least 1.")


class Chat:
    """Owner: the thread that owns MLX. After each reply, `event` is its request event."""

    def __init__(
        self, model: LoadedModel, cache: BlockCache, *, system: str | None = None, log_text: bool = False
    ) -> None:
        """Begin with a system message, if any; `log_text` puts the prompts into the block log."""
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.event: RequestEvent | None = None
        self._model = model
        self._cache = cache
        self._log_text = log_text
        self._outliner = Outliner(model.tokenizer, key=load_key()) if cache.store.config.log is not None else None

    def reply(self, text: str, sampling: Sampling, *, on_progress: Progress | None = None) -> Iterator[str]:
        """Yield the reply to `text` in pieces that are whole characters.

        Leaving the loop early stops the reply; what was said so far stays in the conversation.

        Raises:
            UsageError: the conversation does not fit the model's context, or its template refuses the message. Nothing
                was computed, and the conversation is what it was before.
            DeviceError: the GPU failed. The conversation is what it was before.
        """
        asked = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = render(self._model.tokenizer, self.messages)
            max_tokens = self._room(len(prompt), sampling.max_tokens)
        except MlxkvError:
            self.messages.pop()
            raise
        if sampling.seed is not None:
            mx.random.seed(sampling.seed)
        try:
            yield from self._generated(prompt, sampling, max_tokens, on_progress)
        except DeviceError:
            del self.messages[asked:]
            raise

    def _generated(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, on_progress: Progress | None
    ) -> Iterator[str]:
        generation = generate(
            self._model.module,
            self._cache,
            prompt,
            max_tokens=max_tokens,
            sampler=make_sampler(temp=sampling.temperature, top_p=sampling.top_p),
            stop_tokens=frozenset(self._model.tokenizer.eos_token_ids),
            marks=(system_tokens(self._model.tokenizer, self.messages, prompt),),
            on_progress=on_progress,
        )
        self._describe(generation.sequence, prompt)
        said = ""
        try:
            detokenizer = self._model.tokenizer.detokenizer
            detokenizer.reset()
            for token in generation:
                detokenizer.add_token(token)
                if piece := detokenizer.last_segment:
                    said += piece
                    yield piece
            detokenizer.finalize()
            if piece := detokenizer.last_segment:
                said += piece
                yield piece
        finally:
            self.event = generation.close()
            self.messages.append({"role": "assistant", "content": said})

    def _describe(self, sequence: CachedSequence, prompt: Sequence[int]) -> None:
        """What the block log says of the prompt, where there is a log."""
        if self._outliner is None:
            return
        outliner, outline = self._outliner, self._outliner.outline(prompt, self.messages)
        sequence.describe = lambda reply: outliner.with_reply(outline, reply).to_fields()
        sequence.text = outliner.text(prompt) if self._log_text else None

    def _room(self, prompt_tokens: int, wanted: int) -> int:
        """How many tokens a reply may have."""
        context = self._model.context_tokens
        if context is None:
            return wanted
        if prompt_tokens >= context:
            raise UsageError(
                f"the conversation has {prompt_tokens:,} tokens and the model's context is {context:,};"
                " start a new one, or shorten it."
            )
        return min(wanted, context - prompt_tokens)
