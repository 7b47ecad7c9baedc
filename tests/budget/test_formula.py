"""The closed formula: right where it holds, and a sentence where it does not."""

import pytest
from tiny import tiny_llama, tiny_mamba2

from mlxkv.budget import find_source, formula_bytes_per_token, formula_kv_bytes, trace_model
from mlxkv.core.units import GIB
from mlxkv.sizing import catalog


@pytest.mark.parametrize(
    ("name", "at_4k", "at_32k"),
    [("Qwen2.5-0.5B-Instruct", "0.05", "0.38"), ("Llama-3-8B", "0.50", "4.00"),
     ("Qwen2.5-72B-Instruct", "1.25", "10.00")],
)  # fmt: skip
def test_it_gives_the_seed_documents_table(name, at_4k, at_32k):
    config = catalog.find(name).config
    assert [f"{formula_kv_bytes(config, tokens) / GIB:.2f}" for tokens in (4096, 32768)] == [at_4k, at_32k]


def test_a_stated_head_dim_wins_and_null_kv_heads_are_the_attention_heads():
    config = tiny_llama()
    assert formula_bytes_per_token(config) == 4 * 2 * 16 * 2 * 2
    assert formula_bytes_per_token(config | {"head_dim": 32}) == 2 * formula_bytes_per_token(config)
    assert formula_bytes_per_token(config | {"head_dim": None}) == formula_bytes_per_token(config)
    assert formula_bytes_per_token(config | {"num_key_value_heads": None}) == 2 * formula_bytes_per_token(config)
    assert formula_bytes_per_token({"model_type": "llama", "text_config": config}) == formula_bytes_per_token(config)


def test_it_has_no_answer_where_a_number_is_missing():
    config = {key: value for key, value in tiny_mamba2().items() if key not in ("num_attention_heads", "num_heads")}
    assert formula_bytes_per_token(config) is None
    assert formula_bytes_per_token(tiny_llama() | {"num_key_value_heads": [2, 2, 4, 4]}) == 4 * 4 * 16 * 2 * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Qwen3.5-27B", "oMLX's line would say 16.00 MB for this model: it counts all 64 layers, 16 hold KV."),
        ("Qwen3.6-35B-A3B", "say 5.00 MB for this model: it counts all 40 layers, 10 hold KV."),
        ("gpt-oss-20b", "12 layers keep only the last 128 tokens"),
        ("gemma-4-E2B", "it counts all 35 layers, 15 hold KV; 12 layers keep only the last 512 tokens"),
        ("DeepSeek-V3", "the cache holds 1,152 B"),
    ],
)
def test_where_it_errs_the_reason_is_said(name, words):
    assert words in trace_model(find_source(name), quick=True).why_formula_differs


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B-Instruct", "Llama-3.1-8B", "Phi-3.5-mini", "Qwen3-30B-A3B"])
def test_where_it_agrees_nothing_is_said(name):
    model = trace_model(find_source(name), quick=True)
    assert model.formula_bytes_per_token == model.trace.growth_bytes_per_token
    assert model.why_formula_differs is None


def test_quantised_kv_is_a_reason_of_its_own():
    model = trace_model(find_source("Llama-3.1-8B"), kv_bits=8, quick=True)
    assert model.why_formula_differs.endswith("it knows nothing of quantised KV.")
