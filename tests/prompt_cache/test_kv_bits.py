"""Quantised KV: blocks and a root of its own, restored to the bit, and refused in a sentence where mlx-lm cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest
from driving import block_files, compute, some_tokens, state_of, stops
from kinds import CONFIGS, ask, build
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tiny import Config, build_tiny, tiny_llama, tiny_qwen3_next

from mlxkv.core.errors import UsageError
from mlxkv.prompt_cache.block_cache import BlockCache


def llama() -> Config:
    """Heads of 64, which groups of 64 divide."""
    return tiny_llama() | {"head_dim": 64}


def hybrid() -> Config:
    """Gated delta nets keep their states as they are; its one layer of attention is quantised."""
    return tiny_qwen3_next() | {"head_dim": 64}


def open_cache(module: nn.Module, directory: Path, **more: Any) -> BlockCache:
    return BlockCache.open(module, cache_dir=directory, hot="64MiB", cold="1GiB", **more)


def quantised(module: nn.Module, bits: int) -> list[Any]:
    """mlx-lm's own caches with every full one quantised from the first token on."""
    return [
        cache.to_quantized(group_size=64, bits=bits) if type(cache) is KVCache else cache
        for cache in make_prompt_cache(module)
    ]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("config", [llama(), hybrid()], ids=["llama", "qwen3_next"])
@pytest.mark.parametrize("tier", ["hot", "cold"])
def test_a_hit_is_what_a_cold_run_with_the_same_bits_is(config: Config, bits: int, tier: str, tmp_path: Path) -> None:
    module, prompt = build_tiny(config), some_tokens(193, seed=193)
    caches = quantised(module, bits)
    logits = compute(module, caches, prompt, 0, stops(0, 193))
    expected = logits - np.logaddexp.reduce(logits)
    with open_cache(module, tmp_path, kv_bits=bits) as cache:
        first = ask(module, cache, prompt, 1)
        assert first.held == 0
        assert np.abs(first.logprobs[0] - expected).max() < 1e-5
        if tier == "hot":
            again = ask(module, cache, prompt, 1)
    if tier == "cold":
        with open_cache(module, tmp_path, kv_bits=bits) as cache:
            again = ask(module, cache, prompt, 1)
    assert again.held == 192
    assert again.logprobs[0].tobytes() == first.logprobs[0].tobytes()
    assert again.reply == first.reply


def test_a_restored_quantised_cache_is_mlx_lms_own_to_the_bit(tmp_path: Path) -> None:
    module, prompt = build_tiny(llama()), some_tokens(150, seed=1)
    caches = quantised(module, 4)
    compute(module, caches, prompt, 0, [64, 128, 149])
    with open_cache(module, tmp_path, kv_bits=4) as cache:
        ask(module, cache, prompt, 1)
        restored = cache.restore(prompt)
        assert restored.tokens == 149
        found, expected = state_of(restored.prompt_cache), state_of(caches)
        assert found.keys() == expected.keys()
        assert all(found[path].tobytes() == array.tobytes() for path, array in expected.items())


def test_bits_take_less_room_and_have_a_root_of_their_own(tmp_path: Path) -> None:
    module = build_tiny(llama())
    with open_cache(module, tmp_path) as plain, open_cache(module, tmp_path, kv_bits=8) as eight:
        four = open_cache(module, tmp_path, kv_bits=4)
        assert len({plain.root(), eight.root(), four.root()}) == 3
        sizes = [cache.layout.bytes_per_token for cache in (plain, eight, four)]
        assert sizes == [4096, 1152, 640], "4 layers x 2 sides x 2 heads x (64 numbers + a scale and a bias)"
        four.close()


def test_a_setting_taken_back_finds_its_blocks_again(tmp_path: Path) -> None:
    module, prompt = build_tiny(llama()), some_tokens(200, seed=2)
    answers = []
    for bits in (None, 8, None, 8):
        with open_cache(module, tmp_path, kv_bits=bits) as cache:
            answer = ask(module, cache, prompt, 3)
            answers.append((answer.held, answer.reply))
            cache.check_integrity()
            assert cache.store.cold is not None
            assert cache.store.cold.used_bytes >= sum(path.stat().st_size for path in block_files(tmp_path))
    assert [held for held, _ in answers] == [0, 0, 192, 192]
    assert answers[0] == (0, answers[2][1])
    assert answers[1] == (0, answers[3][1])
    assert len({path.parts[-3] for path in block_files(tmp_path)}) == 2


def test_the_request_says_which_field_makes_another_root(tmp_path: Path) -> None:
    module, prompt = build_tiny(llama()), some_tokens(200, seed=2)
    with open_cache(module, tmp_path) as cache:
        ask(module, cache, prompt, 1)
    with open_cache(module, tmp_path, kv_bits=8) as cache:
        reason = cache.start(prompt).finish().reason
        assert reason is not None
        assert "kv_bits" in reason


REFUSED = {
    "gemma3_text": r"layer 0 keeps a RotatingKVCache; leave KV bits out",
    "gpt_oss": r"layer 0 keeps a RotatingKVCache; leave KV bits out",
    "deepseek_v3": r"32 numbers a head, which groups of 64 do not divide",
    "falcon_h1": r"layer 0\.\d keeps a \w+ inside a CacheList; leave KV bits out",
    "llama4": r"layer 0 keeps a ChunkedKVCache; leave KV bits out",
    "llama": r"keys of layer 0 have 16 numbers a head, which groups of 64 do not divide",
    "mamba2": r"no keys and values to quantise, only a state",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cache_that_mlx_lm_cannot_quantise_is_refused_with_the_layer_and_the_class(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=REFUSED[name]) as refused:
        open_cache(build(CONFIGS[name]), tmp_path, kv_bits=8)
    assert "\n" not in str(refused.value)
    assert not block_files(tmp_path)


def test_attention_with_sinks_is_refused_too(tmp_path: Path) -> None:
    module = build(CONFIGS["gpt_oss"] | {"head_dim": 64})
    module.make_cache = lambda: [KVCache() for _ in module.layers]
    with pytest.raises(UsageError, match=r"cannot run this model with quantised KV.*leave KV bits out"):
        open_cache(module, tmp_path, kv_bits=8)


def test_latents_wide_enough_are_refused_where_the_model_does_not_know_quantised_caches(tmp_path: Path) -> None:
    wide = {"kv_lora_rank": 64, "qk_rope_head_dim": 64}
    with pytest.raises(UsageError, match="leave KV bits out"):
        open_cache(build(CONFIGS["deepseek_v3"] | wide), tmp_path, kv_bits=8)


@pytest.mark.parametrize("bits", [1, 7, 16])
def test_bits_that_mlx_does_not_have_are_refused(bits: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"KV of {bits} bits"):
        open_cache(build_tiny(llama()), tmp_path, kv_bits=bits)


def test_what_is_lost_to_the_bits_is_small_and_grows_with_fewer(tmp_path: Path) -> None:
    module, prompt = build_tiny(llama()), some_tokens(150, seed=3)
    plain = ask(module, open_cache(module, tmp_path / "plain"), prompt, 1).logprobs[0]
    lost = []
    for bits in (8, 4):
        with open_cache(module, tmp_path / "blocks", kv_bits=bits) as cache:
            other = ask(module, cache, prompt, 1).logprobs[0]
        lost.append(float((np.exp(plain) * (plain - other)).sum()))
    assert 0 < lost[0] < lost[1] < 0.5
