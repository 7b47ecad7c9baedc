"""A process of its own for `test_processes`: the same conversations as its twin on the same root, in its own order.

    python worker.py CACHE_DIR SEED

Prints one JSON line: reused tokens, computed tokens, wrong answers.
"""

from __future__ import annotations

import json
import random
import sys

import numpy as np
from driving import run_fresh, run_warm, some_tokens
from tiny import build_tiny, tiny_llama

from mlxkv import BlockCache

PROMPTS = 6
ROUNDS = 4


def prompts() -> list[list[int]]:
    """Two system prompts of two blocks, each with three continuations of one block and a bit."""
    return [some_tokens(128, seed=chat % 2) + some_tokens(80, seed=10 + chat) for chat in range(PROMPTS)]


def main(cache_dir: str, seed: str) -> None:
    module = build_tiny(tiny_llama())
    fresh = [run_fresh(module, prompt) for prompt in prompts()]
    order = random.Random(int(seed))
    reused = computed = wrong = 0
    print("ready", flush=True)
    sys.stdin.readline()
    with BlockCache.open(module, cache_dir=cache_dir, hot="128KiB", cold="1600KiB") as cache:
        for _ in range(ROUNDS):
            for chat in order.sample(range(PROMPTS), PROMPTS):
                warm = run_warm(cache, module, fresh[chat].prompt)
                reused, computed = reused + warm.held, computed + warm.event.computed_tokens
                same = all(warm.state[path].tobytes() == array.tobytes() for path, array in fresh[chat].state.items())
                wrong += not (same and np.array_equal(warm.logits, fresh[chat].logits))
        cache.check_integrity()
        assert cache.store.pins() == 0
    print(json.dumps({"reused": reused, "computed": computed, "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
