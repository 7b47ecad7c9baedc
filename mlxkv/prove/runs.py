"""One prompt run in the ways a user meets it: by mlx-lm alone, through the cache, and in a process of its own.

Every run feeds the same tokens in chunks of the same absolute cuts, so that only what was restored can differ.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import xxhash
from mlx.utils import tree_flatten

from mlxkv.cache.names import BLOCK_TOKENS
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.errors import MlxkvError
from mlxkv.core.units import GIB
from mlxkv.engine.chunks import default_chunks
from mlxkv.engine.generate import prefill
from mlxkv.models.loader import LoadedModel
from mlxkv.prompt_cache.adapter import plain_prompt_cache
from mlxkv.prompt_cache.block_cache import BlockCache

STEPS = 8
MOST_BLOCKS, LEAST_BLOCKS = 32, 3
_WANTED_S = 6.0  # a prompt whose prefill takes about so long; there are some seven of them
_WARM_TOKENS, _MEASURED_TOKENS = 8, 64
ANY_BYTES = 2**62


@dataclass(frozen=True)
class Subject:
    """What is tried: a model, the name by which another process finds it, a place to write to, and a prompt.

    The prompt is whole blocks and one token more, so that a restore leaves as much to compute as a fresh run's end.
    """

    model: LoadedModel
    name: str
    scratch: Path
    prompt: tuple[int, ...]

    @property
    def directory(self) -> Path:
        """The cold tier of these runs."""
        return self.scratch / "blocks"


@dataclass(frozen=True)
class Run:
    """What a run came to.

    Attributes:
        logits: [STEPS, vocabulary] float32: after the prompt, and after each token that was fed then.
        state: digest of the keys and values of all prompt tokens but the last, as they stood before it was fed; empty
            for a model that keeps windows or states.
        first_token_s: from the prompt to the first token's logits, restoring included.
        step_s: seconds of each further token.
    """

    logits: np.ndarray
    state: str
    hot_tokens: int
    cold_tokens: int
    first_token_s: float
    step_s: tuple[float, ...]
    restored_bytes: int
    restore_s: float


def make_prompt(model: LoadedModel, blocks: int) -> tuple[int, ...]:
    """Token ids of the demo's text, as often as it takes for so many whole blocks and one token."""
    text = (files("mlxkv.engine") / "demo_text.md").read_text(encoding="utf-8")
    ids: list[int] = list(model.tokenizer.encode(text, add_special_tokens=False))
    wanted = blocks * BLOCK_TOKENS + 1
    return tuple((ids * math.ceil(wanted / len(ids)))[:wanted])


def affordable_blocks(model: LoadedModel) -> int:
    """How long a prompt may be for everything to end in time here, by the better of two prefills; it warms up too."""
    prompt = make_prompt(model, 1)
    run_plain(model, prompt[:_WARM_TOKENS], steps=1)
    tokens_per_s = _MEASURED_TOKENS / min(run_plain(model, prompt, steps=1).first_token_s for _ in range(2))
    return min(max(int(tokens_per_s * _WANTED_S) // BLOCK_TOKENS, LEAST_BLOCKS), MOST_BLOCKS)


def chunk_tokens() -> int:
    """The longest prefill step that `generate` takes here."""
    return default_chunks().longest


def run_plain(model: LoadedModel, prompt: Sequence[int], *, steps: int = STEPS, state: bool = False) -> Run:
    """mlx-lm alone: its own prompt cache, nothing restored, nothing kept."""
    started = time.perf_counter()
    prompt_cache = plain_prompt_cache(model.module)
    prefill_plain(model, prompt_cache, prompt)
    digest = state_digest(prompt_cache, len(prompt) - 1) if state else ""
    logits, first_s, step_s = _decode(model, prompt_cache, prompt, steps)
    return Run(logits, digest, 0, 0, first_s - started, step_s, 0, 0.0)


def prefill_plain(model: LoadedModel, prompt_cache: Any, prompt: Sequence[int]) -> None:
    """All tokens but the last, cut where `prefill` cuts them."""
    chunks, at, last = default_chunks(), 0, len(prompt) - 1
    while at < last:
        stop = min(chunks.end(at), last)
        model.module(mx.array(prompt[at:stop])[None], cache=prompt_cache)
        at = stop
        mx.eval([cache.state for cache in prompt_cache])
        mx.synchronize()


def run_cached(
    model: LoadedModel, cache: BlockCache, prompt: Sequence[int], *, salt: str = "", steps: int = STEPS
) -> Run:
    """Through the block cache: restore what is held, compute the rest, and publish it."""
    started = time.perf_counter()
    sequence = cache.start(prompt, salt=salt)
    try:
        prefill(model.module, sequence, prompt, default_chunks(), lambda *_: None)
        waited = time.perf_counter()
        whole = not (cache.layout.windows or cache.layout.states or cache.uncached)
        digest = state_digest(sequence.prompt_cache, len(prompt) - 1) if whole else ""
        waited = time.perf_counter() - waited
        logits, first_s, step_s = _decode(model, sequence.prompt_cache, prompt, steps)
    except BaseException:
        sequence.fail()
        raise
    # The prompt's last token and the reply are not told, so they are not published: the next run finds the same.
    event = sequence.finish()
    return Run(logits, digest, event.hot_tokens, event.cold_tokens, first_s - started - waited, step_s,
               event.restored_bytes, event.restore_s)  # fmt: skip


def run_apart(subject: Subject, salt: str) -> Run:
    """The same through the cold tier in a process that never saw the prompt.

    Raises:
        MlxkvError: the process failed; its own words are on stderr.
    """
    asked, answer = subject.scratch / "asked.json", subject.scratch / "answer.npz"
    asked.write_text(json.dumps({"model": subject.name, "directory": str(subject.directory), "salt": salt,
                                 "prompt": subject.prompt}), encoding="utf-8")  # fmt: skip
    command = [sys.executable, "-m", "mlxkv.prove.child", str(asked), str(answer)]
    # In a session of its own: Ctrl-C comes here, and ends it from here.
    done = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    if done.returncode != 0 or not answer.is_file():
        raise MlxkvError("the new process failed (its own words are above); run `mlxkv doctor`.")
    with np.load(answer) as found:
        said: dict[str, Any] = json.loads(str(found["said"]))
        return Run(**said | {"logits": found["logits"], "step_s": tuple(said["step_s"])})


def save_run(run: Run, path: Path) -> None:
    """What `run_apart` reads."""
    said = {name: value for name, value in asdict(run).items() if name != "logits"}
    np.savez(path, logits=run.logits, said=json.dumps(said))


@contextmanager
def open_blocks(subject: Subject, *, hot: bool) -> Iterator[BlockCache]:
    """The block cache of these runs; without a hot tier everything comes from the disk."""
    config = CacheConfig(
        directory=subject.directory, hot_bytes=4 * GIB if hot else 0, cold_bytes=ANY_BYTES, floor_bytes=0,
        daily_write_bytes=None,
    )  # fmt: skip
    model = subject.model
    with BlockCache(model.module, model.fields, BlockStore(config), name=model.name) as cache:
        yield cache


def state_digest(prompt_cache: Any, tokens: int) -> str:
    """A digest of the first `tokens` tokens of every array, to the bit."""
    digest = xxhash.xxh3_128()
    for _, array in tree_flatten([leaf.state for leaf in prompt_cache]):
        if not isinstance(array, mx.array):
            continue  # how many tokens there are, which the room for more goes with
        held = mx.contiguous(array[..., :tokens, :])
        mx.eval(held)
        digest.update(str((held.dtype, held.shape)).encode())
        digest.update(memoryview(held.view(mx.uint8)))
    return str(digest.hexdigest())


def _decode(
    model: LoadedModel, prompt_cache: Any, prompt: Sequence[int], steps: int
) -> tuple[np.ndarray, float, tuple[float, ...]]:
    """Feed the last token and some more; returns logits [steps, vocabulary], when the first was there, and the times.

    What is fed is fixed (the prompt's first tokens again), so that a near tie does not make two runs part.
    """
    found, seconds, first_s = [], [], 0.0
    for step, token in enumerate([prompt[-1], *prompt[: steps - 1]]):
        started = time.perf_counter()
        logits = model.module(mx.array([[token]]), cache=prompt_cache)[0, -1].astype(mx.float32)
        mx.eval(logits)
        now = time.perf_counter()
        if step:
            seconds.append(now - started)
        else:
            first_s = now
        found.append(np.array(logits))
    return np.stack(found), first_s, tuple(seconds)
