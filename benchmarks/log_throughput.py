"""How fast a log is summarised, and in how much memory: MB (1e6 B) a second of one core.

    python benchmarks/log_throughput.py --mb 1000

Makes its own logs: mlxkv's (requests with outlines, and for each ten commits, offloads and evictions), and one of oMLX
at DEBUG. Each is read by a process of its own, through the same code as `mlxkv log summary`; its peak memory is the
process's. The clock is CPU seconds of that process, so that a busy machine does not count; the wall clock is beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mlxkv.blocklog.readers import LogReader
from mlxkv.blocklog.summary import summarize
from mlxkv.cache.block_log import BlockEvent, RequestEvent, as_fields
from mlxkv.core.units import format_bytes

BLOCKS = 10  # of each request


def mlxkv_lines(source: random.Random) -> Iterator[str]:
    """Lines as mlxkv writes them, of ever new chains."""
    root, at = source.randbytes(32), datetime(2026, 11, 30, tzinfo=UTC)
    old: list[bytes] = []
    for number in range(10**9):
        request, parent = f"{number:012x}", root
        for index in range(BLOCKS):
            block = source.randbytes(32)
            common = {"root": root, "block": block, "parent": parent, "index": index, "bytes": 786_432}
            yield line(at, BlockEvent(event="commit", request=request, tokens=64, tier="hot", model="bench", **common))
            yield line(at, BlockEvent(event="offload", tier="cold", ms=1.234, model="bench", **common))
            old.append(block)
            if len(old) > 10_000:
                gone = old.pop(0)
                yield line(at, BlockEvent(event="evict", block=gone, parent=parent, bytes=786_432, tier="hot",
                                          tokens=64, reason="budget"))  # fmt: skip
            parent = block
        outline = {
            "key": "d2f1a6b03c44", "template": "5b1e6f0a9c21", "options": "0c7fd1b2a3e4", "bos_tokens": 1, "tools": [],
            "parts": [
                {"role": role, "end": end, "digest": source.randbytes(6).hex(), "index": i, "masked": "e197fe8be50e"}
                for i, (role, end) in enumerate([("system", 320), ("user", 900), ("end", 904)])
            ],
            "blocks": source.randbytes(4 * 14).hex(),
        }  # fmt: skip
        held = source.randrange(0, 264)
        yield line(at, RequestEvent(
            model="bench", root=root, request=request, prompt_tokens=904, hot_tokens=held, cold_tokens=0, tail_tokens=0,
            computed_tokens=904 - held, matched_tokens=held, restored_bytes=held * 12_288, restore_s=0.003,
            ttft_s=0.25, output_tokens=40, reason=f"diverged at token {held}", outline=outline,
        ))  # fmt: skip
        at += timedelta(seconds=1)


def line(at: datetime, event: BlockEvent | RequestEvent) -> str:
    found = {"time": at.isoformat(timespec="milliseconds"), "process": 4711, **as_fields(event)}
    return json.dumps(found, separators=(",", ":"), ensure_ascii=False)


def omlx_lines(source: random.Random) -> Iterator[str]:
    """Lines as oMLX writes them at DEBUG."""
    at = datetime(2026, 11, 30, tzinfo=UTC)
    for number in range(10**9):
        asctime = at.strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
        request = f"chatcmpl-{number:08x}"

        def said(logger: str, message: str, level: str = "DEBUG", asctime: str = asctime) -> str:
            return f"{asctime} - omlx.{logger} - {level} - [-] - {message}"

        yield said("cache.prefix_cache", f"Cache hit for {request}: {BLOCKS} blocks, {BLOCKS * 64} tokens")
        for _ in range(BLOCKS):
            tier = source.choice(("hot cache", "SSD cache"))
            yield said("cache.paged_ssd_cache", f"Loaded block from {tier}: {source.randbytes(8).hex()}...")
        yield said("scheduler", f"Request {request}: paged cache hit, {BLOCKS * 64} tokens in {BLOCKS} blocks,"
                                " 260 tokens remaining, cache reconstructed")  # fmt: skip
        for index in range(4):
            name = source.randbytes(8).hex()
            span = f"[{index * 64}:{index * 64 + 64}]"
            yield said("cache.prefix_cache", f"Saved block {index} to tiered cache: tokens {span}, 24 layers")
            yield said("cache.paged_ssd_cache", f"Enqueued block for SSD cache write: {name}..., size=768.00 KB")
            yield said("cache.paged_ssd_cache", f"Evicted hot cache block to SSD write queue: {name}...")
        yield said(
            "server", "Chat completion: 40 tokens in 2.00s (20.0 tok/s), prompt: 900, finish_reason=stop", "INFO"
        )
        at += timedelta(seconds=1)


def write(path: Path, lines: Iterator[str], nbytes: int) -> None:
    """Write a log of that size, from as many lines as 16 MiB hold, repeated: making them is slower than reading."""
    piece, size = [], 0
    for text in lines:
        piece.append(text)
        size += len(text) + 1
        if size >= min(nbytes, 16 * 2**20):
            break
    data = "".join(f"{text}\n" for text in piece).encode()
    with path.open("wb") as file:
        for _ in range(max(nbytes // len(data), 1)):
            file.write(data)


def read(path: str) -> None:
    """Summarise one log and print what it cost; run in a process of its own."""
    reader = LogReader()
    wall, cpu = time.perf_counter(), time.process_time()
    found = summarize(reader, reader.files([path]))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    cost = {"wall_s": wall, "cpu_s": cpu, "peak_bytes": peak}
    counts = {"lines": reader.lines, "requests": found.requests, "unknown": reader.unknown_lines}
    print(json.dumps(cost | counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, default=1000, help="size of each log in MB (1e6 B)")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read(arguments.read)
        return
    print(f"load {os.getloadavg()[0]:.2f}, Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory() as directory:
        for name, lines in (("mlxkv", mlxkv_lines), ("oMLX", omlx_lines)):
            path = Path(directory) / f"{name}.log"
            write(path, lines(random.Random(7)), arguments.mb * 10**6)
            size = path.stat().st_size
            command = [sys.executable, __file__, "--read", str(path)]
            done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                f"{name:<6} {size / 1e6:,.0f} MB, {done['lines']:,} lines, {done['requests']:,} requests:"
                f" {size / 1e6 / done['cpu_s']:,.0f} MB a CPU second, {size / 1e6 / done['wall_s']:,.0f} MB a second,"
                f" peak {format_bytes(done['peak_bytes'])}, {done['unknown']:,} unknown lines"
            )
            path.unlink()


if __name__ == "__main__":
    main()
