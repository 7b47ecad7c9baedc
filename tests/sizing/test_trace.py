"""The trace against three oracles: the figures of `data/expected_kv.json`, real caches after real forward passes, and
mlx-lm's own converter."""

import json
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_cache
from tiny import (
    ALL_TINY,
    build_tiny,
    tiny_deepseek_v2,
    tiny_deepseek_v3,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_lfm2,
    tiny_llama,
    tiny_mamba2,
    tiny_qwen3,
    tiny_qwen3_next,
)

from mlxkv.core.errors import ModelError, UsageError
from mlxkv.sizing import architecture, catalog
from mlxkv.sizing.trace import WeightSpec, _window_of, build, trace, trace_caches
from mlxkv.sizing.weights import count_params, weight_bytes

DATA = Path(__file__).parents[1] / "data"
EXPECTED = json.loads((DATA / "expected_kv.json").read_text())["models"]
ARCHITECTURES = json.loads((DATA / "mlx_lm_architectures.json").read_text())["configs"]
FLOAT32 = WeightSpec(32)


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def traced(config, **options):
    return trace(build(config, weights=FLOAT32), **options)


def leaves(caches):
    for cache in caches:
        if isinstance(cache, mlx_cache.CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def held_bytes(cache):
    """Bytes in use of a real cache of mlx-lm, by its own offset and window."""
    if isinstance(cache, mlx_cache.ArraysCache):
        return cache.nbytes
    rows = cache.offset
    if isinstance(cache, mlx_cache.RotatingKVCache):
        rows = min(rows, cache.max_size)
    elif isinstance(cache, mlx_cache.ChunkedKVCache):
        rows = min(rows - cache.start_position, cache.chunk_size)
    return sum(array[..., :rows, :].nbytes for array in (cache.keys, cache.values))


def run(module, caches, *chunks):
    """Really feed chunks of so many tokens."""
    for tokens in chunks:
        logits = module(mx.arange(tokens)[None] % 100, cache=caches)
        mx.eval(logits, [array for _, array in tree_flatten([cache.state for cache in caches])])


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_agrees_with_the_reference_to_the_byte(name):
    want, config = EXPECTED[name], catalog.find(name).config
    got = trace(build(config, weights=WeightSpec(16)))
    assert (got.weights.params, got.weights.bytes) == (want["params"], want["weights_bytes"]["bf16"])
    assert got.growth_bytes_per_token == want["grow_bytes_per_token"]
    assert got.window_tokens == want["window_tokens"]
    assert got.window_bytes_per_token == want["window_bytes_per_token"]
    assert got.fixed_bytes == want["fixed_state_bytes"]
    assert {length: got.kv_bytes(int(length)) for length in want["kv_bytes"]} == want["kv_bytes"]


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_weights_agree_with_the_reference_to_the_byte(name, bits):
    want = EXPECTED[name]
    module = build(catalog.find(name).config, weights=WeightSpec(bits))
    assert weight_bytes(module) == want["weights_bytes"][f"q{bits}_g64"]
    assert count_params(module) == want["params"]


@pytest.mark.parametrize("tokens", [64, 200])
@pytest.mark.parametrize("name", ALL_TINY)
def test_traced_bytes_equal_those_of_a_real_cache(name, tokens):
    config = ALL_TINY[name]()
    module = build_tiny(config)
    real = mlx_cache.make_prompt_cache(module)
    run(module, real, tokens - 1, 1)
    got = traced(config)
    assert [cost.kv_bytes(tokens) for cost in got.costs] == [held_bytes(cache) for cache in real]


@pytest.mark.parametrize("config", ARCHITECTURES, ids=lambda config: config["model_type"])
def test_the_traced_layout_is_the_real_one_in_every_architecture(config):
    if config["model_type"] == "bitnet" and not mx.metal.is_available():
        pytest.skip("mlx-lm runs bitnet on Metal only")
    classes = mlx_lm.utils._get_classes(config)
    module = classes[0](classes[1].from_dict(json.loads(json.dumps(config))))
    module.eval()
    got = trace(module)
    layout = trace_caches(module, mlx_cache.make_prompt_cache(module), 129)
    real = mlx_cache.make_prompt_cache(module)
    run(module, real, 129)
    shapes = [[(array.shape, array.dtype) for array in cache.arrays] for cache in layout]
    assert shapes == [
        [(array.shape, str(array.dtype).removeprefix("mlx.core.")) for _, array in tree_flatten(vars(cache))
         if isinstance(array, mx.array)]
        for cache in leaves(real)
    ]  # fmt: skip
    assert [cache.logical_bytes for cache in layout] == [held_bytes(cache) for cache in leaves(real)]
    assert got.kv_bytes(129) == sum(cache.logical_bytes for cache in layout)
    assert got.allocated_bytes(129, prefill_step_tokens=129) == sum(cache.nbytes for cache in leaves(real))


@pytest.mark.parametrize(("tokens", "step"), [(1, 1), (64, 64), (256, 64), (257, 257), (320, 64), (512, 256)])
@pytest.mark.parametrize("config", [tiny_llama(), tiny_gemma3(), tiny_gpt_oss(), tiny_qwen3_next()])
def test_allocated_bytes_after_a_chunked_prefill_are_the_real_ones(config, tokens, step):
    if tokens == 1 and config["model_type"] in ("gemma3_text", "gpt_oss"):
        pytest.skip("a ring's first single token takes a whole ring at once")
    module = build_tiny(config)
    real = mlx_cache.make_prompt_cache(module)
    run(module, real, *[step] * (tokens // step))
    assert traced(config).allocated_bytes(tokens, prefill_step_tokens=step) == sum(cache.nbytes for cache in real)


def test_a_window_is_cut_back_by_the_first_decoded_token():
    module = build_tiny(tiny_gemma3())
    real = mlx_cache.make_prompt_cache(module)
    run(module, real, 128)
    got = traced(tiny_gemma3())
    assert got.allocated_bytes(128, prefill_step_tokens=128) == sum(cache.nbytes for cache in real)
    run(module, real, 1)
    assert got.allocated_bytes(129) == sum(cache.nbytes for cache in real)


def test_a_loaded_module_is_traced_without_a_copy_or_an_evaluation():
    module = build_tiny(tiny_qwen3_next())
    before = [array for _, array in tree_flatten(module.parameters())]
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    layout = trace_caches(module, mlx_cache.make_prompt_cache(module), 64)
    assert mx.get_peak_memory() - active < 100_000
    assert all(a is b for a, b in zip(before, [array for _, array in tree_flatten(module.parameters())], strict=True))
    assert [cache.kind for cache in layout] == ["state", "state", "state", "full"]
    assert layout[3].arrays[0].token_shape == (1, 2, 1, 16)
    assert layout[3].arrays[0].path == "keys"
    assert layout[0].arrays[1].token_shape == (1, 4, 32, 32)


def test_a_quantised_cache_is_traced_where_the_caller_made_it():
    config = tiny_llama() | {"head_dim": 64}
    caches = [mlx_cache.QuantizedKVCache(group_size=32, bits=4) for _ in range(4)]
    layout = trace_caches(build_tiny(config), caches, 64)
    assert [array.path for array in layout[0].arrays] == [
        f"{part}.{i}" for part in ("keys", "values") for i in range(3)
    ]
    assert layout[0].arrays[0].token_shape == (1, 2, 1, 8)
    assert layout[0].logical_bytes == 2 * 2 * 64 * (64 // 2 + 2 * 2 * 4)  # float32 scales and biases


def test_a_forward_pass_that_replaces_parameters_leaves_them_as_they_were():
    config = next(config for config in ARCHITECTURES if config["model_type"] == "gemma3n")
    module = build(config)
    before = {name: array.dtype for name, array in tree_flatten(module.parameters())}
    trace(module)
    assert {name: array.dtype for name, array in tree_flatten(module.parameters())} == before


@pytest.mark.parametrize("fails", [False, True])
def test_mlx_is_left_as_it_was(fails):
    names = [(mx.fast, "scaled_dot_product_attention"), (mx.fast, "metal_kernel"), (mx, "gather_mm"), (mx, "softmax")]
    before = [vars(owner)[name] for owner, name in names]
    if fails:
        with pytest.raises(ModelError, match="n_heads must be a multiple of n_kv_heads"):
            traced(tiny_llama() | {"num_key_value_heads": 3})
    else:
        traced(tiny_llama())
    assert [vars(owner)[name] for owner, name in names] == before


def test_blocks_of_the_seed_documents():
    got = trace(build(catalog.find("Qwen2.5-0.5B-Instruct").config))
    assert got.first_block_bytes == got.steady_block_bytes == got.stored_block_bytes == 786_432
    assert len(got.caches) == 24
    assert got.caches[0].arrays[0].token_shape == (1, 2, 1, 64)
    assert got.caches[0].arrays[0].dtype == "bfloat16"


def test_blocks_of_a_windowed_model():
    got = trace(build(catalog.find("gpt-oss-20b").config))
    assert got.first_block_bytes == 64 * (24_576 + 24_576)
    assert got.steady_block_bytes == 64 * 24_576
    assert got.stored_block_bytes == 64 * (24_576 + 24_576)


# C57, C58, C59, C60, C61


def test_layers_without_kv_cost_no_kv():
    config = tiny_qwen3_next() | {"num_hidden_layers": 64, "head_dim": 256, "num_key_value_heads": 4}
    got = trace(build(config))
    assert got.growth_bytes_per_token == 65_536
    assert got.steady_block_bytes == 4 * 2**20
    assert got.fixed_bytes == 48 * (3 * 256 * 2 + 4 * 32 * 32 * 4)


@pytest.mark.parametrize("tokens", [100, 128, 131_072])
def test_a_window_costs_its_length_at_most(tokens):
    got = trace(build(catalog.find("gpt-oss-20b").config))
    assert got.kv_bytes(tokens) == 24_576 * tokens + 24_576 * min(tokens, 128)


def test_a_window_that_is_null_or_unused_is_none():
    smollm3 = catalog.find("SmolLM3-3B").config
    assert smollm3["sliding_window"] is None
    assert trace(build(smollm3)).window_tokens == 0
    assert trace(build(catalog.find("Qwen2.5-7B-Instruct").config | {"use_sliding_window": False})).window_tokens == 0


def test_a_chunked_cache_is_a_window():
    config = next(config for config in ARCHITECTURES if config["model_type"] == "llama4")
    got = traced(config)
    assert {cost.kind for cost in got.costs} == {"window", "full"}
    assert got.window_tokens == config["text_config"]["attention_chunk_size"]


def test_deepseek_v3_keeps_latents_and_v2_unpacked_heads():
    v3, v2 = traced(tiny_deepseek_v3()), traced(tiny_deepseek_v2())
    assert [array.token_shape for array in v3.caches[0].arrays] == [(1, 1, 1, 32), (1, 1, 1, 16)]
    assert [array.token_shape for array in v2.caches[0].arrays] == [(1, 4, 1, 32), (1, 4, 1, 16)]


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "head_dim", "per_layer"),
    [(5120, 32, 8, 128, 4096), (2880, 64, 8, 64, 2048), (1024, 16, 8, 128, 4096), (1024, 16, 8, None, 2048)],
)
def test_a_stated_head_dim_wins(hidden, heads, kv_heads, head_dim, per_layer):
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    assert trace(build(tiny_llama() | sizes)).growth_bytes_per_token == 4 * per_layer


def test_layers_with_kv_may_be_named_by_index_or_by_type():
    by_index = tiny_lfm2()
    by_type = without(by_index, "full_attn_idxs") | {"layer_types": ["conv", "full_attention"] * 2}
    assert traced(by_index).costs == traced(by_type).costs
    lfm2 = trace(build(catalog.find("LFM2-1.2B").config))
    assert lfm2.kv_bytes(32_768) - lfm2.fixed_bytes == 384 * 2**20


# C63


@pytest.mark.parametrize("change", [{"num_key_value_heads": None}, "num_key_value_heads"])
@pytest.mark.parametrize("config", [tiny_llama(), tiny_qwen3()], ids=["llama", "qwen3"])
def test_null_or_absent_kv_heads_are_the_attention_heads(config, change):
    changed = config | change if isinstance(change, dict) else without(config, change)
    assert traced(changed).growth_bytes_per_token == 2 * traced(config).growth_bytes_per_token


@pytest.mark.parametrize("change", [{"head_dim": None}, "head_dim"])
@pytest.mark.parametrize("config", [tiny_llama(), tiny_qwen3()], ids=["llama", "qwen3"])
def test_a_null_or_absent_head_dim_is_derived(config, change):
    changed = config | change if isinstance(change, dict) else without(config, change)
    assert traced(changed).costs == traced(config).costs


@pytest.mark.parametrize(
    "scaling",
    [None, {}, {"rope_type": "llama3", "factor": 8.0}, {"type": "linear", "factor": 2.0},
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}],
    ids=str,
)  # fmt: skip
def test_rope_settings_never_change_kv_bytes(scaling):
    assert traced(tiny_llama() | {"rope_scaling": scaling}).costs == traced(tiny_llama()).costs


def test_the_inner_level_wins_for_a_text_model():
    assert traced({"text_config": tiny_llama()}).costs == traced(tiny_llama()).costs
    both = tiny_llama() | {"text_config": tiny_llama() | {"num_key_value_heads": 1}}
    assert traced(both).growth_bytes_per_token == traced(tiny_llama()).growth_bytes_per_token // 2
    inner = without(tiny_gemma3(), "num_key_value_heads") | {"num_key_value_heads": None}
    assert traced({"model_type": "gemma3", "text_config": inner}).growth_bytes_per_token == 2 * 2 * 4 * 16 * 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (tiny_llama() | {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        (tiny_llama() | {"num_key_value_heads": "8"}, "num_key_value_heads is '8', a string"),
        (tiny_llama() | {"num_hidden_layers": 10**6}, "num_hidden_layers is 1,000,000"),
        (without(tiny_llama(), "rms_norm_eps"), "lacks the key rms_norm_eps"),
        (without(tiny_llama(), "hidden_size", "vocab_size"), "lacks the keys hidden_size, vocab_size"),
        (without(tiny_llama(), "model_type"), "has no model_type key"),
        (tiny_llama() | {"model_type": "lama"}, "model_type 'lama' is not one mlx-lm .* did you mean llama"),
        (tiny_llama() | {"model_type": "cache"}, "model_type 'cache' is not one mlx-lm"),
        (tiny_llama() | {"model_type": "../models/llama"}, "is not one mlx-lm"),
        (tiny_llama() | {"model_type": 3}, "model_type is 3"),
        (tiny_llama() | {"model_file": "evil.py"}, "model_file 'evil.py'"),
        (tiny_llama() | {"rope_scaling": {"rope_type": "longrope"}}, "lacks the key original_max_position_embeddings"),
        (tiny_llama() | {"text_config": []}, "text_config"),
        (tiny_llama() | {"model_type": "ministral3"}, "lacks the key rope_parameters"),
        (without(tiny_deepseek_v2(), "rope_scaling"), "lacks the key rope_scaling"),
        (tiny_llama() | {"quantization": {"bits": 4}}, "quantization in config.json lacks the key 'group_size'"),
        (tiny_llama() | {"quantization": {"bits": 7, "group_size": 64}}, "bits 7 is not supported"),
        (tiny_llama() | {"quantization": {"bits": 4, "group_size": 63}}, "group_size is 63, and MLX has groups of 16"),
        (tiny_llama() | {"quantization": {"bits": "4", "group_size": 64}}, r"incompatible function arguments\.$"),
        (tiny_llama() | {"quantization_config": {"quant_method": "mxfp4", "ignore": ["re:("]}}, "unterminated"),
        (tiny_llama() | {"quantization": "4bit"}, "quantization is a string"),
        (tiny_llama() | {"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
        ({"model_type": "olmo"}, "install ai2-olmo"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_cannot_be_used_is_one_sentence_that_names_the_key(config, words, capfd):
    with pytest.raises(ModelError, match=words) as caught:
        build(config)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("value", [[], {}, 7, "no dtype"])
def test_a_dtype_nobody_knows_is_read_as_bfloat16(value):
    assert trace(build(tiny_llama() | {"torch_dtype": value})).growth_bytes_per_token == 4 * 2 * 2 * 16 * 2


def test_a_fault_of_the_forward_pass_is_one_sentence():
    with pytest.raises(ModelError, match="forward pass fails on 64 tokens") as caught:
        trace(build(tiny_llama() | {"rope_theta": "8"}))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_config_is_not_changed_by_building_it():
    config = {"model_type": "gemma3", "text_config": without(tiny_gemma3(), "num_attention_heads")}
    before = json.dumps(config)
    build(config)
    assert json.dumps(config) == before


# C64: KV bits


@pytest.mark.parametrize(
    ("bits", "group_size", "bytes_per_number"), [(8, 64, 1.0625), (4, 64, 0.5625), (4, 32, 0.625)]
)  # fmt: skip
def test_quantised_kv_counts_scales_and_biases(bits, group_size, bytes_per_number):
    module = build(catalog.find("SmolLM2-135M").config)
    got = trace(module, kv_bits=bits, kv_group_size=group_size)
    assert got.growth_bytes_per_token == 30 * 3 * 2 * 64 * bytes_per_number
    assert got.caches[0].class_name == "QuantizedKVCache"
    for tokens, rows in ((1, 256), (255, 256), (256, 256), (257, 512)):
        assert got.allocated_bytes(tokens) == rows * got.growth_bytes_per_token
        assert got.kv_bytes(tokens) == tokens * got.growth_bytes_per_token


def test_quantised_kv_leaves_a_recurrent_state_as_it_is():
    config = tiny_qwen3_next() | {"head_dim": 64}
    plain, quantised = trace(build(config)), trace(build(config), kv_bits=8)
    assert quantised.fixed_bytes == plain.fixed_bytes
    assert quantised.growth_bytes_per_token == plain.growth_bytes_per_token * 0.53125
    assert quantised.attention == plain.attention


def falcon_h1():
    return next(config for config in ARCHITECTURES if config["model_type"] == "falcon_h1") | {"head_dim": 64}


@pytest.mark.parametrize(
    ("config", "bits", "words"),
    [
        (tiny_gemma3() | {"head_dim": 64}, 8, "layer 0 keeps a RotatingKVCache"),
        (tiny_gpt_oss() | {"head_dim": 64}, 4, "layer 0 keeps a RotatingKVCache"),
        (falcon_h1(), 8, r"layer 0\.1 keeps a KVCache inside a CacheList"),
        (
            tiny_deepseek_v3() | {"kv_lora_rank": 64, "qk_rope_head_dim": 64},
            8,
            "cannot run this model with quantised KV",
        ),
        (tiny_llama(), 8, "keys of layer 0 have 16 numbers a head, which groups of 64 do not divide"),
        (tiny_mamba2(), 8, "keeps no keys and values"),
        (tiny_llama() | {"head_dim": 64}, 7, "KV of 7 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kv_bits_are_refused_where_mlx_lm_cannot_quantise(config, bits, words):
    with pytest.raises(UsageError, match=words):
        traced(config, kv_bits=bits)


# C65: weights


@pytest.mark.parametrize("name", ALL_TINY)
def test_a_published_quantisation_has_the_bytes_of_mlx_lm_s_converter(name):
    config = ALL_TINY[name]() | {"hidden_size": 128, "block_dim": 128, "tie_word_embeddings": False}
    module, converted = mlx_lm.utils.quantize_model(build_tiny(config), config, 64, 4)
    got = trace(build(converted | {"torch_dtype": "float32"}))
    assert got.weights.bytes == sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def test_each_layer_s_own_quantisation_is_honoured():
    layers = {"model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 32}, "lm_head": False}
    plain = build(tiny_llama() | {"quantization": {"bits": 4, "group_size": 64}})
    mixed = build(tiny_llama() | {"quantization": {"bits": 4, "group_size": 64, **layers}})
    difference = trace(mixed).weights.bytes - trace(plain).weights.bytes
    assert difference == 128 * 64 * (1 + 4 / 32 - 0.5625) + 128 * 64 * (2 - 0.5625)


def test_openai_s_own_gpt_oss_packs_only_its_experts():
    stated = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    got = trace(build(catalog.find("gpt-oss-20b").config | {"quantization_config": stated})).weights
    assert got.params == EXPECTED["gpt-oss-20b"]["params"]
    assert got.bytes == pytest.approx(13.76e9, rel=0.001)  # the checkpoint's size on the hub


def test_a_tied_head_that_checkpoints_lack_is_not_counted_unless_the_config_unties_it():
    tied, untied = build(tiny_gemma3()), build(tiny_gemma3() | {"tie_word_embeddings": False})
    assert trace(untied).weights.params - trace(tied).weights.params == 128 * 64


@pytest.mark.parametrize(("stated", "bytes_each"), [("float32", 4), ("float16", 2), (None, 2), ("float8_e4m3fn", 2)])
def test_the_config_s_dtype_holds_for_weights_and_kv(stated, bytes_each):
    got = trace(build(tiny_llama() | {"torch_dtype": stated}))
    assert got.weights.bytes == got.weights.params * bytes_each
    assert got.growth_bytes_per_token == 4 * 2 * 2 * 16 * bytes_each


@pytest.mark.parametrize("spec", [(7, 64), (4, 48), (0, 64)])
def test_a_precision_that_does_not_exist_is_refused(spec):
    with pytest.raises(UsageError):
        WeightSpec(*spec)


def test_idle_experts_are_in_memory_but_not_at_work():
    config = tiny_gpt_oss()
    got = traced(config).weights
    expert = 3 * 64 * 64
    assert got.params - got.active_params == 4 * (4 - 2) * expert
    assert got.embedding_params == got.head_params == 128 * 64
    assert got.decode_bytes == 4 * (got.active_params - got.embedding_params)
    quantised = trace(build(config, weights=WeightSpec(4))).weights
    assert quantised.active_params == got.active_params
    published = trace(build(catalog.find("Qwen3-30B-A3B").config)).weights
    assert published.active_params == pytest.approx(3.3e9, rel=0.02)  # "A3B"


def test_dbrx_s_loop_over_experts_counts_as_active_ones_only():
    config = next(config for config in ARCHITECTURES if config["model_type"] == "dbrx")
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    got = traced(config).weights
    assert mx.get_peak_memory() - active < 100_000
    assert got.params - got.active_params == 4 * (4 - 2) * 3 * 64 * 128


def test_a_tied_table_is_read_as_head_and_a_per_layer_table_is_not():
    got = trace(build(catalog.find("gemma-4-E2B").config)).weights
    assert got.head_params == 262_144 * 1536
    assert got.embedding_params == 262_144 * (1536 + 35 * 256)
    assert got.decode_bytes == 2 * (got.params - 262_144 * 35 * 256)


# attention calls


def calls(got):
    return [
        (
            call.layers,
            call.window_tokens,
            call.shape.query_heads,
            call.shape.kv_heads,
            call.shape.key_dim,
            call.shape.mask,
        )
        for call in got.attention
    ]


def test_attention_is_recorded_with_its_window():
    assert calls(traced(tiny_llama())) == [(4, 0, 4, 2, 16, "causal")]
    assert calls(traced(tiny_gemma3())) == [(2, 32, 4, 2, 16, "bool"), (2, 0, 4, 2, 16, "causal")]
    assert calls(traced(tiny_qwen3_next())) == [(1, 0, 4, 2, 16, "causal")]
    assert calls(traced(tiny_mamba2())) == []


def test_a_call_s_window_is_told_by_the_keys_before_a_chunk():
    caches = [mlx_cache.RotatingKVCache(max_size=16), mlx_cache.RotatingKVCache(max_size=32), mlx_cache.KVCache()]
    assert [_window_of(caches, past_keys) for past_keys in (15, 16, 31, 32)] == [16, 16, 32, 32]


def test_layers_that_share_kv_still_attend():
    got = trace(build(catalog.find("gemma-4-E2B").config))
    assert len(got.caches) == 15
    assert [(call.layers, call.window_tokens, call.shape.key_dim) for call in got.attention] == [
        (28, 512, 256),
        (7, 0, 512),
    ]


def test_latent_attention_shows_the_scores_it_writes_out():
    (call,) = trace(build(catalog.find("DeepSeek-V3").config)).attention
    assert (call.layers, call.shape.query_heads, call.shape.key_dim, call.shape.mask_heads) == (61, 128, 128, 128)


def test_attention_that_a_model_writes_out_itself_is_seen():
    (call,) = trace(build(catalog.find("gemma-2-9b").config)).attention
    shape = call.shape
    assert (call.layers, shape.query_heads, shape.kv_heads, shape.key_dim, shape.value_dim) == (42, 16, 8, 256, 256)
    assert (shape.mask, shape.mask_heads) == ("scores", 16)


# unknown classes, mlx-lm's tables, cost


def test_a_cache_class_without_a_rule_is_measured_far_out():
    got = trace(build({"model_type": "deepseek_v41", "num_hidden_layers": 4}))
    assert {cost.kind for cost in got.costs} == {"unknown"}
    module = build({"model_type": "deepseek_v41", "num_hidden_layers": 4})
    for tokens in (4096, 8192):
        far = trace_caches(module, module.make_cache(), tokens)
        assert got.kv_bytes(tokens) == sum(cache.logical_bytes for cache in far)


def test_the_tables_read_from_mlx_lm_s_text_are_those_it_uses():
    by_type, by_architecture = architecture._remapping()
    assert by_type == mlx_lm.utils.MODEL_REMAPPING
    assert by_architecture == mlx_lm.utils.MODEL_ARCHITECTURE_REMAPPING


SLIM = """
import resource, sys
from mlxkv.sizing.catalog import find
from mlxkv.sizing.trace import build, trace
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
got = trace(build(find("DeepSeek-V3").config))
assert got.growth_bytes_per_token == 70272
assert "mlx_lm" not in sys.modules and "transformers" not in sys.modules
assert resource.getrlimit(resource.RLIMIT_NOFILE) == limit
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


def test_671_billion_parameters_take_seconds_and_megabytes():
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", SLIM], check=True, cwd=DATA.parents[1], capture_output=True, text=True)
    assert time.perf_counter() - started < 10
    assert int(done.stdout) < 2**30


def test_tracing_evaluates_nothing():
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    trace(build(catalog.find("Qwen3.5-27B").config, weights=WeightSpec(4)))
    assert mx.get_peak_memory() - active < 1_000_000
