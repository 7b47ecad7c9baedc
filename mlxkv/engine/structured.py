"""Replies that are JSON by construction: llguidance says which tokens may come next, a processor masks the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxkv.core.errors import UsageError
from mlxkv.engine.request import Processor

_ANY_OBJECT = {"type": "object"}
_FIX = "to use response_format, pip install 'mlxkv[json]'."


def processors_for(tokenizer: Any, schema: dict[str, Any] | None, vocabulary: int) -> Callable[[], list[Processor]]:
    """What makes the processors of one reply that has to follow `schema`; None is any JSON object.

    Raises:
        UsageError: the schema cannot be followed, or llguidance is not installed.
    """
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise UsageError(f"llguidance is not installed; {_FIX}") from None
    try:
        tokens = _tokens(tokenizer, vocabulary)
    except ValueError as error:
        raise UsageError(f"llguidance cannot read this model's tokenizer ({_first_line(error)}).") from error
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(_ANY_OBJECT if schema is None else schema))
    except ValueError as error:
        raise UsageError(f"the schema cannot be used ({_first_line(error)}).") from error
    wrong = LLMatcher.validate_grammar(grammar, tokens)
    if wrong:
        raise UsageError(f"the schema cannot be used ({_first_line(wrong)}).")
    ends = sorted(token for token in tokenizer.eos_token_ids if 0 <= token < vocabulary)
    return lambda: [_Mask(LLMatcher(tokens, grammar), ends)]


class _Mask:
    """One reply's processor. Owner: the engine's thread."""

    def __init__(self, matcher: Any, ends: list[int]) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        self._matcher = matcher
        self._ends = ends
        self._fill = fill_next_token_bitmask
        self._seen: int | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        new = [] if self._seen is None else tokens[self._seen :].tolist()
        self._seen = tokens.size
        if new and not self._matcher.consume_tokens(new):
            raise ValueError(f"the reply left its schema: {_first_line(self._matcher.get_error())}")
        size = logits.shape[-1]
        allowed = np.zeros((1, -(-size // 32)), np.int32)
        if self._matcher.is_stopped():
            for token in self._ends:
                allowed.view(np.uint32)[0, token // 32] |= np.uint32(1 << token % 32)
        else:
            self._fill(self._matcher, allowed)
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[:size].astype(bool)
        return mx.where(mx.array(bits), logits, -mx.inf)


@lru_cache(maxsize=4)
def _tokens(tokenizer: Any, vocabulary: int) -> Any:
    """llguidance's view of a tokenizer; about a second for 150,000 tokens."""
    from llguidance.hf import from_tokenizer

    ends = sorted(token for token in tokenizer.eos_token_ids if 0 <= token < vocabulary)
    return from_tokenizer(tokenizer._tokenizer, n_vocab=max(vocabulary, len(tokenizer)), eos_token=ends or None)


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]
