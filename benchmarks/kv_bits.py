"""What quantised KV costs in quality: KL divergence and greedy agreement against the unquantised cache.

    python benchmarks/kv_bits.py [--model smollm2-135m] [--prompt-tokens 257] [--steps 32]

The unquantised run answers a text greedily; each other run is fed the same tokens and compared step by step, once
computed and once restored from the SSD by a second cache. A hit must not be worse than a cold run with the same bits.
Quantised matrix products are slow on a CPU, so the defaults are small.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import common
import mlx.core as mx
import numpy as np
from common import Figure, say

from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import GIB
from mlxkv.engine.generate import generate
from mlxkv.models.loader import LoadedModel, load
from mlxkv.prompt_cache.block_cache import BlockCache

BITS = (8, 4)


@dataclass(frozen=True)
class Steps:
    """Log-probabilities [steps, vocabulary] after each token of the reply, and how many prompt tokens were restored."""

    logprobs: np.ndarray
    held: int

    def divergence(self, other: Steps) -> np.ndarray:
        """KL(self || other) of each step, in nats."""
        return (np.exp(self.logprobs) * (self.logprobs - other.logprobs)).sum(axis=1)

    def agreement(self, other: Steps) -> float:
        """Share of steps whose likeliest token is the same."""
        return float((self.logprobs.argmax(axis=1) == other.logprobs.argmax(axis=1)).mean())


def main() -> int:
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-tokens", type=int, default=257)
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args()
    started = common.head()
    say(f"loading {options.model} ...")
    model = load(options.model)
    text = (files("mlxkv.engine") / "demo_text.md").read_text(encoding="utf-8")
    prompt = model.tokenizer.encode(text)[: options.prompt_tokens]
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as directory:
        say("unquantised ...")
        reference, reply = run(model, Path(directory), prompt, None, options.steps, None)
        for bits in BITS:
            say(f"{bits} bits, computed ...")
            cold, _ = run(model, Path(directory), prompt, bits, options.steps, reply)
            say(f"{bits} bits, restored ...")
            warm, _ = run(model, Path(directory), prompt, bits, options.steps, reply)
            assert cold.held == 0
            assert warm.held >= (len(prompt) - 1) // 64 * 64
            figures += compared(bits, reference, cold, warm)
    return common.report(started, figures, options.json)


def run(
    model: LoadedModel, directory: Path, prompt: list[int], bits: int | None, steps: int, reply: list[int] | None
) -> tuple[Steps, list[int]]:
    """One request on a cache of its own over `directory`; greedy, or fed with `reply`."""
    logprobs: list[mx.array] = []

    def sampler(step: mx.array) -> mx.array:
        logprobs.append(step[0])
        return common.greedy(step) if reply is None else mx.array([reply[len(logprobs) - 1]])

    store = BlockStore(CacheConfig(directory=directory, hot_bytes=GIB, cold_bytes=4 * GIB))
    with BlockCache(model.module, model.fields, store, name=model.name, kv_bits=bits) as cache:
        generation = generate(model.module, cache, prompt, max_tokens=steps, sampler=sampler)
        tokens = list(generation)
    assert generation.event is not None
    held = generation.event.hot_tokens + generation.event.cold_tokens
    return Steps(np.array(mx.stack(logprobs).astype(mx.float32)).astype(np.float64), held), tokens


def compared(bits: int, reference: Steps, cold: Steps, warm: Steps) -> list[Figure]:
    found = []
    for name, steps in (("computed", cold), ("restored", warm)):
        kl = reference.divergence(steps)
        spread = f"median {np.median(kl):.2g}, most {kl.max():.2g}"
        found.append(Figure(f"KL at {bits} bits, {name}", float(kl.mean()), "nats", spread))
        agreed = reference.agreement(steps)
        found.append(Figure(f"greedy agreement at {bits} bits, {name}", agreed, "", f"{len(kl)} steps"))
    apart = float(np.abs(cold.logprobs - warm.logprobs).max())
    worse = float(reference.divergence(warm).mean() - reference.divergence(cold).mean())
    detail = f"log-probabilities differ by at most {apart:.2g}"
    return [*found, Figure(f"restored worse than computed, {bits} bits", worse, "nats", detail, most=1e-6)]


if __name__ == "__main__":
    sys.exit(main())
