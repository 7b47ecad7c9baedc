"""The demo: one prompt computed, restored from memory, and restored from the SSD by a new process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from mlxkv.core.blas import load_fast_blas
from mlxkv.engine.generate import Progress, generate
from mlxkv.models.chat import render
from mlxkv.models.loader import LoadedModel, on_cpu
from mlxkv.prompt_cache.block_cache import BlockCache

PROMPT_TOKENS = 1030
SLOW_PROMPT_TOKENS = 198  # without a fast BLAS a prompt of 1,000 tokens takes minutes
OUTPUT_TOKENS = 24
QUESTION = "In one sentence: who is Marta and what did she measure?"


@dataclass(frozen=True)
class DemoRun:
    """One run of the prompt. `hot_tokens` are restored from memory, `cold_tokens` from the SSD."""

    name: str
    hot_tokens: int
    cold_tokens: int
    computed_tokens: int
    ttft_s: float
    restored_bytes: int
    restore_s: float
    text: str


def is_slow() -> bool:
    """Whether this machine computes on a CPU without a fast BLAS."""
    return on_cpu() and load_fast_blas().name is None


def demo_prompt(model: LoadedModel, wanted_tokens: int) -> list[int]:
    """Token ids of a chat that asks about as much of the demo text as fits in `wanted_tokens`."""
    text = (files("mlxkv.engine") / "demo_text.md").read_text(encoding="utf-8")
    ids: list[int] = list(model.tokenizer.encode(text, add_special_tokens=False))
    frame = len(_ask(model, ""))
    part = model.tokenizer.decode(ids[: max(wanted_tokens - frame, 1)])
    return _ask(model, part)


def warm_up(model: LoadedModel) -> None:
    """Compute a few tokens outside the cache, so that loading kernels is not counted as prefill."""
    mx.eval(model.module(mx.zeros((1, 8), mx.int32)))


def demo_run(
    name: str,
    model: LoadedModel,
    cache: BlockCache,
    prompt: Sequence[int],
    *,
    salt: str,
    on_progress: Progress | None = None,
) -> DemoRun:
    """Run the prompt once, greedily."""
    generation = generate(
        model.module,
        cache,
        prompt,
        max_tokens=OUTPUT_TOKENS,
        sampler=make_sampler(temp=0.0),
        stop_tokens=frozenset(model.tokenizer.eos_token_ids),
        salt=salt,
        on_progress=on_progress,
    )
    text = model.tokenizer.decode(list(generation))
    event = generation.close()
    return DemoRun(
        name=name,
        hot_tokens=event.hot_tokens,
        cold_tokens=event.cold_tokens,
        computed_tokens=event.computed_tokens,
        ttft_s=event.ttft_s or 0.0,
        restored_bytes=event.restored_bytes,
        restore_s=event.restore_s,
        text=text,
    )


def _ask(model: LoadedModel, text: str) -> list[int]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
    return render(model.tokenizer, messages)
