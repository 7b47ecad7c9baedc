"""Loading: what is found, and one clear sentence for what is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from driving import run_fresh, some_tokens
from mlx.utils import tree_flatten
from saved import save_adapter, save_model
from tiny import build_tiny, tiny_llama, tiny_qwen3

from mlxkv.core.errors import MlxkvError, ModelError, ModelNotFoundError
from mlxkv.core.platform import open_files_limit
from mlxkv.models.loader import load, on_cpu

PROMPT = some_tokens(40, seed=40)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_model(tmp_path / "tiny", tiny_llama())


def test_a_directory_gives_the_model_its_tokenizer_and_its_context(saved: Path) -> None:
    loaded = load(str(saved))
    assert (loaded.name, loaded.context_tokens) == ("tiny", 4096)
    logits = run_fresh(loaded.module, PROMPT).logits
    assert np.array_equal(logits, run_fresh(build_tiny(tiny_llama()), PROMPT).logits)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Hello, world!")) == "Hello, world!"
    assert loaded.fields["adapter"] == "none"
    assert set(loaded.fields) == {
        "format", "architecture", "weights", "quantization", "config", "rope", "adapter", "tokenizer",
    }  # fmt: skip


def test_on_a_cpu_weights_become_float32_and_quantised_ones_stay(tmp_path: Path) -> None:
    assert on_cpu()
    loaded = load(str(save_model(tmp_path / "q8", tiny_llama(), bits=8)))
    kinds = {str(array.dtype) for _, array in tree_flatten(loaded.module.parameters())}
    assert kinds == {"mlx.core.float32", "mlx.core.uint32"}
    assert loaded.fields["quantization"] != "none"


def test_an_adapter_changes_the_answer_and_the_root(saved: Path, tmp_path: Path) -> None:
    plain, adapted = load(str(saved)), load(str(saved), adapter=save_adapter(tmp_path / "lora", tiny_llama()))
    assert {key for key in plain.fields if plain.fields[key] != adapted.fields[key]} == {"adapter"}
    assert not np.array_equal(run_fresh(plain.module, PROMPT).logits, run_fresh(adapted.module, PROMPT).logits)


def test_loading_leaves_the_limit_on_open_files_high() -> None:
    assert open_files_limit().soft > 2048


def change_config(**changes: object) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text()) | changes
        (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def split_and_lose_a_shard(directory: Path) -> None:
    weights = mx.load(str(directory / "model.safetensors"))
    names = sorted(weights)
    shards = {name: f"model-0000{1 + (i >= 10)}-of-00002.safetensors" for i, name in enumerate(names)}
    mx.save_safetensors(str(directory / shards[names[0]]), {name: weights[name] for name in names[:10]})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (directory / "model.safetensors").unlink()


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json does not exist"),
    "a cut config": (lambda d: (d / "config.json").write_text("{"), "not JSON"),
    "a config that is a list": (lambda d: (d / "config.json").write_text("[]"), "list"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no model"),
    "cut weights": (lambda d: os.truncate(d / "model.safetensors", 100_000), "incomplete"),
    "a stump of weights": (lambda d: os.truncate(d / "model.safetensors", 5), "cannot load"),
    "a missing shard": (split_and_lose_a_shard, r"lacks model-00002-of-00002.safetensors \(1 of 2 files\)"),
    "a damaged index": (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "weight_map"),
    "a layer too many in the config": (change_config(num_hidden_layers=5), "Missing 9 parameters"),
    "a layer too few in the config": (change_config(num_hidden_layers=3), "9 parameters not in model"),
    "an unknown architecture": (change_config(model_type="nonsense"), "nonsense"),
    "a config without a key": (change_config(rms_norm_eps=None), "rms_norm_eps"),
    "a cut tokenizer": (lambda d: (d / "tokenizer.json").write_text("{"), "tokenizer"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_directory_is_one_sentence_that_says_what_to_do(fault: str, saved: Path) -> None:
    break_it, words = BROKEN[fault]
    break_it(saved)
    with pytest.raises(ModelError, match=words) as error:
        load(str(saved))
    is_one_sentence(error.value)


def is_one_sentence(error: MlxkvError) -> None:
    assert "\n" not in str(error)
    assert str(error).endswith(".")
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no-such-model", "no model 'no-such-model'"),
        ("a/b/c", "no model 'a/b/c'"),
        ("mlx-community/No-Such-Model", "the hub did not give it"),
        ("not a/hub id?", "the hub did not give it"),
        ("no/such/file.gguf", "no file"),
    ],
)
def test_a_name_that_leads_nowhere_is_said_at_once(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=words) as error:
        load(name)
    is_one_sentence(error.value)


def test_a_file_that_is_no_model_is_said(saved: Path) -> None:
    with pytest.raises(ModelError, match="is a file") as error:
        load(str(saved / "config.json"))
    is_one_sentence(error.value)


def test_an_adapter_that_is_missing_or_of_another_model_is_said(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    other = save_adapter(tmp_path / "other", tiny_qwen3() | {"hidden_size": 128})
    for adapter, words in ((tmp_path / "none", "adapter"), (tmp_path / "empty", "adapter"), (other, "incompatible")):
        with pytest.raises(ModelError, match=words) as error:
            load(str(saved), adapter=adapter)
        is_one_sentence(error.value)
