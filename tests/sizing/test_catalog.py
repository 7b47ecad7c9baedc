"""The catalog's names, and what is read from a config before any model class sees it."""

import json
import re

import pytest
from tiny import tiny_llama

from mlxkv.core.errors import ModelError, ModelNotFoundError
from mlxkv.sizing import catalog
from mlxkv.sizing.config import ContextWindow, check_config, context_window, parse_config, read_config, text_level
from mlxkv.sizing.trace import build, trace
from mlxkv.sizing.weights import count_params


@pytest.mark.parametrize("name", catalog.names())
def test_every_entry_says_where_it_comes_from_and_can_be_built(name):
    model = catalog.find(name)
    assert model.name == name
    assert len(model.source) > 20
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.hub_id)
    assert not any(key.startswith("_") for key in model.config)
    assert count_params(build(model.config)) > 10**8


def test_the_entry_that_is_in_no_reference_has_the_known_figures():
    got = trace(build(catalog.find("granite-4.0-h-small").config))
    assert got.growth_bytes_per_token == 4 * 2 * 8 * 128 * 2
    assert got.fixed_bytes == 36 * (3 * (8192 + 2 * 128) * 2 + 128 * 64 * 128 * 4)
    assert got.weights.params == pytest.approx(32e9, rel=0.02)
    assert got.weights.active_params == pytest.approx(9e9, rel=0.03)


def test_names_are_sorted_without_regard_to_case():
    names = catalog.names()
    assert len(names) == 47
    assert list(names) == sorted(names, key=str.casefold)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct"),
        ("qwen2.5-0.5b-INSTRUCT", "Qwen2.5-0.5B-Instruct"),
        (" gpt-oss-20b ", "gpt-oss-20b"),
        ("OpenAI/GPT-OSS-20B", "gpt-oss-20b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
    ],
)
def test_a_name_or_hub_id_is_found_in_any_case(written, name):
    assert catalog.find(written).name == name


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("Qwen2.5-0.5B-Instrukt", "Qwen2.5-0.5B-Instruct"),
        ("llama3-8b", "Llama-3-8B"),
        ("google/gemma-3-12", "gemma-3-12b"),
        ("gpt-oss-20", "gpt-oss-20b"),
        ("qwen2.5-0.5b", "Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen2.5-7B", "Qwen2.5-7B-Instruct"),
        ("mlx-community/Llama-3-8B-Instruct-4bit", "Llama-3-8B"),
    ],
)
def test_a_typo_gets_three_suggestions_the_nearest_first(written, nearest):
    with pytest.raises(ModelNotFoundError) as caught:
        catalog.find(written)
    assert catalog.suggest(written)[0] == nearest
    assert ", ".join(catalog.suggest(written)) in str(caught.value)
    assert len(set(catalog.suggest(written))) == 3


@pytest.mark.parametrize("written", ["", "../catalog/gpt-oss-20b", "gpt-oss-20b.json", "\0", "/", "a" * 10_000])
def test_any_text_is_a_name_that_is_not_found(written):
    with pytest.raises(ModelNotFoundError):
        catalog.find(written)
    assert len(catalog.suggest(written)) == 3


def test_two_readers_never_share_a_config():
    catalog.find("gpt-oss-20b").config["layer_types"].clear()
    assert len(catalog.find("gpt-oss-20b").config["layer_types"]) == 24


# reading a file


def test_a_config_is_read_from_a_directory_or_a_file_with_or_without_a_byte_order_mark(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(tiny_llama()).encode())
    assert read_config(tmp_path) == read_config(file) == tiny_llama()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"model_type": "llama",}', "not JSON: .* line 1, column 24"),
        (b"", "not JSON"),
        (b"[1, 2]", "holds a JSON list"),
        (b"null", "holds a JSON null"),
        (b'"llama"', "holds a JSON string"),
        ('{"model_type": "llama"}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"{}", "no model_type key"),
        (b'{"model_type": "llama", "head_dim": 1e3}', "head_dim is 1000.0"),
        (b'{"model_type": "llama", "vocab_size": NaN}', "vocab_size is nan"),
        (b" " * (9 * 2**20), "9.00 MiB long"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_file_is_one_sentence(tmp_path, data, words):
    file = tmp_path / "config.json"
    file.write_bytes(data)
    with pytest.raises(ModelError, match=words) as caught:
        read_config(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_config_says_what_is_missing(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)


def test_infinity_is_read_as_transformers_writes_it():
    config = parse_config(b'{"time_step_limit": [0.0, {"__float__": "Infinity"}]}', source="config.json")
    assert config == {"time_step_limit": [0.0, float("inf")]}


# counts


@pytest.mark.parametrize("value", [0, -1, "8", 2.0, True, 2**31, [2, -1], [2, "2"], [], {}])
@pytest.mark.parametrize("key", ["num_key_value_heads", "hidden_size", "num_hidden_layers"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_count_that_is_none_is_refused_by_its_key_on_both_levels(key, value, nested):
    config = tiny_llama() | {key: value}
    with pytest.raises(ModelError, match=key):
        check_config({"model_type": "llama", "text_config": config} if nested else config)


@pytest.mark.parametrize("value", [None, 2, [2, 2, 0, 2]])
def test_a_count_may_be_null_or_one_a_layer(value):
    assert check_config(tiny_llama() | {"num_key_value_heads": value})["num_key_value_heads"] == value


def test_checking_copies():
    config = {"model_type": "llama", "text_config": {"layer_types": []}}
    check_config(config)["text_config"]["layer_types"].append("full_attention")
    assert config == {"model_type": "llama", "text_config": {"layer_types": []}}


def test_the_inner_level_wins_but_for_the_type():
    config = {"model_type": "gemma3", "head_dim": 1, "vocab_size": 5, "text_config": {"model_type": "x", "head_dim": 2}}
    level = text_level(config)
    assert (level["model_type"], level["head_dim"], level["vocab_size"]) == ("gemma3", 2, 5)


# C68: the longest context

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": 32_768}, ContextWindow(32_768, 32_768)),
        ({"text_config": {"max_position_embeddings": 8192}}, ContextWindow(8192, 8192)),
        ({"max_position_embeddings": 1, "text_config": {"max_position_embeddings": 8192}}, ContextWindow(8192, 8192)),
        ({"max_position_embeddings": 32_768, "rope_scaling": YARN}, ContextWindow(32_768, 131_072)),
        ({"max_position_embeddings": 131_072, "rope_scaling": YARN}, ContextWindow(32_768, 131_072)),
        ({"rope_parameters": YARN}, ContextWindow(32_768, 131_072)),
        ({"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}, ContextWindow(4096, 131_072)),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 8.0}},
            ContextWindow(4096, 4096),
        ),
        ({"max_position_embeddings": 10**30}, None),
        ({"max_position_embeddings": "4096"}, None),
        ({"model_max_length": 10**30, "n_positions": 1024}, ContextWindow(1024, 1024)),
    ],
)
def test_the_context_is_what_the_config_states_or_unknown(settings, window):
    assert context_window({"model_type": "llama"} | settings) == window


def test_contexts_of_known_models():
    def of(name):
        window = context_window(catalog.find(name).config)
        return window and (window.native_tokens, window.scaled_tokens)

    assert of("Qwen2.5-0.5B-Instruct") == (32_768, 32_768)
    assert of("Llama-3.1-8B") == (8192, 131_072)
    assert of("DeepSeek-V3") == (4096, 163_840)
    assert of("Phi-3.5-mini") == (4096, 131_072)
    assert of("Llama-3-8B") is None
    assert of("gemma-3-12b") == (131_072, 131_072)
