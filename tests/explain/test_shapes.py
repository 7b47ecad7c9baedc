"""Shapes and the bill, against the numbers of the configs and against counting by hand."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from kinds import CONFIGS
from tiny import tiny_llama, tiny_mamba2

from mlxkv.core.errors import ModelError, UsageError
from mlxkv.explain.shapes import CONTEXTS, _walk, explain_shapes
from mlxkv.sizing import catalog
from mlxkv.sizing.weights import build, weight_bytes

PRINTED = json.loads((Path(__file__).parents[1] / "data" / "labs.json").read_text(encoding="utf-8"))["kv"]


def shapes_of(name, tokens=1024):
    return explain_shapes(catalog.find(name).config, tokens)


def by_path(found):
    return {tensor.path: tensor for stage in found.stages for tensor in stage.tensors}


def test_every_tensor_of_a_layer_has_the_shape_of_its_config():
    found = explain_shapes(tiny_llama(), 7)
    shapes = {path: tensor.shape for path, tensor in by_path(found).items()}
    layer = "model.layers.0"
    assert shapes["model.embed_tokens"] == (1, 7, 64)
    assert shapes[f"{layer}.self_attn.q_proj"] == (1, 7, 64)
    assert shapes[f"{layer}.self_attn.k_proj"] == (1, 7, 32)
    assert shapes[f"{layer}.self_attn.scores"] == (1, 4, 7, 7)
    assert shapes[f"{layer}.self_attn.heads"] == (1, 4, 7, 16)
    assert shapes[f"{layer}.mlp.gate_proj"] == (1, 7, 128)
    assert shapes["lm_head"] == shapes[""] == (1, 7, 128)
    assert [(stage.title, stage.layers) for stage in found.stages] == [
        ("before the layers", 0),
        ("layer 0, and 3 more like it", 4),
        ("after the layers", 0),
    ]


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B-Instruct", "gemma-2-9b", "DeepSeek-V3", "Qwen3-30B-A3B", "gpt-oss-20b"])
def test_shapes_at_any_length_are_those_of_a_pass_of_that_length(name):
    module = build(catalog.find(name).config)
    traced = [(tensor.path, tensor.shape) for tensor in _walk(module, 300).tensors]
    listed = by_path(shapes_of(name, 300))
    assert len(listed) > 10
    for path, shape in traced:
        if path in listed and not path.endswith("rope"):  # once for queries, once for keys
            assert listed[path].shape == shape, path


def test_tensors_come_in_the_order_they_are_computed():
    paths = [tensor.path for tensor in explain_shapes(tiny_llama(), 5).stages[1].tensors]
    names = [path.rpartition(".")[2] for path in paths]
    assert names.index("q_proj") < names.index("scores") < names.index("heads") < names.index("o_proj")
    assert paths[-1] == "model.layers.0"


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B-Instruct", "gemma-2-9b", "DeepSeek-V3", "Qwen3-Next-80B-A3B"])
def test_only_the_scores_grow_with_n_times_n(name):
    tensors = by_path(shapes_of(name, 256))
    assert {path.rpartition(".")[2] for path, tensor in tensors.items() if tensor.grows == "n x n"} == {"scores"}
    assert all(tensor.grows in ("n", "n x n", "1") for tensor in tensors.values())


def test_layers_of_other_kinds_are_listed_apart():
    found = shapes_of("Qwen3-Next-80B-A3B", 256)
    assert [stage.layers for stage in found.stages] == [0, 36, 12, 0]
    assert any("linear_attn" in tensor.path for tensor in found.stages[1].tensors)
    assert any(tensor.path.endswith("self_attn.scores") for tensor in found.stages[2].tensors)


def test_the_bill_is_what_counting_by_hand_gives():
    bill = next(bill for bill in explain_shapes(tiny_llama(), 5).bills if bill.tokens == 2048)
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64  # q, k, v, o, the MLP and two norms
    linear, head = 4 * layer + 64, 64 * 128
    assert bill.linear_flops == 2 * linear * 2048 + 2 * head
    assert bill.attention_flops == 4 * 4 * 2 * (16 + 16) * 2048 * 2048
    assert bill.decode_linear_flops == 2 * (linear + head)
    assert bill.decode_attention_flops == 4 * 4 * 2 * (16 + 16) * 2048
    assert bill.kv_bytes == 4 * 2 * 2 * 16 * 2 * 2048


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B-Instruct", "Llama-3-8B"])
def test_doubling_the_context_quadruples_attention_and_doubles_the_rest(name):
    found = shapes_of(name)
    linear, attention = found.doubling
    assert attention == 4.0
    assert linear == pytest.approx(2, abs=1e-4)
    assert [bill.tokens for bill in found.bills] == list(CONTEXTS) == [1024 * 2**i for i in range(8)]
    decode = [bill.decode_attention_flops for bill in found.bills]
    assert all(after == 2 * before for before, after in pairwise(decode))


def test_latents_are_billed_with_their_positions_and_as_they_are_in_decode():
    bill = next(bill for bill in shapes_of("DeepSeek-V3").bills if bill.tokens == 2048)
    assert bill.attention_flops == 61 * 128 * 2 * (128 + 64 + 128) * 2048 * 2048  # keys 128 + 64, values 128
    assert bill.decode_attention_flops == 61 * 128 * 2 * (512 + 64 + 512) * 2048  # latents of 512, positions of 64


def test_a_window_keeps_attention_from_quadrupling():
    assert 2 < shapes_of("gpt-oss-20b").doubling[1] < 4


def test_the_formula_of_qwen_says_12_kib_a_token_and_768_kib_a_block():
    found = shapes_of("Qwen2.5-0.5B-Instruct")
    assert found.formula == ("24 layers x 2 KV heads x (64 + 64) x 2 B = 12,288 B a token; x 64 = 786,432 B a block",)
    assert found.bytes_per_token == 12_288


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B (24 layers, 2 x 64)"),
        ("Llama-3-8B", "Llama-3-8B (32 layers, 8 x 128)"),
        ("Qwen2.5-72B-Instruct", "Qwen-72B (80 layers, 8 x 128, GQA: Qwen2 and Qwen2.5)"),
    ],
)
def test_kv_of_4k_and_32k_is_that_of_the_document(name, printed):
    held = {bill.tokens: bill.kv_bytes / 2**30 for bill in shapes_of(name).bills}
    for tokens, gib in PRINTED["table_GB"][printed].items():
        assert round(held[int(tokens)], 2) == gib


def test_kv_depends_on_structure_not_on_the_number_of_parameters():
    llama = build(catalog.find("Llama-3-8B").config)
    large = next(bill for bill in shapes_of("Qwen2.5-72B-Instruct").bills if bill.tokens == 32_768)
    assert large.kv_bytes == 10 * 2**30
    assert large.kv_bytes < weight_bytes(llama)
    assert PRINTED["per_64_token_block_KB"] == 64 * shapes_of("Qwen2.5-0.5B-Instruct").bytes_per_token / 1024 == 768


def test_a_model_without_attention_has_no_scores_and_a_state():
    found = explain_shapes(tiny_mamba2(), 16)
    assert not any(tensor.path.endswith("scores") for tensor in by_path(found).values())
    assert found.doubling[1] == 0
    assert found.formula[0].startswith("and ")
    assert found.formula[0].endswith("B of state, at any length")


def test_what_cannot_be_is_said():
    with pytest.raises(UsageError, match="0 tokens have no shapes"):
        explain_shapes(tiny_llama(), 0)
    with pytest.raises(ModelError, match="model_type"):
        explain_shapes({"model_type": "unheard_of"}, 5)


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_steps_a_layer_takes_token_by_token_are_listed_once(name):
    paths = [tensor.path for stage in explain_shapes(CONFIGS[name], 5).stages for tensor in stage.tensors]
    assert paths.count("backbone.layers.0.mixer.x_proj") == 1
    assert by_path(explain_shapes(CONFIGS[name], 5))["backbone.layers.0.mixer.x_proj"].grows == "1"


def test_steps_that_depend_on_the_number_of_tokens_are_said():
    with pytest.raises(ModelError, match="takes other steps for 128 tokens"):
        explain_shapes(CONFIGS["minimax_m3_vl"], 5)
