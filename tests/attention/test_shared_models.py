"""Sequences that share prefixes, through real models of mlx-lm: they join, leave and grow, each as if it were alone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kinds import CONFIGS, build
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.attention.dispatch import SERVED, Dispatch
from mlxkv.attention.shared_prefix import Batch, SharedPrefixCache, branch, extend
from mlxkv.core.errors import ModelNotFoundError
from mlxkv.models.gguf import find_demo_gguf

LONGER = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "qwen3_moe", "smollm3", "olmo2")
WITHOUT_HOOK = ("gemma2", "deepseek_v3", "deepseek_v2")
MIXED = ("gemma3_text", "gpt_oss", "qwen3_next", "lfm2")
"""Windows, sinks and states in some layers: those stay mlx-lm's, the rest shares."""
CHANGES = {
    "gemma2": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "starcoder2": {"vocab_size": 128},
}
"""So that query heads share KV heads in gemma2, whose masks have an axis more; and no head of 49,152 tokens."""
CLOSE = 1e-4


@dataclass
class Sequence:
    """A sequence and mlx-lm's own run of it by itself, the oracle."""

    prompt: list[int]
    oracle: list[Any] = field(default_factory=list)
    token: int = 0


def run_alone(module, sequence: Sequence, tokens: list[int]) -> np.ndarray:
    logits = module(mx.array(tokens)[None], cache=sequence.oracle)[0, -1]
    mx.eval(logits)
    return np.array(logits)


class Play:
    """Two groups of three sequences over one model; checks every row's logits against the sequence alone."""

    def __init__(self, module, hook: Dispatch, seed: int, *, mixed: bool = False) -> None:
        self.mixed = mixed
        self.module, self.hook, self.random = module, hook, random.Random(seed)
        size = 100
        self.prefixes = [[self.random.randrange(size) for _ in range(n)] for n in (150, 64)]
        self.waiting = [
            Sequence(self.prefixes[i % 2] + [self.random.randrange(size) for _ in range(self.random.randrange(1, 90))])
            for i in range(6)
        ]
        self.running: list[Sequence] = []
        self.batch: Batch | None = None
        self.holders: dict[int, Batch] = {}
        self.steps = self.worst = 0

    def check(self, found: mx.array, expected: np.ndarray, sequence: Sequence) -> None:
        found = np.array(found)
        self.worst = max(self.worst, np.abs(found - expected).max())
        assert np.abs(found - expected).max() < CLOSE
        assert found.argmax() == expected.argmax()
        sequence.token = int(expected.argmax())

    def join(self) -> None:
        sequence = self.waiting.pop(0)
        sequence.oracle = make_prompt_cache(self.module)
        expected = run_alone(self.module, sequence, sequence.prompt)
        group = 0 if sequence.prompt[:64] == self.prefixes[0][:64] else 1
        own = self.started(group, sequence)
        for start in range(0, len(own), 40):
            logits = self.module(mx.array(own[start : start + 40])[None], cache=self.joining)
        self.check(logits[0, -1], expected, sequence)
        if self.batch is None:
            self.batch = self.joining
        else:
            extend(self.batch, self.joining)
        self.running.append(sequence)

    def started(self, group: int, sequence: Sequence) -> list[int]:
        """Begin the sequence's caches; returns the tokens that are left to compute."""
        prefix = self.prefixes[group]
        mates = [i for i, other in enumerate(self.running) if other.prompt[: len(prefix)] == prefix]
        if group == 1 and mates and not self.mixed:  # cut out of a sequence that is already running
            self.joining = branch(self.batch, mates[0], len(prefix))
            return sequence.prompt[len(prefix) :]
        if group == 1 and not self.mixed:
            self.joining = self.hook.begin(make_prompt_cache(self.module))
            return sequence.prompt
        if group not in self.holders:  # computed once before anybody runs
            caches = make_prompt_cache(self.module)
            self.module(mx.array(prefix)[None], cache=caches)
            self.holders[group] = self.hook.begin(caches)
        self.joining = branch(self.holders[group], 0)
        return sequence.prompt[len(prefix) :]

    def leave(self) -> None:
        gone = self.random.randrange(len(self.running))
        sequence = self.running.pop(gone)
        if self.running:
            keep = [i for i in range(len(self.running) + 1) if i != gone]
            for cache in self.batch:
                cache.filter(keep)
        else:
            self.batch = None
        self.waiting.append(Sequence(sequence.prompt))

    def step(self) -> None:
        tokens = mx.array([[sequence.token] for sequence in self.running])
        logits = self.module(tokens, cache=self.batch)
        mx.eval(logits)
        for row, sequence in enumerate(self.running):
            self.check(logits[row, -1], run_alone(self.module, sequence, [sequence.token]), sequence)
        self.steps += 1

    def run(self, events: int, first: int = 3) -> None:
        for _ in range(first):
            self.join()
        for _ in range(events):
            draw = self.random.random()
            if draw < 0.2 and self.waiting:
                self.join()
            elif draw < 0.35 and self.running:
                self.leave()
            elif self.running:
                self.step()
            for cache in self.batch or []:
                if isinstance(cache, SharedPrefixCache):
                    cache.check_integrity()


@pytest.mark.parametrize("architecture", [*SERVED, *WITHOUT_HOOK, *MIXED])
def test_six_sequences_in_two_groups_are_each_as_if_alone(architecture):
    module = build(CONFIGS[architecture] | CHANGES.get(architecture, {}))
    with Dispatch(module) as hook:
        assert hook.served == (architecture in SERVED)
        play = Play(module, hook, seed=len(architecture), mixed=architecture in MIXED)
        play.run(32 if architecture in LONGER else 4, first=3 if architecture in LONGER else 2)
        assert play.steps >= (10 if architecture in LONGER else 1)


def test_a_served_model_may_have_windows_too():
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}
    module = build(CONFIGS["llama"] | windows)
    with Dispatch(module) as hook:
        assert hook.served
        play = Play(module, hook, seed=3, mixed=True)
        play.run(32)
        assert play.steps >= 10


def test_the_demo_model_too():
    try:
        find_demo_gguf()
    except ModelNotFoundError:
        pytest.skip("the demo weights are not installed")
    fast = {name: value for name, value in os.environ.items() if name != "MLXKV_BLAS"}
    paths = [str(Path(__file__).parents[1]), *sys.path]
    code = (
        "import mlxkv\nfrom mlxkv.models.loader import load\nfrom mlxkv.attention.dispatch import Dispatch\n"
        "from attention.test_shared_models import Play\nmodule = load('smollm2-135m').module\n"
        "play = Play(module, Dispatch(module), seed=1)\nplay.run(9, first=4)\nprint(play.steps, play.worst)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=fast | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps, worst = done.stdout.split()
    assert int(steps) >= 4
    assert float(worst) < CLOSE
