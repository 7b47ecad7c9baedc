"""What docs/exactness.md says of float16, bfloat16 and 4 bits: each line of its table is a test here.

A restored run is the fresh one to the bit in every precision: a tier gives back bytes, and the rest is computed in the
same steps. Only another order of summing (a batch, a shared prefix, other chunks) rounds otherwise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache as remember
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from driving import Fresh, assert_equals_fresh, assert_same_state, compute, run_fresh, run_warm, some_tokens, stops
from tiny import ALL_TINY, PRECISIONS, build_tiny, in_precision

from mlxkv.attention.dispatch import Dispatch
from mlxkv.attention.shared_prefix import branch, extend
from mlxkv.engine.generate import generate
from mlxkv.prompt_cache.block_cache import BlockCache

TESTS = Path(__file__).parents[1]
TOKENS = 200
ROUNDING = {"float32": 2e-6, "float16": 1e-2, "bfloat16": 4e-2, "4 bits": 1.5e-1}
"""Most by which logits may differ where sums are taken in another order, relative to the largest: the table's figures.

Each layer's result is rounded to the dtype, so this is some units of it (2^-11 and 2^-8) for four layers of a random
model, whose logits are more easily moved than those of a trained one.
"""

in_every_precision = pytest.mark.parametrize("precision", PRECISIONS)
of_every_kind = pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "lfm2"])


@remember
def model(architecture: str, precision: str) -> nn.Module:
    return in_precision(build_tiny(ALL_TINY[architecture]()), precision)


@remember
def fresh(architecture: str, precision: str) -> Fresh:
    return run_fresh(model(architecture, precision), some_tokens(TOKENS, seed=TOKENS))


def open_cache(architecture: str, precision: str, directory: Path, **more: Any) -> BlockCache:
    return BlockCache.open(
        model(architecture, precision), cache_dir=directory, hot=more.get("hot", "64MiB"), cold="1GiB"
    )


@in_every_precision
@of_every_kind
def test_restored_from_memory_and_from_the_ssd_is_fresh_to_the_bit(
    architecture: str, precision: str, tmp_path: Path
) -> None:
    expected = fresh(architecture, precision)
    whole = architecture in ("llama", "qwen3")
    with open_cache(architecture, precision, tmp_path) as cache:
        assert run_warm(cache, model(architecture, precision), expected.prompt).held == 0
        hot = run_warm(cache, model(architecture, precision), expected.prompt)
        assert hot.held >= (TOKENS - 1 if whole else 128)
        assert np.array_equal(hot.logits, expected.logits)
        cache.check_integrity()
    with open_cache(architecture, precision, tmp_path) as cache:
        cold = run_warm(cache, model(architecture, precision), expected.prompt)
        assert cold.held >= 128
        assert cold.event.cold_tokens == cold.held
        assert np.array_equal(cold.logits, expected.logits)
    if whole:
        assert_equals_fresh(hot, expected)
        assert_equals_fresh(cold, expected)


@in_every_precision
def test_restored_in_a_new_process_is_fresh_to_the_bit(precision: str, tmp_path: Path) -> None:
    expected = fresh("llama", precision)
    with open_cache("llama", precision, tmp_path / "blocks") as cache:
        cache.commit(expected.prompt, expected.prompt_cache)
    subprocess.run(
        [sys.executable, TESTS / "prompt_cache" / "restart.py", precision, tmp_path / "blocks", tmp_path,
         f"llama:{TOKENS}"],
        env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "MLXKV_BLAS": "none"},
        check=True,
        timeout=120,
    )  # fmt: skip
    found = np.load(tmp_path / f"llama-{TOKENS}.npz")
    assert int(found["held"]) == 192
    state = {path.removeprefix("state/"): found[path] for path in found if path.startswith("state/")}
    assert_same_state(state, expected.state)
    assert np.array_equal(found["logits"], expected.logits)


@in_every_precision
def test_replies_are_equal_whatever_was_restored(precision: str, tmp_path: Path) -> None:
    prompt = some_tokens(150, seed=3)
    with open_cache("llama", precision, tmp_path) as cache:
        replies = []
        for reused in (0, 149):
            run = generate(model("llama", precision), cache, prompt, max_tokens=8, sampler=greedy, chunk_tokens=64)
            replies.append(list(run))
            assert run.event is not None
            assert run.event.hot_tokens == reused
    assert replies[0] == replies[1]


def greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


@in_every_precision
def test_two_precisions_of_a_model_share_no_block(precision: str, tmp_path: Path) -> None:
    prompt = some_tokens(150, seed=3)
    for other in PRECISIONS:
        if other != precision:
            with open_cache("llama", other, tmp_path) as cache:
                run_warm(cache, model("llama", other), prompt)
    with open_cache("llama", precision, tmp_path) as cache:
        assert cache.start(prompt).held == 0


@in_every_precision
def test_other_chunks_differ_by_rounding(precision: str) -> None:
    expected = fresh("llama", precision)
    other = run_fresh(model("llama", precision), expected.prompt, ends=[37, 150, TOKENS])
    assert_rounding(other.logits, expected.logits, precision)


@in_every_precision
@pytest.mark.parametrize("shared", [0, 64, 130], ids=["nothing shared", "a block shared", "a prefix shared"])
def test_sequences_in_one_batch_differ_from_themselves_alone_by_rounding(precision: str, shared: int) -> None:
    module = model("llama", precision)
    prompts = [[*some_tokens(shared, seed=1), *some_tokens(count, seed=count)] for count in (40, 70, 66)]
    alone = [run_fresh(module, [*prompt, 9]).logits for prompt in prompts]
    hook = Dispatch(module)
    try:
        batch = None
        for prompt in prompts:
            if batch is None or not shared:
                made = hook.begin(run_fresh(module, prompt).prompt_cache)
            else:
                made = branch(batch, row=0, prefix_tokens=shared // 64 * 64)
                done = shared // 64 * 64
                compute(module, made, prompt, done, stops(done, len(prompt)))
            if batch is None:
                batch = made
            else:
                extend(batch, made)
        assert batch is not None
        logits = module(mx.array([[9]] * len(prompts)), cache=batch)[:, -1]
    finally:
        hook.close()
    for row, expected in enumerate(alone):
        assert_rounding(np.array(logits[row].astype(mx.float32)), expected, precision)


def assert_rounding(found: np.ndarray, expected: np.ndarray, precision: str) -> None:
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error <= ROUNDING[precision], f"{error:.1e} in {precision}"


def test_the_table_in_the_docs_has_these_figures() -> None:
    text = (TESTS.parent / "docs" / "exactness.md").read_text(encoding="utf-8")
    for precision, figure in ROUNDING.items():
        assert f"| {precision} | {figure:g} |" in text
