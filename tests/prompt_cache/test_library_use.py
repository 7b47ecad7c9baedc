"""The five lines of the README: mlx-lm generates, and never computes the same prompt twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx_lm
import pytest
from driving import block_files
from saved import save_adapter, save_model
from tiny import tiny_deepseek_v3, tiny_gemma3, tiny_llama

from mlxkv import BlockCache

PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_model(tmp_path / "tiny", tiny_llama())


def plain(model: object, tokenizer: object, prompt: list[int], **more: object) -> list[int]:
    return [reply.token for reply in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=9, **more)]


def with_cache(cache: BlockCache, model: object, tokenizer: object, prompt: list[int]) -> tuple[int, list[int]]:
    """As the README has it; the tokens that were restored and the reply."""
    prompt_cache, held = cache.restore(prompt)
    reply = plain(model, tokenizer, prompt[held:], prompt_cache=prompt_cache)
    cache.commit(prompt + reply, prompt_cache)
    return held, reply


@pytest.mark.parametrize("config", [tiny_llama(), tiny_deepseek_v3()], ids=["llama", "deepseek_v3"])
def test_five_lines_give_what_mlx_lm_gives_and_the_second_time_reuse_all_but_one_token(
    config: dict[str, object], tmp_path: Path
) -> None:
    model, tokenizer = mlx_lm.load(str(save_model(tmp_path / "model", config)))
    prompt = tokenizer.encode(PROMPT)
    expected = plain(model, tokenizer, prompt)
    cache = BlockCache.open(model, tokenizer=tokenizer, cache_dir=tmp_path / "blocks", hot="64MiB")
    assert with_cache(cache, model, tokenizer, prompt) == (0, expected)
    assert with_cache(cache, model, tokenizer, prompt) == (len(prompt) - 1, expected)
    cache.check_integrity()
    assert cache.store.pins() == 0
    assert cache.close() == 0


def test_a_restart_takes_every_full_block_from_the_ssd(saved: Path, tmp_path: Path) -> None:
    for held in (0, 192):
        model, tokenizer = mlx_lm.load(str(saved))
        prompt = tokenizer.encode(PROMPT)
        assert len(prompt) > 192 + 8
        prompt = prompt[:200]
        with BlockCache.open(model, tokenizer=tokenizer, cache_dir=tmp_path / "blocks", hot="64MiB") as cache:
            assert with_cache(cache, model, tokenizer, prompt) == (held, plain(model, tokenizer, prompt))
    assert len(block_files(tmp_path / "blocks")) == 3


def test_a_conversation_reuses_its_own_replies(saved: Path, tmp_path: Path) -> None:
    model, tokenizer = mlx_lm.load(str(saved))
    messages: list[dict[str, str]] = []
    with BlockCache.open(model, tokenizer=tokenizer, cache_dir=tmp_path / "blocks", hot="64MiB") as cache:
        computed = 0
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn}: " + PROMPT[:60]})
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            held, reply = with_cache(cache, model, tokenizer, prompt)
            assert reply == plain(model, tokenizer, prompt)
            assert held >= computed - 16, "all of the turns before, up to where the template closes the reply"
            computed = len(prompt)
            messages.append({"role": "assistant", "content": tokenizer.decode(reply)})


def test_what_is_committed_is_what_the_prompt_cache_holds(saved: Path, tmp_path: Path) -> None:
    model, tokenizer = mlx_lm.load(str(saved))
    prompt = tokenizer.encode(PROMPT)[:130]
    with BlockCache.open(model, cache_dir=tmp_path / "blocks", hot="64MiB") as cache:
        prompt_cache, _ = cache.restore(prompt)
        reply = plain(model, tokenizer, prompt, prompt_cache=prompt_cache)
        held = cache.commit(prompt + reply, prompt_cache)
        assert 130 + len(reply) - 1 <= held == min(prompt_cache[0].offset, 130 + len(reply))
        assert cache.commit(prompt, prompt_cache) == 130, "and no more than the tokens that are named"
        assert cache.restore([*prompt, *reply, 1]).tokens == held


def test_a_model_with_windows_works_with_the_same_five_lines(tmp_path: Path) -> None:
    model, tokenizer = mlx_lm.load(str(save_model(tmp_path / "model", tiny_gemma3())))
    prompt = tokenizer.encode(PROMPT)
    with BlockCache.open(model, tokenizer=tokenizer, cache_dir=tmp_path / "blocks", hot="64MiB") as cache:
        for held in (0, len(prompt) - 1):
            assert with_cache(cache, model, tokenizer, prompt) == (held, plain(model, tokenizer, prompt))


def test_an_adapter_that_mlx_lm_loaded_is_a_root_of_its_own(saved: Path, tmp_path: Path) -> None:
    adapters = [None, *(save_adapter(tmp_path / str(s), tiny_llama(), scale=s) for s in (20.0, 10.0))]
    for adapter in adapters:
        model, tokenizer = mlx_lm.load(str(saved), adapter_path=adapter and str(adapter))
        prompt = tokenizer.encode(PROMPT)
        with BlockCache.open(model, tokenizer=tokenizer, cache_dir=tmp_path / "blocks", hot="64MiB") as cache:
            assert with_cache(cache, model, tokenizer, prompt) == (0, plain(model, tokenizer, prompt))
            assert cache.restore(prompt).tokens == len(prompt) - 1


def test_importing_mlxkv_does_not_import_mlx() -> None:
    code = "import sys, mlxkv; assert 'mlx.core' not in sys.modules; mlxkv.BlockCache; assert 'mlx.core' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture(autouse=True)
def _no_writes_into_the_model(saved: Path) -> Iterator[None]:
    before = sorted(saved.iterdir())
    yield
    assert sorted(saved.iterdir()) == before
