"""The fields of a root: everything that makes two KV caches incompatible, and nothing else.

A field too few serves wrong text in silence; one too many finds nothing after a restart. Context size, port, path,
batch size and free memory are never among them. `BlockCache` adds the layout (every cache's kind, heads, size and
dtype), the KV bits and the salt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import xxhash
from mlx.utils import tree_flatten

FORMAT = "1"
NOT_IDENTITY = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype", "architectures",
     "eos_token_id", "bos_token_id", "pad_token_id", "max_length", "auto_map", "task_specific_params"}
)  # fmt: skip
"""Config keys that do not reach K and V. What they might change (the dtype) is in the layout."""
SCALED_ROPE = ("rope_scaling", "rope_parameters")


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of what a config says about the computation, RoPE apart (`rope_text` is a field of its own).

    The maximum context only counts where RoPE depends on it.
    """
    kept = {key: value for key, value in config.items() if key not in NOT_IDENTITY and not _is_rope(key)}
    if isinstance(kept.get("text_config"), Mapping):
        kept["text_config"] = {key: value for key, value in kept["text_config"].items() if not _is_rope(key)}
    if not any(config.get(key) for key in SCALED_ROPE):
        kept.pop("max_position_embeddings", None)
    return sha256(_canonical(kept).encode()).hexdigest()


def rope_text(config: Mapping[str, Any]) -> str:
    """All RoPE settings of a config, as a person can read them who compares two roots."""
    found = {key: value for key, value in config.items() if _is_rope(key)}
    if isinstance(config.get("text_config"), Mapping):
        found["text_config"] = {key: value for key, value in config["text_config"].items() if _is_rope(key)}
    return _canonical(found)


def _is_rope(key: str) -> bool:
    return "rope" in key or "rotary" in key


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def module_fields(module: nn.Module, tokenizer: object = None) -> dict[str, str]:
    """Fields of a model that is in memory, whoever loaded it: every parameter's name, shape, dtype and bytes.

    Cost: about 0.1 s a GiB; evaluates the parameters.
    """
    args = getattr(module, "args", None)
    config = asdict(args) if is_dataclass(args) and not isinstance(args, type) else {}
    return {
        "format": FORMAT,
        "architecture": type(module).__module__,
        "weights": parameters_digest(tree_flatten(module.parameters())),
        "quantization": quantization_text(module),
        "config": config_digest(config),
        "rope": rope_text(config),
        "adapter": adapter_text(module),
        "tokenizer": tokenizer_digest(tokenizer),
    }


def adapter_text(module: nn.Module) -> str:
    """What a LoRA in memory has beside its parameters: the scale of every layer it is in, as a digest."""
    found = [f"{path} {layer.scale}" for path, layer in module.named_modules() if "lora_a" in layer]
    return sha256("\n".join(sorted(found)).encode()).hexdigest() if found else "none"


def parameters_digest(parameters: Iterable[tuple[str, mx.array]]) -> str:
    """Digest of named arrays, in order of name."""
    digest = sha256()
    for name, array in sorted(parameters):
        whole = mx.contiguous(array)
        mx.eval(whole)
        data = xxhash.xxh3_128_hexdigest(memoryview(whole).cast("B")) if whole.nbytes else ""
        digest.update(f"{name} {whole.shape} {whole.dtype} {data}\n".encode())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: object) -> str:
    """Digest of what turns text into ids: vocabulary, merges, added tokens and the chat template.

    The same whether mlx-lm wrapped the tokenizer of transformers or not, and whatever it was used for before.
    """
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        text = json.dumps(sorted(tokenizer.get_vocab().items()))  # type: ignore[attr-defined]
    else:
        whole = backend.to_str()
        text = whole[whole.index('"added_tokens"') :]  # before it stand truncation and padding, which calls leave there
    template = getattr(tokenizer, "chat_template", None)
    return sha256(f"{len(text)}:{text}{template}".encode()).hexdigest()


def files_digest(files: Iterable[Path], *, known: Path | None = None, paranoid: bool = False) -> str:
    """Digest of weight files: each one's bytes, by order of name, wherever they lie.

    Args:
        known: JSON file with digests of files that did not change since (same device, inode, size and time).
        paranoid: read every file again.
    """
    remembered = {} if known is None or paranoid else _read_known(known)
    digests = []
    for path in sorted(files, key=lambda path: path.name):
        status = path.stat()
        key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
        if key not in remembered:
            remembered[key] = _file_digest(path)
        digests.append(f"{path.name} {remembered[key]}")
    if known is not None:
        _write_known(known, remembered)
    return sha256("\n".join(digests).encode()).hexdigest()


def quantization_text(module: nn.Module) -> str:
    """Bits and group of every quantised layer, as a digest when there is one."""
    found = [
        f"{path} {layer.bits} {layer.group_size} {getattr(layer, 'mode', 'affine')}"
        for path, layer in module.named_modules()
        if hasattr(layer, "bits") and hasattr(layer, "group_size")
    ]
    return sha256("\n".join(sorted(found)).encode()).hexdigest() if found else "none"


def _file_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(8 << 20):
            digest.update(chunk)
    return str(digest.hexdigest())


def _read_known(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in known.items()} if isinstance(known, dict) else {}


def _write_known(path: Path, known: Mapping[str, str]) -> None:
    """Remember digests; a cache that cannot be written costs time, nothing else."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(known), encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        return
