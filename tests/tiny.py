"""Tiny random models of mlx-lm's own architectures: they compute, so a cache test needs no mock and no download.

Every config has hidden 64, 4 layers, 4 heads, 2 KV heads, head_dim 16 and vocabulary 128, unless its architecture has
no such number. One forward pass of a few hundred tokens takes milliseconds on a CPU.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

Config = dict[str, Any]


def tiny_llama() -> Config:
    """Full attention in every layer: 4 `KVCache`, 4 x 2 arrays [1, 2, T, 16]."""
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def tiny_qwen3() -> Config:
    """As llama, with norms on queries and keys and a tied head."""
    return tiny_llama() | {"model_type": "qwen3", "rope_theta": 10000.0, "tie_word_embeddings": True}


def tiny_gemma3() -> Config:
    """Layers 0 and 2 keep a window of 32 tokens (`RotatingKVCache`), layers 1 and 3 keep all."""
    return {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "query_pre_attn_scalar": 16,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 4096,
    }


def tiny_gpt_oss() -> Config:
    """Experts, attention sinks, and a window of 16 tokens in layers 0 and 2."""
    return {
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }


def tiny_qwen3_next() -> Config:
    """Gated delta nets in layers 0 to 2 (conv [1, 3, 256] and state [1, 4, 32, 32]), full attention in layer 3."""
    return {
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "moe_intermediate_size": 64,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
    }


def tiny_deepseek_v3() -> Config:
    """MLA latents: [1, 1, T, 32] and rope part [1, 1, T, 16] in each of 4 `KVCache`; experts from layer 1 on."""
    return {
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 4096,
    }


def tiny_deepseek_v2() -> Config:
    """mlx-lm keeps this family unpacked: keys [1, 4, T, 32] and values [1, 4, T, 16] in each of 4 `KVCache`."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    routing = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
    return tiny_deepseek_v3() | {"model_type": "deepseek_v2", "rope_scaling": yarn} | routing


def tiny_mamba2() -> Config:
    """State only, no attention: 4 `ArraysCache` of conv [1, 3, 160] and state [1, 8, 16, 16]."""
    return {
        "model_type": "mamba2",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "vocab_size": 128,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    }


def tiny_lfm2() -> Config:
    """Short convolutions in layers 0 and 2 (state [1, 2, 64]), full attention in layers 1 and 3."""
    return {
        "model_type": "lfm2",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    }


ALL_TINY: dict[str, Callable[[], Config]] = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "gemma3": tiny_gemma3,
    "gpt_oss": tiny_gpt_oss,
    "qwen3_next": tiny_qwen3_next,
    "deepseek_v3": tiny_deepseek_v3,
    "deepseek_v2": tiny_deepseek_v2,
    "mamba2": tiny_mamba2,
    "lfm2": tiny_lfm2,
}
"""Every tiny config by its short name, for `@pytest.mark.parametrize`."""


def build_tiny(config: Config, seed: int = 0) -> nn.Module:
    """mlx-lm's model of `config` with evaluated float32 weights that depend on `config` and `seed` alone.

    Matrices are normal with variance 1 / (last axis), norm weights lie around 1, the rest around 0, so that every
    weight moves the logits: a fault put into the cache then shows in them. Building draws from MLX's global random
    state; the weights do not depend on it.
    """
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return randomize(architecture.Model(architecture.ModelArgs.from_dict(config)), seed)


PRECISIONS = ("float32", "float16", "bfloat16", "4 bits")


def in_precision(model: nn.Module, precision: str) -> nn.Module:
    """The same model in one of `PRECISIONS`; 4 bits is bfloat16 with every matrix that can be quantised."""
    model.set_dtype(mx.bfloat16 if precision == "4 bits" else getattr(mx, precision))
    if precision == "4 bits":
        nn.quantize(
            model,
            group_size=32,
            bits=4,
            class_predicate=lambda _, part: hasattr(part, "to_quantized") and part.weight.shape[-1] % 32 == 0,
        )
    mx.eval(model.parameters())
    return model


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a model those weights, and evaluate them."""
    parameters = dict(tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    drawn = [(name, _draw(name, parameters[name], key)) for name, key in zip(sorted(parameters), keys, strict=True)]
    model.update(tree_unflatten(drawn))
    model.eval()
    mx.eval(model.parameters())
    return model


def _draw(name: str, parameter: mx.array, key: mx.array) -> mx.array:
    """A float32 array of `parameter`'s shape."""
    if parameter.ndim > 1:
        return mx.random.normal(parameter.shape, scale=1 / math.sqrt(parameter.shape[-1]), key=key)
    if name.endswith(".weight"):
        return mx.random.uniform(0.8, 1.2, parameter.shape, key=key)
    return mx.random.normal(parameter.shape, scale=0.1, key=key)
