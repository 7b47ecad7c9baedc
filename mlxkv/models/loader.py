"""A model from wherever it is: an mlx-lm directory, a hub id, a GGUF file, or the demo model by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxkv.core.device import is_device_error
from mlxkv.core.errors import ModelError, ModelNotFoundError
from mlxkv.core.platform import default_cache_dir, keep_open_files_limit
from mlxkv.core.units import MIB
from mlxkv.models.computing import LOADING, computing
from mlxkv.models.detokenizer import keep_every_byte
from mlxkv.models.fingerprint import (
    FORMAT,
    config_digest,
    files_digest,
    quantization_text,
    rope_text,
    tokenizer_digest,
)
from mlxkv.models.gguf import find_demo_gguf, load_gguf, tokenizer_from_gguf
from mlxkv.sizing.config import context_window, read_config

with keep_open_files_limit():
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from mlx_lm.utils import _download, load_adapters, load_model, load_tokenizer

DEMO = "smollm2-135m"
KEPT_FREED_BYTES = 256 * MIB
_UNREADABLE = (ValueError, KeyError, TypeError, RuntimeError, AttributeError, OSError)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `fields` are its root's fields; `context_tokens` is None when its config does not say."""

    name: str
    module: nn.Module
    tokenizer: TokenizerWrapper
    config: Mapping[str, Any]
    fields: Mapping[str, str]
    context_tokens: int | None


def load(model: str, *, adapter: str | Path | None = None, paranoid: bool = False) -> LoadedModel:
    """Load a model by directory, hub id, `.gguf` file, or `smollm2-135m`.

    On a CPU everything is float32 (halves are many times slower there), and a GGUF is unpacked; on Metal and CUDA the
    weights stay as they are published.

    Args:
        adapter: directory of an mlx-lm LoRA adapter; its content becomes part of the root.
        paranoid: digest the weight files again even when they look unchanged.

    Raises:
        ModelNotFoundError: nothing of that name here, and no hub that knows it.
        ModelError: something is there and cannot be run; says what.
        DeviceError: the GPU failed, most likely for want of memory.

    Cost: reads the weights once, and once more the first time for their digest.
    """
    keep_freed_memory()
    with computing(LOADING):
        return _load(model, adapter, paranoid=paranoid)


def _load(model: str, adapter: str | Path | None, *, paranoid: bool) -> LoadedModel:
    path = Path(model).expanduser()
    if model.lower() == DEMO:
        return _from_gguf(DEMO, find_demo_gguf(), paranoid=paranoid)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(f"there is no file {model}; check the path.")
        return _from_gguf(path.stem, path, paranoid=paranoid)
    if path.is_dir():
        return _from_directory(path.resolve().name, path, adapter, paranoid=paranoid)
    if path.exists():
        raise ModelError(f"{model} is a file; give the directory it is in, or a .gguf file.")
    return _from_directory(model.rpartition("/")[2], _from_hub(model), adapter, paranoid=paranoid)


def tokenizer_of(model: str) -> TokenizerWrapper:
    """Only the tokenizer of what `load` would load; its weights are not read.

    Raises:
        ModelNotFoundError, ModelError: as `load`.
    """
    path = Path(model).expanduser()
    if model.lower() == DEMO:
        return tokenizer_from_gguf(find_demo_gguf())
    if path.is_file() and path.suffix.lower() == ".gguf":
        return tokenizer_from_gguf(path)
    try:
        return keep_every_byte(load_tokenizer(path if path.is_dir() else _from_hub(model)))
    except _UNREADABLE as error:
        raise ModelError(f"mlx-lm cannot load the tokenizer of {model} ({error}); is the download complete?") from error


def keep_freed_memory() -> None:
    """On a CPU, let MLX keep `KEPT_FREED_BYTES` of what is freed, to use it again; `load` does so.

    MLX keeps 32 MiB there (all of it on a GPU). A sequence is larger, and new pages cost more than filling them:
    restoring 45 MiB took 35 ms without and 16 ms with it.
    """
    if on_cpu():
        before = mx.set_cache_limit(KEPT_FREED_BYTES)
        mx.set_cache_limit(max(before, KEPT_FREED_BYTES))


def on_cpu() -> bool:
    """Whether MLX computes on the CPU here."""
    return bool(mx.default_device() == mx.cpu)


def _from_gguf(name: str, path: Path, *, paranoid: bool) -> LoadedModel:
    cpu = on_cpu()
    module, config = load_gguf(path, dequantize=cpu, dtype=mx.float32 if cpu else mx.float16)
    tokenizer = tokenizer_from_gguf(path)
    fields = _fields(module, config, [path], tokenizer, None, paranoid=paranoid)
    return LoadedModel(name, module, tokenizer, config, fields, _context(config))


def _from_directory(name: str, path: Path, adapter: str | Path | None, *, paranoid: bool) -> LoadedModel:
    checked = read_config(path / "config.json")
    shards = _shards(path)
    try:
        module, config = load_model(path, lazy=False)
        tokenizer = keep_every_byte(load_tokenizer(path, eos_token_ids=config.get("eos_token_id")))
        if adapter is not None:
            module = load_adapters(module, str(adapter))
    except _UNREADABLE as error:
        if is_device_error(error):
            raise
        raise ModelError(
            f"mlx-lm cannot load {path} ({_first_line(error)}); check that the download is complete."
        ) from error
    module.eval()
    if on_cpu():
        module.set_dtype(mx.float32)
        mx.eval(module.parameters())
    fields = _fields(module, config, shards, tokenizer, adapter, paranoid=paranoid)
    return LoadedModel(name, module, tokenizer, config, fields, _context(checked))


def _shards(path: Path) -> list[Path]:
    """The weight files of a model directory, those that its index names included."""
    found = sorted(path.glob("model*.safetensors"))
    if not found:
        raise ModelError(f"{path} has a config.json and no model*.safetensors; download its weights too.")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except _UNREADABLE as error:
            raise ModelError(f"{index} cannot be read ({_first_line(error)}); download it again.") from error
        missing = sorted(named - {shard.name for shard in found})
        if missing:
            raise ModelError(f"{path} lacks {missing[0]} ({len(missing)} of {len(named)} files); download it too.")
    return found


def _first_line(error: Exception) -> str:
    """What an error says, in one line; its type when it says nothing."""
    return str(error).strip().partition("\n")[0].rstrip(" :") or type(error).__name__


def _from_hub(model: str) -> Path:
    if model.count("/") != 1:
        raise ModelNotFoundError(
            f"no model {model!r} here; give a directory, a .gguf file, a hub id such as"
            f" mlx-community/Qwen2.5-0.5B-Instruct-4bit, or {DEMO}."
        )
    try:
        return Path(_download(model))
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"no directory {model!r}, and the hub did not give it ({_first_line(error)});"
            " check the name and the network."
        ) from error


def _fields(
    module: nn.Module,
    config: Mapping[str, Any],
    weights: list[Path],
    tokenizer: TokenizerWrapper,
    adapter: str | Path | None,
    *,
    paranoid: bool,
) -> dict[str, str]:
    known = default_cache_dir().parent / "weight-digests.json"
    return {
        "format": FORMAT,
        "architecture": type(module).__module__,
        "weights": files_digest(weights, known=known, paranoid=paranoid),
        "quantization": quantization_text(module),
        "config": config_digest(config),
        "rope": rope_text(config),
        "adapter": "none" if adapter is None else files_digest(_adapter_files(adapter), known=known, paranoid=paranoid),
        "tokenizer": tokenizer_digest(tokenizer),
    }


def _adapter_files(adapter: str | Path) -> list[Path]:
    return [path for path in sorted(Path(adapter).iterdir()) if path.suffix in (".safetensors", ".json")]


def _context(config: Mapping[str, Any]) -> int | None:
    window = context_window(config)
    return None if window is None else window.scaled_tokens
