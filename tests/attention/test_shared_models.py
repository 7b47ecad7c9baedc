"""Sequences that share prefixes, through real models of mlx-lm: they join, leave and grow, each as if it were alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kinds import CONFIGS, build
from mlx_lm.models.cache import make_prompt_cache

from mlxkv.attention.dispatch import SERVED, Dispatch
from mlxkv.attention.shared_prefix import Batch, branch, extend

WITHOUT_HOOK = ("gemma2", "deepseek_v3", "deepseek_v2")
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

    def __init__(self, module, hook: Dispatch, seed: int) -> None:
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
        if group == 1 and mates:  # cut out of a sequence that is already running
            self.joining = branch(self.batch, mates[0], len(prefix))
            return sequence.prompt[len(prefix) :]
        if group == 1:
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

    def run(self, events: int) -> None:
        for _ in range(3):
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
                cache.check_integrity()


@pytest.mark.parametrize("architecture", [*SERVED, *WITHOUT_HOOK])
def test_six_sequences_in_two_groups_are_each_as_if_alone(architecture):
    module = build(CONFIGS[architecture])
    with Dispatch(module) as hook:
        assert hook.served == (architecture in SERVED)
        play = Play(module, hook, seed=len(architecture))
        play.run(60)
        assert play.steps > 20
