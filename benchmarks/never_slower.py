"""Never slower: time to the first token of a prompt whose beginning is held, over that of one never seen.

    python benchmarks/never_slower.py [--only tiny|demo] [--rounds 7] [--lengths 64,256,1024]

For each length of the beginning: the prompt computed (another salt, so nothing is held), restored from memory, and
restored from the SSD by a cache that keeps nothing in memory. The target is 1.05 of the computed time plus 2 ms. The
rule in `BlockCache` may decide to compute: that counts as restored too, for it is what a request gets.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import common
import mlx.nn as nn
from common import Figure, Samples, greedy, in_turns, say

from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import GIB
from mlxkv.engine.generate import generate
from mlxkv.models.fingerprint import module_fields
from mlxkv.models.loader import load
from mlxkv.prompt_cache.block_cache import BlockCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from tiny import build_tiny, tiny_qwen3_next

LENGTHS = {"tiny": (64, 128, 256, 512, 1024, 2048, 4096), "demo": (8, 64, 128, 256, 512, 1024)}
NEW_TOKENS = 9
SHARE, SLACK_S = 1.05, 0.002


def main() -> int:
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--only", choices=tuple(LENGTHS), help="only this model")
    parser.add_argument("--lengths", help="lengths of the beginning, in place of the model's own")
    options = parser.parse_args()
    started = common.head()
    figures: list[Figure] = []
    for which, lengths in LENGTHS.items():
        if options.only in (None, which):
            chosen = tuple(map(int, options.lengths.split(","))) if options.lengths else lengths
            figures += ladder(which, chosen, options.rounds)
    return common.report(started, figures, options.json)


def ladder(which: str, lengths: tuple[int, ...], rounds: int) -> list[Figure]:
    """Every length of one model, both tiers."""
    if which == "tiny":
        module: nn.Module = build_tiny(tiny_qwen3_next())
        fields: Mapping[str, str] = module_fields(module)
        vocabulary = 128
    else:
        say("loading the demo model ...")
        loaded = load("smollm2-135m")
        module, fields, vocabulary = loaded.module, loaded.fields, 40_000
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as directory:

        def opened(hot_bytes: int) -> BlockCache:
            config = CacheConfig(directory=Path(directory), hot_bytes=hot_bytes, cold_bytes=8 * GIB)
            return BlockCache(module, fields, BlockStore(config), name=which)

        with opened(2 * GIB) as hot, opened(0) as cold:
            for length in lengths:
                say(f"{which}, {length} tokens ...")
                source = random.Random(length)
                beginning = [source.randrange(vocabulary) for _ in range(length)]
                first_token(module, hot, [*beginning, 1], marks=(length,))
                assert hot.store.flush()

                def variant(
                    cache: BlockCache, *, salted: bool, beginning: list[int] = beginning
                ) -> Callable[[], float]:
                    def run() -> float:
                        end = [random.randrange(vocabulary) for _ in range(NEW_TOKENS)]
                        salt = str(time.perf_counter_ns()) if salted else ""
                        return first_token(module, cache, [*beginning, *end], salt=salt, marks=(len(beginning),))

                    return run

                variants = {
                    "computed": variant(hot, salted=True),
                    "from memory": variant(hot, salted=False),
                    "from the SSD": variant(cold, salted=False),
                }
                for warm_up in variants.values():
                    warm_up()
                figures += judged(which, length, in_turns(variants, rounds))
    return figures


def first_token(
    module: nn.Module, cache: BlockCache, prompt: list[int], *, salt: str = "", marks: tuple[int, ...] = ()
) -> float:
    """Seconds from the request to its first token."""
    run = generate(module, cache, prompt, max_tokens=1, sampler=greedy, salt=salt, marks=marks)
    list(run)
    assert run.event is not None
    assert run.event.ttft_s is not None
    return run.event.ttft_s


def judged(which: str, length: int, samples: Mapping[str, Samples]) -> list[Figure]:
    computed = samples["computed"]
    allowed = Samples(tuple(SHARE * seconds + SLACK_S for seconds in computed.seconds))
    return [
        Figure(
            f"{which}, {length:,} tokens {tier}",
            samples[tier].over(allowed),
            "of target",
            f"{samples[tier].median * 1e3:.1f} ms, computed {computed.median * 1e3:.1f} ms",
            most=1.0,
            samples={"computed": computed.seconds, tier: samples[tier].seconds},
        )
        for tier in ("from memory", "from the SSD")
    ]


if __name__ == "__main__":
    sys.exit(main())
