"""Any sequence of requests on models with windows and states answers as runs without a cache do.

Requests begin as earlier ones did, to any token; replies end early; chunks end anywhere; two run at once; the process
starts again with other budgets, so small that checkpoints are evicted, with one tier, or with one that waits for a
second use. The oracle is mlx-lm's own caches.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache as remember
from pathlib import Path
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from driving import some_tokens
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kinds import CONFIGS, Answer, Run, build, check_answer, run_plain
from tiny import tiny_gpt_oss, tiny_lfm2, tiny_qwen3_next

from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig, ColdMode
from mlxkv.core.units import GIB, MIB
from mlxkv.engine.generate import Generation, generate
from mlxkv.models.fingerprint import module_fields
from mlxkv.prompt_cache.block_cache import BlockCache

MODELS = {
    "state": tiny_qwen3_next(),
    "small state": tiny_lfm2(),
    "state and a window of 65": CONFIGS["recurrent_gemma"] | {"attention_window_size": 65},
    "windows of 100 around a full layer": tiny_gpt_oss()
    | {"sliding_window": 100, "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]},
}
TO_THE_BIT = ("state", "small state")
"""Without a window nothing depends on where steps are cut; a wrapped ring adds its keys up in another order."""

VOCABULARY = 100
MOST_TOKENS = 400


@dataclass(frozen=True)
class Request:
    """A prompt: the first `shared` tokens of a request `back` ago with its reply, and `new` more."""

    back: int
    shared: int
    new: int
    reply: int
    heard: int
    chunk_tokens: int
    marks: tuple[int, ...]
    salt: str


@dataclass(frozen=True)
class Restart:
    """Budgets in blocks with a checkpoint each; None is room for all."""

    hot: int | None
    cold: int | None
    mode: ColdMode


Step = Request | Restart | Literal["flush"]

requests = st.builds(
    Request,
    back=st.sampled_from([1, 1, 1, 2, 3]),
    shared=st.sampled_from([MOST_TOKENS] * 4 + [20, 64, 100, 129, 190, 255]),
    new=st.sampled_from([70, 1, 5, 62, 63, 64, 65, 130]),
    reply=st.sampled_from([1, 2, 5, 40, 66]),
    heard=st.sampled_from([66, 66, 66, 1, 3, 37]),
    chunk_tokens=st.sampled_from([64, 20, 65, 100, 256]),
    marks=st.lists(st.integers(0, MOST_TOKENS), max_size=2).map(tuple),
    salt=st.sampled_from(["", "", "", "x"]),
)
restarts = st.builds(
    Restart,
    hot=st.sampled_from([None, 0, 1, 4]),
    cold=st.sampled_from([None, None, 0, 3, 10]),
    mode=st.sampled_from(["through", "second-use"]),
)
scripts = st.lists(requests | requests | requests | requests | restarts | st.just("flush"), min_size=7, max_size=10)


@remember
def model(name: str) -> tuple[nn.Module, dict[str, str]]:
    module = build(MODELS[name])
    return module, dict(module_fields(module, None))


def open_cache(name: str, directory: Path, how: Restart) -> BlockCache:
    module, fields = model(name)
    layout = BlockCache(module, fields, BlockStore(CacheConfig(directory=None, hot_bytes=0)), name=name).layout
    unit = layout.block_bytes + layout.checkpoint_bytes
    config = CacheConfig(
        directory=directory,
        hot_bytes=64 * MIB if how.hot is None else how.hot * unit,
        cold_bytes=GIB if how.cold is None else how.cold and MIB + how.cold * unit,
        cold_mode=how.mode,
        floor_bytes=0,
    )
    return BlockCache(module, fields, BlockStore(config), name=name)


class Running:
    """One request, a token at a time."""

    def __init__(self, name: str, cache: BlockCache, prompt: list[int], asked: Request) -> None:
        self.prompt = prompt
        self.logprobs: list[mx.array] = []
        self.reply: list[int] = []
        self.heard = asked.heard
        self.generation: Generation = generate(
            model(name)[0], cache, prompt, max_tokens=asked.reply, sampler=self.greedy, salt=asked.salt,
            chunk_tokens=asked.chunk_tokens, marks=asked.marks,
        )  # fmt: skip
        self.tokens: Iterator[int] = iter(self.generation)

    def greedy(self, step: mx.array) -> mx.array:
        self.logprobs.append(step[0])
        return mx.argmax(step, axis=-1)

    def hear(self) -> bool:
        """One more token; False when the reply is over, or nobody listens any more."""
        token = next(self.tokens, None) if len(self.reply) < self.heard else None
        if token is None:
            self.generation.close()
            return False
        self.reply.append(token)
        return True

    def answer(self) -> Answer:
        event = self.generation.close()
        logprobs = [np.array(step) for step in self.logprobs[: len(self.reply)]]
        return Answer(event.hot_tokens + event.cold_tokens, self.reply, logprobs)


def play(name: str, script: list[Step], directory: Path) -> None:
    """Run the script, every second request together with the one before it, and hold each against an empty cache."""
    told = [some_tokens(200, seed=1, vocabulary=VOCABULARY)]
    cache = open_cache(name, directory, Restart(None, None, "through"))
    running: list[Running] = []

    def finish() -> None:
        while any([request.hear() for request in running]):
            cache.store.check_integrity()
        for request in running:
            plain: Run = run_plain(model(name)[0], request.prompt, len(request.reply))
            check_answer(request.answer(), plain, exact=name in TO_THE_BIT)
            told.append(request.prompt + request.reply)
        running.clear()
        cache.check_integrity()
        assert cache.store.pins() == 0

    for i, step in enumerate(script):
        if isinstance(step, Request):
            begin = told[-min(step.back, len(told))][: min(step.shared, MOST_TOKENS - step.new)]
            prompt = begin + some_tokens(step.new, seed=100 + i, vocabulary=VOCABULARY)
            running.append(Running(name, cache, prompt, step))
            if len(running) == 2:
                finish()
        elif step == "flush":
            cache.store.flush()
        else:
            finish()
            cache.close()
            cache = open_cache(name, directory, step)
    finish()
    cache.close()


@pytest.mark.parametrize("name", MODELS)
@settings(
    max_examples=8, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(script=scripts)
def test_any_sequence_of_requests_is_answered_as_without_a_cache(name: str, script: list[Step]) -> None:
    directory = Path(tempfile.mkdtemp(prefix="mlxkv-random-"))
    try:
        play(name, script, directory / "blocks")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
