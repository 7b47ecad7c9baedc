"""The hook: installed once, taken back, and not there for anybody else's cache."""

import mlx.core as mx
import numpy as np
import pytest
from driving import some_tokens
from mlx_lm.models import base, llama, qwen3
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tiny import build_tiny, tiny_gemma3, tiny_llama, tiny_qwen3

from mlxkv.attention.dispatch import Dispatch, shared_attention
from mlxkv.attention.shared_prefix import branch


def test_the_name_is_replaced_while_it_is_open_and_put_back():
    model = build_tiny(tiny_llama())
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
    with Dispatch(model) as hook:
        assert llama.scaled_dot_product_attention is shared_attention
        assert qwen3.scaled_dot_product_attention is base.scaled_dot_product_attention
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
    hook.close()
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention


def test_the_last_of_two_models_of_a_kind_puts_it_back():
    one, other = Dispatch(build_tiny(tiny_llama())), Dispatch(build_tiny(tiny_llama(), 1))
    one.close()
    one.close()
    assert llama.scaled_dot_product_attention is shared_attention
    other.close()
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention


def test_other_caches_are_attended_as_before_bit_for_bit():
    model, prompt = build_tiny(tiny_qwen3()), mx.array([some_tokens(80, 1), some_tokens(80, 2)])

    def logits(caches):
        return [model(prompt, cache=caches), model(prompt[:, :1], cache=caches)]

    def kinds():
        yield lambda: make_prompt_cache(model)
        yield lambda: [KVCache.merge([KVCache(), KVCache()]) for _ in model.layers]

    for make in kinds():
        before = logits(make())
        with Dispatch(model):
            after = logits(make())
        assert all(mx.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("config", "served"), [(tiny_llama(), True), (tiny_gemma3(), False)])
def test_it_says_which_architectures_it_serves(config, served):
    with Dispatch(build_tiny(config)) as hook:
        assert (hook.architecture, hook.served) == (config["model_type"], served)


def test_a_batch_of_one_sequence_runs_mlx_own_attention_bit_for_bit():
    model, prompt = build_tiny(tiny_llama()), mx.array([some_tokens(80, 1)])
    theirs = make_prompt_cache(model)
    expected = [model(prompt, cache=theirs), model(prompt[:, :1], cache=theirs)]
    with Dispatch(model) as hook:
        ours = hook.begin(make_prompt_cache(model))
        found = [model(prompt, cache=ours), model(prompt[:, :1], cache=ours)]
        joined = branch(hook.begin(make_prompt_cache_of(model, prompt)), 0)
        for cache in joined:
            cache.settle()
        again = model(prompt[:, :1], cache=joined)
    assert all(mx.array_equal(a, b) for a, b in zip(expected, found, strict=True))
    assert np.abs(np.array(again - expected[1])).max() == 0.0


def make_prompt_cache_of(model, prompt):
    caches = make_prompt_cache(model)
    model(prompt, cache=caches)
    return caches
