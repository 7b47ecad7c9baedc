"""What belongs to a root and what does not: a field too few serves wrong text, one too many finds nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as remember
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from driving import assert_equals_fresh, run_fresh, run_warm, some_tokens
from mlx_lm.tuner.utils import linear_to_lora_layers
from saved import CHARACTERS, save_adapter, save_model, save_tokenizer
from tiny import build_tiny, tiny_deepseek_v3, tiny_llama

from mlxkv.cache.names import root_name
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import GIB
from mlxkv.models import fingerprint
from mlxkv.models.fingerprint import config_digest, files_digest, module_fields, rope_text, tokenizer_digest
from mlxkv.models.loader import LoadedModel, load
from mlxkv.prompt_cache.block_cache import BlockCache

TESTS = Path(__file__).parents[1]
CONFIG = tiny_llama() | {"head_dim": 64}  # wide enough for quantised KV
PROMPT = some_tokens(200, seed=200, vocabulary=95)


@dataclass(frozen=True)
class Setup:
    """How a model is loaded and asked."""

    directory: Path
    adapter: Path | None = None
    kv_bits: int | None = None
    salt: str = ""

    def bind(self, store: BlockStore) -> tuple[BlockCache, LoadedModel]:
        loaded = load(str(self.directory), adapter=self.adapter)
        return BlockCache(loaded.module, loaded.fields, store, name="tiny", kv_bits=self.kv_bits), loaded


def open_store(directory: Path, **settings: Any) -> BlockStore:
    defaults: dict[str, Any] = {"hot_bytes": GIB, "cold_bytes": GIB, "floor_bytes": 0}
    return BlockStore(CacheConfig(directory=directory, **{**defaults, **settings}))


def ask(setup: Setup, store: BlockStore) -> tuple[int, int, str | None]:
    """One request, equal to cold; hot and cold tokens and the reason why there were not more."""
    cache, loaded = setup.bind(store)
    warm = run_warm(cache, loaded.module, PROMPT, salt=setup.salt)
    assert cache._adapter is not None
    assert_equals_fresh(warm, run_fresh(loaded.module, PROMPT, prompt_cache=cache._adapter.new_prompt_cache()))
    return warm.event.hot_tokens, warm.event.cold_tokens, warm.event.reason


def look(setup: Setup, store: BlockStore) -> tuple[int, int, str | None]:
    """As `ask`, and nothing is computed or committed."""
    cache, _ = setup.bind(store)
    sequence = cache.start(PROMPT, salt=setup.salt)
    found = sequence.plan.match
    store.release(sequence.plan)
    return found.tokens_of("hot"), found.tokens_of("cold"), sequence.plan.reason


def forget_hot(store: BlockStore) -> None:
    assert store.flush(20)
    while store.hot.evict() is not None:
        pass


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "base", CONFIG)


# what makes another root


def copied(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "changed"))


def with_config(base: Path, tmp_path: Path, **changes: Any) -> Path:
    directory = copied(base, tmp_path)
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def flip_a_weight(base: Path, tmp_path: Path) -> Path:
    directory = copied(base, tmp_path)
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(-6, os.SEEK_END)
        byte = file.read(1)
        file.seek(-6, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    return directory


def other_tokenizer(base: Path, tmp_path: Path) -> Path:
    directory = copied(base, tmp_path)
    save_tokenizer(directory, CHARACTERS[::-1])
    return directory


Change = Callable[[Path, Path], tuple[Setup, Setup]]
CHANGES: dict[str, tuple[Change, str]] = {
    "a weight byte": (lambda base, tmp: (Setup(base), Setup(flip_a_weight(base, tmp))), "other root (weights)"),
    "quantisation": (
        lambda base, tmp: (Setup(base), Setup(save_model(tmp / "q8", CONFIG, bits=8))),
        "other root (config, quantization, weights)",
    ),
    "KV bits": (lambda base, _: (Setup(base), Setup(base, kv_bits=8)), "other root (kv_bits, layout)"),
    "other KV bits": (lambda base, _: (Setup(base, kv_bits=4), Setup(base, kv_bits=8)), "other root (kv_bits, layout)"),
    "an adapter": (
        lambda base, tmp: (Setup(base), Setup(base, adapter=save_adapter(tmp / "lora", CONFIG))),
        "other root (adapter)",
    ),
    "another adapter": (
        lambda base, tmp: (
            Setup(base, adapter=save_adapter(tmp / "lora", CONFIG)),
            Setup(base, adapter=save_adapter(tmp / "other", CONFIG, seed=1)),
        ),
        "other root (adapter)",
    ),
    "the adapter's scale": (
        lambda base, tmp: (
            Setup(base, adapter=save_adapter(tmp / "lora", CONFIG)),
            Setup(base, adapter=save_adapter(tmp / "other", CONFIG, scale=10.0)),
        ),
        "other root (adapter)",
    ),
    "a rope setting": (
        lambda base, tmp: (Setup(base), Setup(with_config(base, tmp, rope_theta=20000.0))),
        "other root (rope)",
    ),
    "the window": (
        lambda base, tmp: (Setup(base), Setup(with_config(base, tmp, sliding_window=48))),
        "other root (config)",
    ),
    "the tokenizer": (lambda base, tmp: (Setup(base), Setup(other_tokenizer(base, tmp))), "other root (tokenizer)"),
    "a salt": (lambda base, _: (Setup(base), Setup(base, salt="alice")), "other salt"),
    "another salt": (lambda base, _: (Setup(base, salt="alice"), Setup(base, salt="bob")), "other salt"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_root_finds_nothing_in_either_tier_and_the_reason_says_what_differs(
    change: str, base: Path, tmp_path: Path
) -> None:
    make, reason = CHANGES[change]
    one, other = make(base, tmp_path)
    store = open_store(tmp_path / "blocks")
    assert ask(one, store)[:2] == (0, 0)
    assert look(other, store) == (0, 0, reason)
    forget_hot(store)
    assert look(other, store) == (0, 0, reason)
    store.close()
    store = open_store(tmp_path / "blocks")
    assert ask(other, store) == (0, 0, reason)
    assert look(other, store) == (199, 0, None)
    assert look(one, store)[:2] == (0, 192)
    store.close()
    store = open_store(tmp_path / "blocks")
    assert (look(one, store)[:2], look(other, store)[:2]) == ((0, 192), (0, 192))
    store.close()


def test_a_salt_spelled_like_another_part_of_the_root_reaches_nobody_elses_blocks(base: Path, tmp_path: Path) -> None:
    store = open_store(tmp_path / "blocks")
    with_adapter = Setup(base, adapter=save_adapter(tmp_path / "lora", CONFIG))
    cache, _ = with_adapter.bind(store)
    assert ask(with_adapter, store)[:2] == (0, 0)
    for salt in (cache.fields["adapter"], "adapter", cache.root().hex(), "none"):
        assert look(Setup(base, salt=salt), store)[:2] == (0, 0)
        assert look(Setup(base, adapter=with_adapter.adapter, salt=salt), store)[:2] == (0, 0)
    assert cache.root("ab") != cache.root("a")
    assert len({cache.root(salt) for salt in ("", "a", "ab", "b", "none")}) == 5
    store.close()


# what does not


def moved(base: Path, tmp_path: Path) -> Setup:
    directory = Path(shutil.copytree(base, tmp_path / "somewhere" / "else"))
    os.utime(directory / "model.safetensors", (1, 1))
    return Setup(directory)


def respelled(base: Path, tmp_path: Path) -> Setup:
    directory = copied(base, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config = dict(reversed(config.items())) | {"_name_or_path": "/home/me", "transformers_version": "9.9"}
    (directory / "config.json").write_text(json.dumps(config, indent=7))
    return Setup(directory)


SAME: dict[str, Callable[[Path, Path], Setup]] = {
    "another directory and time": moved,
    "a relative path": lambda base, _: Setup(Path(os.path.relpath(base))),
    "a config in another order": respelled,
    "another context size": lambda base, tmp: Setup(with_config(base, tmp, max_position_embeddings=8192)),
    "another end of reply": lambda base, tmp: Setup(with_config(base, tmp, eos_token_id=[1, 2])),
}


@pytest.mark.parametrize("change", SAME)
def test_the_same_model_is_found_again_whole(change: str, base: Path, tmp_path: Path) -> None:
    store = open_store(tmp_path / "blocks")
    ask(Setup(base), store)
    assert look(SAME[change](base, tmp_path), store)[:2] == (199, 0)
    forget_hot(store)
    assert look(SAME[change](base, tmp_path / "again"), store)[:2] == (0, 192)
    store.close()


def test_a_cache_root_can_be_moved_and_its_budgets_and_the_environment_changed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "here" / "blocks")
    ask(Setup(base), store)
    store.close()
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.setenv("PORT", "1234")
    monkeypatch.setenv("LANG", "tr_TR.UTF-8")
    monkeypatch.chdir(tmp_path)
    store = open_store(tmp_path / "there" / "blocks", hot_bytes=0, cold_bytes=GIB // 2)
    assert look(Setup(base), store)[:2] == (0, 192)
    store.check_integrity()
    store.close()


ELSEWHERE = """
import sys
from pathlib import Path
from test_identity import Setup, look, open_store

store = open_store(Path(sys.argv[2]))
print(*look(Setup(Path(sys.argv[1])), store)[:2], Setup(Path(sys.argv[1])).bind(store)[0].root().hex())
store.close()
"""


def test_another_process_with_another_hash_seed_and_directory_finds_everything(base: Path, tmp_path: Path) -> None:
    store = open_store(tmp_path / "blocks")
    ask(Setup(base), store)
    root = Setup(base).bind(store)[0].root().hex()
    store.close()
    for seed, folder in (("0", "/"), ("1", str(tmp_path))):
        found = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, str(base), str(tmp_path / "blocks")],
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'models'}"},
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert found.stdout.split() == ["0", "192", root]


# the fields one by one


@remember
def tiny() -> nn.Module:
    return build_tiny(tiny_llama())


def with_lora(scale: float = 20.0) -> nn.Module:
    mx.random.seed(0)
    module = build_tiny(tiny_llama())
    linear_to_lora_layers(module, 4, {"rank": 2, "scale": scale, "dropout": 0.0})
    return module


def changed_fields(one: dict[str, str], other: dict[str, str]) -> list[str]:
    assert one.keys() == other.keys()
    return [key for key in one if one[key] != other[key]]


def test_a_model_in_memory_is_known_by_every_weight_and_setting() -> None:
    base = module_fields(tiny())
    assert base == module_fields(build_tiny(tiny_llama()))
    assert base == module_fields(build_tiny(tiny_llama() | {"max_position_embeddings": 99}))
    assert changed_fields(base, module_fields(build_tiny(tiny_llama(), seed=1))) == ["weights"]
    assert changed_fields(base, module_fields(build_tiny(tiny_llama() | {"rope_theta": 5e4}))) == ["rope"]
    assert changed_fields(base, module_fields(build_tiny(tiny_llama() | {"rms_norm_eps": 1e-6}))) == ["config"]
    one = build_tiny(tiny_llama())
    one.model.layers[2].self_attn.v_proj.weight[3, 4] += 1e-6
    assert changed_fields(base, module_fields(one)) == ["weights"]
    half = build_tiny(tiny_llama())
    half.set_dtype(mx.float16)
    assert changed_fields(base, module_fields(half)) == ["weights"]
    quantised = build_tiny(tiny_llama())
    nn.quantize(quantised, group_size=32, bits=8)
    assert changed_fields(base, module_fields(quantised)) == ["weights", "quantization"]


def test_a_lora_in_memory_is_known_by_its_matrices_and_its_scale() -> None:
    lora = module_fields(with_lora())
    assert lora == module_fields(with_lora())
    assert changed_fields(module_fields(tiny()), lora) == ["weights", "adapter"]
    assert changed_fields(lora, module_fields(with_lora(scale=10.0))) == ["adapter"]
    other = with_lora()
    other.model.layers[0].self_attn.q_proj.lora_b += 0.01
    assert changed_fields(lora, module_fields(other)) == ["weights"]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"partial_rotary_factor": 0.5},
        {"text_config": {"rope_theta": 5e5}},
        {"rope_theta": 1e4, "text_config": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "text_config": {"rope_theta": 1e4}},
    ],
)
def test_every_rope_setting_at_either_level_is_in_the_rope_field(rope: dict[str, Any]) -> None:
    others = [{}, {"rope_theta": 1e4}, {"text_config": {"rope_theta": 1e4}}]
    assert all(rope_text(tiny_llama() | rope) != rope_text(tiny_llama() | other) for other in others)
    assert rope_text(tiny_llama() | rope) == rope_text(dict(reversed((tiny_llama() | rope).items())))


def test_a_config_counts_but_for_what_cannot_reach_the_cache() -> None:
    base = config_digest(tiny_llama())
    for key in ("_name_or_path", "transformers_version", "use_cache", "torch_dtype", "eos_token_id", "architectures"):
        assert config_digest(tiny_llama() | {key: "other"}) == base, key
    for key in ("hidden_size", "num_hidden_layers", "sliding_window", "layer_types", "attention_bias", "unknown_key"):
        assert config_digest(tiny_llama() | {key: 7}) != base, key
    assert config_digest({"text_config": {"hidden_size": 1}}) != config_digest({"text_config": {"hidden_size": 2}})


def test_the_context_counts_only_where_rope_depends_on_it() -> None:
    scaled = tiny_llama() | {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    for config, differs in ((tiny_llama(), False), (tiny_deepseek_v3(), False), (scaled, True)):
        longer = config | {"max_position_embeddings": 8192}
        assert (config_digest(config) != config_digest(longer)) == differs


def test_a_tokenizer_is_known_whoever_wraps_it_and_however_it_was_used(base: Path, tmp_path: Path) -> None:
    wrapped = load(str(base)).tokenizer
    digest = tokenizer_digest(wrapped)
    assert tokenizer_digest(None) == "none" != digest
    assert tokenizer_digest(wrapped._tokenizer) == digest
    wrapped._tokenizer("some text", truncation=True, max_length=3)
    assert tokenizer_digest(wrapped) == digest
    for change in (with_template, with_new_token):
        assert tokenizer_digest(load(str(change(base, tmp_path))).tokenizer) != digest
        shutil.rmtree(tmp_path / "changed")


def with_template(base: Path, tmp_path: Path) -> Path:
    directory = copied(base, tmp_path)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ messages }}"}))
    return directory


def with_new_token(base: Path, tmp_path: Path) -> Path:
    directory = copied(base, tmp_path)
    content = json.loads((directory / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 100, "content": "<|new|>"})
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def test_no_two_sets_of_fields_share_a_root() -> None:
    sets = [{"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": "b"}, {}, {"": "abc"}, {"a": "b\0c"}]
    assert len({root_name(fields) for fields in sets}) == len(sets)


# digests of files, remembered


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are really read, as they are."""
    read: list[str] = []
    real = fingerprint._file_digest

    def counting(path: Path) -> str:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(fingerprint, "_file_digest", counting)
    return read


def test_an_unchanged_file_is_read_once_and_a_changed_one_again(tmp_path: Path, read_files: list[str]) -> None:
    files, known = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"], tmp_path / "known.json"
    for path in files:
        path.write_bytes(b"weights of " + path.name.encode())
    first = files_digest(files, known=known)
    assert files_digest(files, known=known) == first
    assert read_files == ["model-1.safetensors", "model-2.safetensors"]
    files[1].write_bytes(b"WEIGHTS of " + files[1].name.encode())
    os.utime(files[1], (2, 2))
    second = files_digest(files, known=known)
    assert second != first
    assert read_files[2:] == ["model-2.safetensors"]
    assert files_digest(files, known=known, paranoid=True) == second
    assert files_digest(reversed(files)) == second
    assert len(read_files) == 7


def test_paranoid_notices_a_change_that_keeps_size_and_time(tmp_path: Path) -> None:
    path, known = tmp_path / "model.safetensors", tmp_path / "known.json"
    path.write_bytes(b"abc")
    os.utime(path, (1, 1))
    before = files_digest([path], known=known)
    path.write_bytes(b"abd")
    os.utime(path, (1, 1))
    assert files_digest([path], known=known) == before
    assert files_digest([path], known=known, paranoid=True) != before
    assert files_digest([path], known=known) != before, "and what it found is remembered"


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"null", b"\xff\xfe\x00", b'{"a": {"b": 1}}'])
def test_damaged_memory_of_digests_is_ignored_and_written_anew(
    content: bytes, tmp_path: Path, read_files: list[str]
) -> None:
    path, known = tmp_path / "model.safetensors", tmp_path / "known.json"
    path.write_bytes(b"abc")
    digest = files_digest([path])
    known.write_bytes(content)
    assert files_digest([path], known=known) == digest
    assert files_digest([path], known=known) == digest
    assert len(read_files) == 2


def test_digests_that_cannot_be_remembered_cost_time_only(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abc")
    assert files_digest([path], known=path / "below a file" / "known.json") == files_digest([path])
    assert sorted(tmp_path.iterdir()) == [path]


def test_the_loader_remembers_digests_beside_the_cache_and_not_in_the_model(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_files: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = sorted(base.iterdir())
    first = load(str(base))
    assert load(str(base)).fields == first.fields
    assert read_files == ["model.safetensors"]
    assert sorted(base.iterdir()) == before
    (remembered,) = (tmp_path / "cache").rglob("weight-digests.json")
    remembered.write_text("{")
    assert load(str(base)).fields == first.fields
    assert load(str(base), paranoid=True).fields == first.fields
    assert len(read_files) == 3


def test_a_draft_model_beside_its_target_has_a_root_of_its_own_on_one_store(base: Path, tmp_path: Path) -> None:
    draft = save_model(tmp_path / "draft", CONFIG | {"num_hidden_layers": 2})
    store = open_store(tmp_path / "blocks")
    target_root, draft_root = (Setup(directory).bind(store)[0].root() for directory in (base, draft))
    assert target_root != draft_root
    for setup in (Setup(base), Setup(draft)):  # both over the same tokens, as a speculative decoder runs them
        assert ask(setup, store)[:2] == (0, 0)
    for setup in (Setup(base), Setup(draft)):
        assert ask(setup, store)[:2] == (len(PROMPT) - 1, 0)
    store.check_integrity()
    store.close()
