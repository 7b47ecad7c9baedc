"""Decode with one copy of a shared prefix against mlx-lm's BatchGenerator, which gives each sequence its own.

    python benchmarks/shared_prefix.py --rounds 7

The same model, prefix, suffixes and greedy steps for both, in turns; a step is one token for every sequence. KV bytes
are those of the arrays held at the end. Both keep a step queued ahead and compute log-probabilities.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import common
from common import Figure, Samples, in_turns, plain_prefill, say
from core import random_tokens

# isort: split

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from mlxkv.attention.dispatch import Dispatch
from mlxkv.attention.shared_prefix import LONE_STEPS, Batch, branch, cache_of, extend
from mlxkv.core.units import format_bytes
from mlxkv.models.loader import load

PREFIXES = (1024, 4096)
SEQUENCES = (1, 2, 4, 8, 16)
LEAST = {(4096, 8): 1.7, (1024, 4): 1.0} | {(prefix, 1): 0.98 for prefix in PREFIXES}
RAGGED = (4000, *[100] * 7)
CHUNK_TOKENS = 256
BAR = 40


class Shared:
    """Ours: a batch over one copy."""

    def __init__(self, module: Any, batch: Batch, tokens: Sequence[int]) -> None:
        self.module, self.batch = module, batch
        self.next = mx.array(tokens)
        self.said: list[list[int]] = []
        self.queue()

    def queue(self) -> None:
        logits = self.module(self.next[:, None], cache=self.batch)[:, -1, :]
        self.logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self.next = mx.argmax(self.logprobs, axis=-1)
        mx.async_eval(self.next, self.logprobs)

    def step(self) -> None:
        current, logprobs = self.next, self.logprobs
        self.queue()
        mx.eval(current, logprobs)
        self.said.append(current.tolist())

    def kv_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.batch)


class Copies:
    """mlx-lm's: every sequence its own keys and values, padded to the longest."""

    def __init__(self, module: Any, caches: list[list[Any]], tokens: Sequence[int]) -> None:
        self.generator = BatchGenerator(
            module, max_tokens=10**6, completion_batch_size=len(caches), prefill_batch_size=len(caches)
        )
        self.generator.insert([[token] for token in tokens], caches=caches)
        self.said: list[list[int]] = []
        while not self.step():
            pass

    def step(self) -> bool:
        responses = self.generator.next()[1]
        if responses:
            self.said.append([response.token for response in responses])
        return bool(responses)

    def kv_bytes(self) -> int:
        return int(self.generator.prompt_cache_nbytes)


def main() -> int:
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--prefixes", type=int, nargs="+", default=PREFIXES)
    parser.add_argument("--sequences", type=int, nargs="+", default=SEQUENCES)
    parser.add_argument("--suffix", metavar="N", type=int, default=64, help="tokens of its own a sequence begins with")
    parser.add_argument("--steps", metavar="N", type=int, default=8, help="decode steps a round (default 8)")
    options = parser.parse_args()
    started = common.head()
    say("loading smollm2-135m ...")
    module = load("smollm2-135m").module
    figures: list[Figure] = []
    with Dispatch(module) as hook:
        longest = max(options.prefixes)
        say(f"prefill of {longest:,} tokens ...")
        whole = plain_prefill(module, random_tokens(longest + 1), CHUNK_TOKENS)
        for prefix in options.prefixes:
            for count in options.sequences:
                say(f"prefix {prefix:,}, {count} sequences ...")
                figures += pair(module, hook, whole, prefix, count, options)
    figures.append(ragged(hook, whole))
    code = common.report(started, figures, options.json)
    print(plot(figures))
    return code


def pair(module: Any, hook: Dispatch, whole: list[Any], prefix: int, count: int, options: Any) -> list[Figure]:
    """Speed and bytes of one prefix and number of sequences."""
    holder = hook.begin([cut(cache, prefix) for cache in whole])
    prompts = [random.Random(1000 + i).choices(range(128), k=options.suffix + 1) for i in range(count)]
    rows = []
    for prompt in prompts:
        row = branch(holder, 0)
        module(mx.array(prompt[:-1])[None], cache=row)
        mx.eval([cache.state for cache in row])
        rows.append(row)
    copies = Copies(module, [[cache.extract(0) for cache in row] for row in rows], [p[-1] for p in prompts])
    batch = rows[0]
    for row in rows[1:]:
        extend(batch, row)
    del holder, row, rows
    mx.eval([cache.state for cache in batch])
    shared = Shared(module, batch, [p[-1] for p in prompts])
    mx.clear_cache()

    def run(one: Shared | Copies) -> float:
        before = time.perf_counter()
        for _ in range(options.steps):
            one.step()
        return time.perf_counter() - before

    for _ in range(LONE_STEPS + 1):  # one sequence has plain arrays by then
        shared.step(), copies.step()
    run(shared), run(copies)
    found = in_turns({"shared": lambda: run(shared), "mlx-lm": lambda: run(copies)}, options.rounds)
    made = min(len(shared.said), len(copies.said))
    equal = sum(
        [step[i] for step in shared.said[:made]] == [step[i] for step in copies.said[:made]] for i in range(count)
    )
    return figures_of(found, shared, copies, prefix, count, equal, options)


def figures_of(
    found: dict[str, Samples], shared: Shared, copies: Copies, prefix: int, count: int, equal: int, options: Any
) -> list[Figure]:
    name = f"prefix {prefix:,}, sequences {count:>2}"
    rates = {key: count * options.steps / samples.median for key, samples in found.items()}
    ratio = found["mlx-lm"].over(found["shared"])
    spread = statistics.quantiles(
        [a / b for a, b in zip(found["mlx-lm"].seconds, found["shared"].seconds, strict=True)]
    )
    cpu = statistics.median(
        a / b for a, b in zip(found["mlx-lm"].cpu_seconds, found["shared"].cpu_seconds, strict=True)
    )
    suffix = shared.batch[0].tokens(0) - prefix
    token_bytes = 2 * sum(keys.shape[1] * keys.shape[3] * keys.itemsize for keys in (c.state[0] for c in shared.batch))
    allowed = (prefix + count * (suffix + 256)) * token_bytes
    held, theirs = shared.kv_bytes(), copies.kv_bytes()
    samples = {key: value.seconds for key, value in found.items()}
    return [
        Figure(
            f"{name}: decode rate over mlx-lm's", ratio, "times",
            f"{rates['shared']:.1f} and {rates['mlx-lm']:.1f} tokens/s, quartiles {spread[0]:.2f} to {spread[2]:.2f},"
            f" by CPU time {cpu:.2f},"
            f" same tokens in {equal} of {count}",
            least=LEAST.get((prefix, count)), samples=samples,
        ),
        Figure(
            f"{name}: KV of prefix and suffixes", held / allowed, "of most",
            f"{format_bytes(held)}, mlx-lm {format_bytes(theirs)}, most {format_bytes(allowed)}", most=1.0,
        ),
    ]  # fmt: skip


def ragged(hook: Dispatch, whole: list[Any]) -> Figure:
    """KV of sequences that share nothing, one of them forty times as long as the others."""
    longest = min(RAGGED[0], whole[0].offset)
    batch = hook.begin([cut(cache, longest) for cache in whole])
    for length in RAGGED[1:]:
        extend(batch, hook.begin([cut(cache, length) for cache in whole]))
    own = sum(batch[0].tokens(row) for row in range(len(RAGGED)))
    exact = sum(cache.keys[..., :1, :].nbytes + cache.values[..., :1, :].nbytes for cache in whole) * own
    held = sum(cache.nbytes for cache in batch)
    padded = exact / own * len(RAGGED) * longest
    return Figure(
        f"one of {longest:,} tokens beside seven of 100: KV", held / exact, "of own",
        f"{format_bytes(held)}; padded to the longest {format_bytes(int(padded))}", most=1.15,
    )  # fmt: skip


def cut(cache: Any, tokens: int) -> Any:
    """The first tokens of a layer's cache, as arrays of their own."""
    return cache_of(*(mx.contiguous(side[:, :, :tokens]) for side in (cache.keys, cache.values)))


def plot(figures: Sequence[Figure]) -> str:
    """Bars of the decode rate over mlx-lm's."""
    rows = [figure for figure in figures if figure.unit == "times"]
    most = max(figure.value for figure in rows)
    lines = ["", "decode rate over mlx-lm's, whose own rate is the bar |"]
    for figure in rows:
        bar = "#" * round(figure.value / most * BAR)
        mark = round(BAR / most)
        bar = bar.ljust(BAR)
        lines.append(f"{figure.name.partition(':')[0]}  {bar[:mark]}|{bar[mark:]} {figure.value:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
