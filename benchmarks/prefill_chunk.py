"""Prefill tokens per second by chunk size: where CPU_CHUNK_TOKENS and GPU_CHUNK_TOKENS of the engine come from.

    python benchmarks/prefill_chunk.py --tokens 1025 --rounds 3

No block cache, mlx-lm's own loop: a chunk is run, its keys and values are evaluated, and the next begins.
"""

from __future__ import annotations

import statistics
import sys
import time

import common
from common import Figure, Samples, in_turns, plain_prefill, say, shown
from core import random_tokens

from mlxkv.models.loader import load

CHUNKS = (64, 128, 256, 512, 1024, 2048)


def main() -> int:
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="default smollm2-135m")
    parser.add_argument("--tokens", metavar="N", type=int, default=1025, help="length of the prompt (default 1025)")
    options = parser.parse_args()
    started = common.head()
    say(f"loading {options.model} ...")
    model = load(options.model)
    prompt = random_tokens(options.tokens)
    chunks = [chunk for chunk in CHUNKS if chunk < 2 * (options.tokens - 1)]

    def prefill(chunk: int) -> float:
        before = time.perf_counter()
        plain_prefill(model.module, prompt, chunk)
        return time.perf_counter() - before

    prefill(chunks[0])
    say(f"prefill of {options.tokens - 1:,} tokens in chunks of {', '.join(map(str, chunks))} ...")
    found = in_turns({str(chunk): lambda chunk=chunk: prefill(chunk) for chunk in chunks}, options.rounds)
    figures = [figure(chunk, samples, options.tokens - 1) for chunk, samples in found.items()]
    return common.report(started, figures, options.json)


def figure(chunk: str, samples: Samples, tokens: int) -> Figure:
    cpu = statistics.median(samples.cpu_seconds)
    detail = f"{tokens / cpu:.0f} tokens a CPU second; {shown(prefill=samples)}"
    return Figure(
        f"prefill in chunks of {chunk}",
        tokens / samples.median,
        "tokens/s",
        detail,
        samples={
            "seconds": samples.seconds,
            "cpu_seconds": samples.cpu_seconds,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
