"""What the block cache costs and what it gives, next to what it is compared with, in one run.

    python benchmarks/core.py                    everything, about five minutes on two cores
    python benchmarks/core.py --only restore     one part: prefill, decode, restore, naming, startup
    python benchmarks/core.py --json FILE        every sample too

docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import common
import mlx.core as mx
import numpy as np
from common import Figure, Samples, greedy, in_turns, plain_prefill, rate, say, shown, timed
from mlx_lm.generate import generate_step
from mlx_lm.models.llama import Model, ModelArgs

from mlxkv import BlockCache
from mlxkv.cache import codec
from mlxkv.cache.codec import BlockIdentity
from mlxkv.cache.index import Index
from mlxkv.cache.layout import ArraySpec, Layout
from mlxkv.cache.names import BLOCK_TOKEN_BYTES, BLOCK_TOKENS, block_name, chain, pack, root_name
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import GIB, format_bytes
from mlxkv.engine.generate import CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS, generate
from mlxkv.models.loader import LoadedModel, keep_freed_memory, load, on_cpu

PREFILL_TOKENS, DECODE_PROMPT_TOKENS, DECODE_TOKENS = 513, 100, 64
RESTORED_TOKENS = 1024
NAMED_TOKENS = 100_000
STARTUP_BLOCKS, CHAIN_BLOCKS = 10_000, 100
PARTS = ("prefill", "decode", "restore", "naming", "startup")


def main() -> int:
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="model of prefill and decode (default smollm2-135m)")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be given again")
    options = parser.parse_args()
    wanted = options.only or PARTS
    started = common.head()
    figures: list[Figure] = []
    if "prefill" in wanted or "decode" in wanted:
        say(f"loading {options.model} ...")
        model = load(options.model)
        with scratch() as directory, open_cache(model, directory, hot=4 * GIB) as cache:
            if "prefill" in wanted:
                figures.append(prefill_cost(model, cache, options.rounds))
            if "decode" in wanted:
                figures.append(decode_cost(model, cache, options.rounds))
    if "restore" in wanted:
        figures += restore_speed(3 * options.rounds)
    if "naming" in wanted:
        figures.append(naming_cost(3 * options.rounds))
    if "startup" in wanted:
        figures += startup_time(options.rounds)
    return common.report(started, figures, options.json)


def prefill_cost(model: LoadedModel, cache: BlockCache, rounds: int) -> Figure:
    """First token of a prompt never seen, with commits to memory and SSD, over mlx-lm's loop without a cache."""
    say(f"prefill of {PREFILL_TOKENS} tokens, cache on and off ...")
    prompt = random_tokens(PREFILL_TOKENS)
    chunk = CPU_CHUNK_TOKENS if on_cpu() else GPU_CHUNK_TOKENS

    def on() -> float:
        before = time.perf_counter()
        salt = str(before)  # a chain of its own: nothing is held
        generation = generate(model.module, cache, prompt, max_tokens=1, sampler=greedy, salt=salt)
        list(generation)
        seconds = generation.close().ttft_s or 0.0
        cache.store.flush()  # what is still to be written must not slow the next variant
        return seconds

    def off() -> float:
        before = time.perf_counter()
        common.first_token(model.module, prompt, plain_prefill(model.module, prompt, chunk))
        return time.perf_counter() - before

    on(), off()
    found = in_turns({"on": on, "off": off}, rounds)
    return compared(f"prefill, cache on over off ({PREFILL_TOKENS} tokens)", found, most=1.05)


def decode_cost(model: LoadedModel, cache: BlockCache, rounds: int) -> Figure:
    """Tokens 2 to 65 of a reply, in which one block fills, over mlx-lm's `generate_step`, a token of each in turns."""
    say(f"decode of {DECODE_TOKENS} tokens, cache on and off ...")
    prompt = random_tokens(DECODE_PROMPT_TOKENS)
    assert DECODE_PROMPT_TOKENS < 128 <= DECODE_PROMPT_TOKENS + DECODE_TOKENS
    most = DECODE_TOKENS + 1
    on: list[float] = []
    off: list[float] = []
    for i in range(rounds):
        ours = generate(model.module, cache, prompt, max_tokens=most, sampler=greedy, salt=str(time.perf_counter()))
        plain = generate_step(mx.array(prompt), model.module, max_tokens=most, sampler=greedy)
        running = [(iter(ours), on), (iter(plain), off)]
        for tokens, seconds in running:
            next(tokens)
            seconds.append(0.0)
        for j in range(DECODE_TOKENS):
            for tokens, seconds in running if (i + j) % 2 else reversed(running):
                before = time.perf_counter()
                next(tokens)
                seconds[-1] += time.perf_counter() - before
        ours.close()
        cache.store.flush()
    found = {"on": Samples(tuple(on)), "off": Samples(tuple(off))}
    return compared(f"decode, cache on over off ({DECODE_TOKENS} tokens)", found, most=1.02)


def restore_speed(rounds: int) -> list[Figure]:
    """A prompt cache from blocks in memory and from files, over plain copies and reads of the same bytes."""
    say(f"restore of {RESTORED_TOKENS} tokens ...")
    keep_freed_memory()  # as `mlxkv.load` does; it helps MLX's plain copy and read as much as ours
    module = kv_model()
    prompt = random_tokens(RESTORED_TOKENS + 1)
    with (
        scratch() as directory,
        BlockCache.open(module, fields={"model": "kv"}, cache_dir=directory, hot=GIB, cold=4 * GIB) as hot,
        BlockCache.open(module, fields={"model": "kv"}, cache_dir=directory, hot=0, cold=4 * GIB) as cold,
    ):
        hot.commit(prompt, plain_prefill(module, prompt, 256))
        assert hot.store.flush()
        payloads = [array for entry in hot.store.hot.entries() for array in hot.store.hot.payload(entry.name)]
        payloads = [array for array in payloads if array.shape[2] == BLOCK_TOKENS]
        nbytes = sum(array.nbytes for array in payloads)
        files = sorted(directory.rglob("*.safetensors"))
        assert nbytes == RESTORED_TOKENS * hot.layout.bytes_per_token

        def restored(cache: BlockCache) -> float:
            before = time.perf_counter()
            sequence = cache.start(prompt)
            seconds = time.perf_counter() - before
            assert sequence.held == RESTORED_TOKENS
            cache.store.release(sequence.plan)
            cache.store.flush()  # the hits go into the index meanwhile
            return seconds

        found = in_turns(
            {
                "hot": lambda: restored(hot),
                "mlx copy": timed(lambda: mlx_copy(payloads)),
                "numpy copy": timed(lambda: np.concatenate([np.asarray(array) for array in payloads])),
                "cold": lambda: restored(cold),
                "mlx read": timed(lambda: read_into(mlx_bytes(sum(f.stat().st_size for f in files)), files)),
                "numpy read": timed(lambda: read_into(np.empty(sum(f.stat().st_size for f in files), np.uint8), files)),
            },
            rounds,
        )
    size = format_bytes(nbytes)
    return [
        restoring(f"hot restore, speed over {base} ({size})", found, "hot", base, nbytes)
        for base in ("mlx copy", "numpy copy")
    ] + [
        restoring(f"cold restore, speed over {base} ({size})", found, "cold", base, nbytes)
        for base in ("mlx read", "numpy read")
    ]


def naming_cost(rounds: int) -> Figure:
    """Packing and naming the blocks of a long prompt."""
    say("naming ...")
    tokens = random_tokens(NAMED_TOKENS)
    root = root_name({"model": "naming"})
    found = in_turns({"names": timed(lambda: list(chain(root, pack(tokens))))}, rounds)["names"]
    microseconds = found.median / NAMED_TOKENS * 1e6
    detail = f"{NAMED_TOKENS:,} tokens in {shown(names=found)}"
    return Figure("naming", microseconds, "us/token", detail, most=0.3, samples={"names": found.seconds})


def startup_time(rounds: int) -> list[Figure]:
    """Opening a store whose directory holds 10,000 blocks, and matching a prompt; opened block files are counted."""
    say(f"start-up with {STARTUP_BLOCKS:,} blocks ...")
    layout = Layout((ArraySpec("0.keys", 1, 1, "uint8"), ArraySpec("0.values", 1, 2, "uint8")))
    root = root_name({"model": "startup"})
    opened: list[str] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(codec.SUFFIX):
            opened.append(str(arguments[0]))

    with scratch() as directory:
        prompt = fill(directory, root, layout)
        sys.addaudithook(watch)
        opened.clear()

        def start() -> float:
            before = time.perf_counter()
            store = BlockStore(CacheConfig(directory=directory, hot_bytes=0, cold_bytes=4 * GIB, floor_bytes=0))
            store.register(root, layout, {"model": "startup"}, model="startup")
            plan = store.plan(root, prompt)
            seconds = time.perf_counter() - before
            assert plan.match.tokens == len(prompt) // 4 - 1
            store.release(plan)
            store.close()
            return seconds

        found = in_turns({"start": start}, rounds)["start"]
    detail = f"index opened and a prompt of {CHAIN_BLOCKS} blocks matched: {shown(start=found)}"
    return [
        Figure(f"start-up with {STARTUP_BLOCKS:,} blocks", found.median, "s", detail, most=1.0,
               samples={"start": found.seconds}),
        Figure("block files opened by that", len(opened), "files", "of the same runs", most=0),
    ]  # fmt: skip


def compared(name: str, found: dict[str, Samples], *, most: float) -> Figure:
    samples = {variant: s.seconds for variant, s in found.items()}
    return Figure(name, found["on"].over(found["off"]), "", shown(**found), most=most, samples=samples)


def restoring(name: str, found: dict[str, Samples], ours: str, base: str, nbytes: int) -> Figure:
    """The plain one's seconds over ours: 1 is as fast."""
    detail = (
        f"{ours} {rate(nbytes, found[ours])}, {base} {rate(nbytes, found[base])};"
        f" {shown(**{ours: found[ours], base: found[base]})}"
    )
    samples = {variant: found[variant].seconds for variant in (ours, base)}
    return Figure(name, found[base].over(found[ours]), "", detail, least=0.7, samples=samples)


def mlx_copy(payloads: Sequence[mx.array]) -> mx.array:
    """MLX's copy of every block into one new array."""
    copy = mx.concatenate(payloads)
    mx.eval(copy)
    return copy


def mlx_bytes(nbytes: int) -> mx.array:
    """New memory of MLX, which has no way to get it that does not fill it."""
    made = mx.zeros(nbytes, mx.uint8)
    mx.eval(made)
    return made


def read_into(memory: mx.array | np.ndarray, files: Sequence[Path]) -> object:
    """One `readinto` a file, one after the other, nothing checked. The files are in the page cache, as for us."""
    view, at = memoryview(memory), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            at += file.readinto(view[at:]) or 0
    assert at == len(view)
    return memory


def kv_model() -> Model:
    """A small random llama with the KV cache of SmolLM2-135M: 30 layers, 3 heads of 64, 46,080 B a token in float32."""
    arguments = ModelArgs(
        model_type="llama", hidden_size=64, num_hidden_layers=30, intermediate_size=64, num_attention_heads=3,
        num_key_value_heads=3, head_dim=64, rms_norm_eps=1e-5, vocab_size=128,
    )  # fmt: skip
    module = Model(arguments)
    mx.eval(module.parameters())
    return module


def fill(directory: Path, root: bytes, layout: Layout) -> bytes:
    """Write 10,000 small blocks, 100 chains of 100, with their rows; returns the tokens of the last chain and one."""
    source = random.Random(0)
    index = Index(directory)
    views = [memoryview(bytes(tensor.nbytes())) for tensor in layout.tensors]
    packed = b""
    with index.transaction():
        for _ in range(STARTUP_BLOCKS // CHAIN_BLOCKS):
            packed, parent = source.randbytes(CHAIN_BLOCKS * BLOCK_TOKEN_BYTES), root
            for i in range(CHAIN_BLOCKS):
                tokens = packed[i * BLOCK_TOKEN_BYTES : (i + 1) * BLOCK_TOKEN_BYTES]
                block = BlockIdentity(root, block_name(parent, tokens), parent, i, tokens)
                path = directory / codec.relative_path(root, block.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as file:
                    size = codec.write_block(file.fileno(), block, layout, views)
                index.insert(block, -(-size // 4096) * 4096, writer=None)
                parent = block.name
    index.close()
    return packed + bytes(4)


def open_cache(model: LoadedModel, directory: Path, *, hot: int) -> BlockCache:
    return BlockCache.open(model.module, fields=model.fields, cache_dir=directory, hot=hot, cold=8 * GIB)


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory of the benchmark's own, on the disk of the temporary files."""
    directory = Path(tempfile.mkdtemp(prefix="mlxkv-bench-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def random_tokens(count: int) -> list[int]:
    """Token ids below 128, the same every time."""
    return random.Random(count).choices(range(128), k=count)


if __name__ == "__main__":
    sys.exit(main())
