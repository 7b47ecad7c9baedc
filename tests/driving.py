"""Driving a tiny model by hand, with the block cache and without: what the restore tests compare.

Chunks are cut at absolute multiples of 64 and before the last prompt token, as the engine cuts them; a fresh run can be
cut anywhere, because an architecture with two attention paths (MLA) rounds differently for one token and for many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from mlxkv.cache.block_log import RequestEvent
from mlxkv.prompt_cache.block_cache import BlockCache

CHUNK_TOKENS = 64
State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Fresh:
    """A run without a block cache. `state` and `logits` are those after the whole prompt."""

    prompt: list[int]
    prompt_cache: list[Any]
    state: State
    logits: np.ndarray

    def first(self, tokens: int) -> State:
        """The state of the first `tokens` tokens; attention is causal, so later tokens did not change it."""
        return {path: array[:, :, :tokens] for path, array in self.state.items()}


@dataclass(frozen=True)
class Warm:
    """A run through a block cache: what was restored, the state and logits at the end, the request event."""

    held: int
    restored: State
    state: State
    logits: np.ndarray
    event: RequestEvent


def some_tokens(count: int, seed: int, vocabulary: int = 128) -> list[int]:
    """Random token ids; prompts of other seeds share nothing but by chance."""
    return np.random.default_rng(seed).integers(0, vocabulary, count).tolist()


def stops(first: int, tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> list[int]:
    """Where the engine ends its steps over tokens [first, tokens): multiples of a chunk, the last token, the end."""
    cuts = range((first // chunk_tokens + 1) * chunk_tokens, tokens, chunk_tokens)
    return sorted({*cuts, tokens - 1, tokens} - set(range(first + 1)))


def compute(module: nn.Module, prompt_cache: list[Any], prompt: Sequence[int], first: int, ends: Sequence[int]) -> Any:
    """Run the model over prompt[first:], one step up to each of `ends`; the logits after the last token."""
    logits = None
    for end in ends:
        logits = module(mx.array(prompt[first:end])[None], cache=prompt_cache)[0, -1]
        mx.eval(logits, [cache.state for cache in prompt_cache])
        first = end
    return np.array(logits.astype(mx.float32))


def state_of(prompt_cache: list[Any], path: str = "") -> State:
    """Copies of the arrays that mlx-lm's caches hold up to their own offset; none before the first token."""
    found: State = {}
    for i, cache in enumerate(prompt_cache):
        if type(cache) is CacheList:
            found |= state_of(list(cache.caches), f"{path}{i}.")
        elif not cache.empty():
            held = cache.keys_and_values() if type(cache) in (KVCache, QuantizedKVCache) else cache.state
            arrays = [(name, array) for name, array in tree_flatten(held) if isinstance(array, mx.array)]
            found |= {f"{path}{i}.{name}": as_numpy(array) for name, array in arrays}
    return found


def as_numpy(array: mx.array) -> np.ndarray:
    """A copy, of the same bytes; NumPy has no bfloat16, so that is given as its bits."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def run_fresh(
    module: nn.Module, prompt: list[int], ends: Sequence[int] | None = None, prompt_cache: list[Any] | None = None
) -> Fresh:
    """Compute the whole prompt, in steps up to each of `ends`."""
    made = make_prompt_cache(module) if prompt_cache is None else prompt_cache
    logits = compute(module, made, prompt, 0, stops(0, len(prompt)) if ends is None else ends)
    return Fresh(prompt, made, state_of(made), logits)


def run_warm(cache: BlockCache, module: nn.Module, prompt: list[int], *, salt: str = "") -> Warm:
    """Restore, compute the rest and commit after every step. The never-slower rule learns nothing from it."""
    sequence = cache.start(prompt, salt=salt)
    restored = state_of(sequence.prompt_cache)
    at, logits = sequence.held, None
    for end in stops(sequence.held, len(prompt)):
        logits = compute(module, sequence.prompt_cache, prompt, at, [end])
        at = end
        sequence.commit()
    state = state_of(sequence.prompt_cache)
    assert logits is not None, "nothing was left to compute the next token from"
    return Warm(sequence.held, restored, state, logits, sequence.finish())


def assert_same_state(found: State, expected: State) -> None:
    """Bit for bit, every array of every layer, and so every layer at the same token."""
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert found[path].shape == array.shape, path
        assert found[path].tobytes() == array.tobytes(), f"{path} differs"


def assert_equals_fresh(warm: Warm, fresh: Fresh) -> None:
    """What was restored, what it grew into and the next logits are those of a run without a cache."""
    if warm.held:
        assert_same_state(warm.restored, fresh.first(warm.held))
    assert_same_state(warm.state, fresh.state)
    assert np.abs(warm.logits - fresh.logits).max() == 0.0


def block_files(directory: Path) -> list[Path]:
    """Every file in `directory` that is named like a block."""
    return sorted(directory.glob("*/??/*.safetensors"))
