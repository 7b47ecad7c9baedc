"""A GGUF file's header, and the `config.json` that it stands for. No weight is read, and MLX is not imported.

Nothing in the file is believed before it is checked: every count and length is held against the bytes that are left,
and the tensor table must be exactly the one the config implies. What mlxkv cannot run as the file means it (a kind MLX
would silently cast, a key that changes the arithmetic) is a `ModelError` that names it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from mlxkv.core.errors import ModelError, ModelNotFoundError

# The largest vocabularies (262,144 tokens with merges) need 20 MB of header.
_MAX_HEADER_BYTES = 64 * 2**20
_MAX_DIMENSION = 2**31 - 1

GROUP = 32
T = TypeVar("T")
N = TypeVar("N", int, float)


# --- header ---------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """How one tensor kind is laid out: `bits` per weight once MLX has read it, 0 when it is not quantised."""

    name: str
    block: int
    block_bytes: int
    bits: int


KINDS = {
    0: _Kind("F32", 1, 4, 0),
    1: _Kind("F16", 1, 2, 0),
    2: _Kind("Q4_0", GROUP, 18, 4),
    3: _Kind("Q4_1", GROUP, 20, 4),
    8: _Kind("Q8_0", GROUP, 34, 8),
}
REFUSED_KINDS = {
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
            raise unusable(self.path, f"the key {key} is missing")
        if type(value) is not kind:
            raise unusable(self.path, f"the key {key} is a {type(value).__name__} where a {kind.__name__} is expected")
        return value


def damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"{path.name} is not a whole GGUF file ({_plain(what)}); download it again.")


def unusable(path: Path, what: str) -> ModelError:
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
            raise damaged(self.path, f"a field of {count:,} B where {self.left:,} B are left")
        self.left -= count
        data = self._file.read(count)
        if len(data) != count:
            raise damaged(self.path, "it became shorter while it was read")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        data = self.take(self.number("Q"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise damaged(self.path, "a text is not UTF-8") from error

    def value(self) -> Any:
        """One metadata value after its type; an array of arrays is refused, as llama.cpp does."""
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise damaged(self.path, f"a value of the unknown type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            if count * 8 > self.left:
                raise damaged(self.path, f"{count:,} texts where {self.left:,} B are left")
            return [self.string() for _ in range(count)]
        if kind in _NUMBERS:
            code = _NUMBERS[kind].replace("?", "B")
            return array(code, self.take(count * struct.calcsize("<" + code)))
        raise damaged(self.path, f"an array of the unknown type {kind}")


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
        raise damaged(path, "it does not start with GGUF")
    version = reader.number("I")
    if version not in (2, 3):
        raise damaged(path, f"version {version}, and only 2 and 3 are known")
    tensor_count, key_count = reader.number("Q"), reader.number("Q")

    values: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.string()
        if key in values:
            raise damaged(path, f"the key {key} appears twice")
        values[key] = reader.value()

    tensors: dict[str, TensorInfo] = {}
    ends = []
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment % 8:
        raise damaged(path, f"an alignment of {alignment!r}")
    for _ in range(tensor_count):
        name = reader.string()
        rank = reader.number("I")
        if not 1 <= rank <= 4:
            raise damaged(path, f"tensor {name} has {rank:,} dimensions")
        dimensions = [reader.number("Q") for _ in range(rank)]
        info = TensorInfo(tuple(reversed(dimensions)), reader.number("I"))
        offset = reader.number("Q")
        if name in tensors or offset % alignment or not all(0 < n <= _MAX_DIMENSION for n in dimensions):
            raise damaged(path, f"tensor {name} is listed twice, not aligned or of an impossible shape")
        tensors[name] = info
        if info.kind in KINDS:
            ends.append(offset + _tensor_bytes(path, name, info))

    expected = -(-file.tell() // alignment) * alignment + max(ends, default=0)
    if ends and expected > size:
        raise damaged(path, f"{expected:,} B expected, {size:,} B there")
    return Header(path, values, tensors)


def _tensor_bytes(path: Path, name: str, info: TensorInfo) -> int:
    kind = KINDS[info.kind]
    if info.shape[-1] % kind.block:
        raise damaged(path, f"tensor {name} has rows of {info.shape[-1]} in blocks of {kind.block}")
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
    return config_of(read_header(path))


def config_of(header: Header) -> dict[str, Any]:
    family = header.get("general.architecture", str)
    if family not in _FAMILY_LAYER:
        raise unusable(header.path, f"its architecture is {family}, and only {', '.join(_FAMILY_LAYER)} are known")
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{header.path.name} is one part of several; join them with `llama-gguf-split --merge`.")
    for key in header.metadata:
        if key.startswith(f"{family}.") and key.removeprefix(f"{family}.") not in _KNOWN_KEYS:
            raise unusable(header.path, f"the key {key} is not supported")

    def count(key: str, default: int | None = None) -> int:
        return _positive(header, f"{family}.{key}", int, default)

    hidden, heads, layers = count("embedding_length"), count("attention.head_count"), count("block_count")
    kv_heads, head_dim = count("attention.head_count_kv", heads), count("attention.key_length", hidden // heads or None)
    same = {head_dim, count("attention.value_length", head_dim), count("rope.dimension_count", head_dim)}
    if heads % kv_heads or head_dim % 2 or same != {head_dim}:
        raise unusable(header.path, f"{heads} heads, {kv_heads} KV heads and {head_dim} dimensions do not go together")
    if layers > len(header.tensors):
        raise damaged(header.path, f"{layers:,} layers and {len(header.tensors):,} tensors")
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
        raise unusable(header.path, f"qwen2 with {heads} heads of {head_dim} and a hidden size of {hidden}")

    if len(header.get("tokenizer.ggml.tokens", list, [])) > config["vocab_size"]:
        raise damaged(header.path, f"it has more tokens than the {config['vocab_size']:,} of its embedding")

    config |= marks_of(header)
    if quantization := _quantization(header, dict(tensor_names(header, config))):
        config["quantization"] = quantization
    return config


def _positive(header: Header, key: str, kind: type[N], default: N | None = None) -> N:
    value = header.get(key, kind, default)
    if not 0 < value < inf:
        raise unusable(header.path, f"{key} is {value}")
    return value


def _rope_scaling(header: Header, key: str) -> dict[str, Any] | None:
    scaling = header.get(f"{key}.type", str, "none")
    if scaling == "none":
        return None
    if scaling not in ("linear", "yarn"):
        raise unusable(header.path, f"the key {key}.type is {scaling}, which is not supported")
    entry: dict[str, Any] = {"type": scaling, "factor": _positive(header, f"{key}.factor", float)}
    if scaling == "yarn":
        entry["original_max_position_embeddings"] = _positive(header, f"{key}.original_context_length", int)
    return entry


def marks_of(header: Header) -> dict[str, Any]:
    """`bos_token_id`, and in `eos_token_id` every token that ends a turn; what the file does not name is left out."""
    ids = {name: header.get(f"tokenizer.ggml.{name}_token_id", int, -1) for name in ("bos", "eos", "eot", "eom")}
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] >= 0))
    marks: dict[str, Any] = {} if ids["bos"] < 0 else {"bos_token_id": ids["bos"]}
    return marks | ({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {})


def tensor_names(header: Header, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
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
            raise unusable(header.path, f"tensor {name} has no place in a {config['model_type']} model")
    for name, (target, letters) in table.items():
        if name not in header.tensors:
            raise unusable(header.path, f"tensor {name} is missing")
        info, expected = header.tensors[name], tuple(sizes[letter] for letter in letters)
        if info.kind not in KINDS or (KINDS[info.kind].bits and len(expected) == 1):
            found = KINDS[info.kind].name if info.kind in KINDS else REFUSED_KINDS.get(info.kind, str(info.kind))
            known = ", ".join(kind.name for kind in KINDS.values() if len(expected) == 2 or not kind.bits)
            raise unusable(header.path, f"tensor {name} is of kind {found}, and only {known} are read as they are")
        if info.shape != expected:
            raise unusable(header.path, f"tensor {name} has the shape {info.shape} where the config says {expected}")
        yield name, target


def _quantization(header: Header, names: dict[str, str]) -> dict[str, Any]:
    """mlx-lm's `quantization` entry, empty when every matrix is dense."""
    bits = {
        target.removesuffix(".weight"): KINDS[header.tensors[name].kind].bits
        for name, target in names.items()
        if len(header.tensors[name].shape) == 2
    }
    packed = Counter(b for b in bits.values() if b)
    if not packed:
        return {}
    usual = packed.most_common(1)[0][0]
    rest = {path: {"group_size": GROUP, "bits": b} if b else False for path, b in bits.items() if b != usual}
    return {"group_size": GROUP, "bits": usual, **rest}
