"""A model's config.json: read, checked and brought into the one shape the rest of mlxkv expects.

Nothing here imports MLX. A config that cannot be used is one `ModelError` whose sentence names the key.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from mlxkv.core.errors import ModelError
from mlxkv.core.units import MIB, format_bytes

Config = dict[str, Any]

_MAX_CONFIG_BYTES = 8 * MIB
_MAX_LAYERS = 4096
_MAX_COUNT = 2**31 - 1
_COUNTS = (
    "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head",
    "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
)  # fmt: skip
_LAYER_COUNTS = ("num_hidden_layers", "n_layer")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_MAX_CONTEXT_TOKENS = 10**9
_TAGGED_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


@dataclass(frozen=True)
class ContextWindow:
    """The longest context a config states.

    Attributes:
        native_tokens: what the model was trained on.
        scaled_tokens: what its rope scaling stretches that to; equal where nothing is scaled.
    """

    native_tokens: int
    scaled_tokens: int


def read_config(path: Path) -> Config:
    """The checked config of a model directory or of one JSON file.

    Raises `ModelError` when there is none, when it is not JSON, or when a key cannot be used.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        size_bytes = file.stat().st_size
        if size_bytes > _MAX_CONFIG_BYTES:
            raise ModelError(
                f"{file} is {format_bytes(size_bytes)} long, over {format_bytes(_MAX_CONFIG_BYTES)}: not a config.json."
            )
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"{file} does not exist; give a model directory that holds a config.json.") from error
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from error
    return check_config(parse_config(data, source=str(file)), source=str(file))


def parse_config(data: bytes, *, source: str) -> Config:
    """The JSON object in `data` (UTF-8, with or without a byte order mark); `source` names it in errors.

    >>> parse_config(b'{"model_type": "llama"}', source="config.json")
    {'model_type': 'llama'}
    """
    try:
        config = json.loads(data.decode("utf-8-sig"), object_hook=_untagged)
    except UnicodeDecodeError as error:
        raise ModelError(f"{source} is not UTF-8 text (byte {error.start}); save it as UTF-8.") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.") from error
    except RecursionError as error:
        raise ModelError(f"{source} is nested too deeply to be a config.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{source} holds a JSON {_json_kind(config)}; a config is an object with a model_type key.")
    return config


def check_config(config: Mapping[str, Any], *, source: str = "config.json") -> Config:
    """A deep copy of `config` with `model_type` at the top and every count known to be usable.

    Counts may be absent or null, or lists with one number a layer; what the model class needs beyond that is
    checked where the class is built.

    Raises `ModelError` for a missing or unusable key, naming it.
    """
    checked = copy.deepcopy(dict(config))
    for key in ("text_config", "quantization", "quantization_config"):
        if checked.get(key) is not None and not isinstance(checked[key], dict):
            raise ModelError(f"{source}: {key} is a {_json_kind(checked[key])}; it must be an object.")
    nested = checked.get("text_config")
    if checked.get("model_type") is None and nested is not None:
        checked["model_type"] = nested.get("model_type")
    model_type = checked.get("model_type")
    if model_type is None:
        raise ModelError(f"{source} has no model_type key, so nobody can say which model it describes.")
    if not isinstance(model_type, str):
        raise ModelError(f"{source}: model_type is {model_type!r}; it must be a string such as 'llama'.")
    for level in (checked, nested or {}):
        for key in _COUNTS:
            _check_count(level.get(key), key, source)
    return checked


def text_level(config: Mapping[str, Any]) -> Config:
    """`config` with its `text_config` laid over it: where both name a key, the inner value holds.

    `model_type` stays the outer one, because that is what names mlx-lm's class.

    >>> text_level({"model_type": "gemma3", "head_dim": 1, "text_config": {"head_dim": 256}})["head_dim"]
    256
    """
    inner = config.get("text_config") or {}
    return {**config, **inner, "model_type": config["model_type"]}


def context_window(config: Mapping[str, Any]) -> ContextWindow | None:
    """The context the config states, or None where it states none.

    A rope scaling with `original_max_position_embeddings` gives the native length. The scaled one is the stated length
    where that is longer (Llama 3, DeepSeek), else native times factor (Qwen states the native length).

    >>> yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    >>> context_window({"model_type": "qwen2", "max_position_embeddings": 32768, "rope_scaling": yarn})
    ContextWindow(native_tokens=32768, scaled_tokens=131072)
    """
    level = text_level(config)
    stated = next((level[key] for key in _CONTEXT_KEYS if _is_context(level.get(key))), None)
    rope = level.get("rope_scaling") or level.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    factor, key = rope.get("factor"), "original_max_position_embeddings"
    native = next((place[key] for place in (rope, level) if _is_context(place.get(key))), stated)
    if native is None:
        return None
    if stated is not None and stated > native:
        return ContextWindow(native, stated)
    scales = native != stated or key in rope
    return ContextWindow(native, round(native * factor) if scales and _is_factor(factor) else native)


def _untagged(value: dict[str, Any]) -> Any:
    """transformers writes infinity as {"__float__": "Infinity"}, so that a config stays JSON; read it back."""
    if value.keys() == {"__float__"}:
        return _TAGGED_FLOATS.get(value["__float__"], value)
    return value


def _is_context(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_CONTEXT_TOKENS


def _is_factor(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1 < value < math.inf


def _check_count(value: object, key: str, source: str) -> None:
    """Refuse what cannot be a count. A list holds one count a layer, and there 0 means a layer that has none."""
    if value is None:
        return
    items: list[Any] = value if isinstance(value, list) else [value]
    if not items:
        raise ModelError(f"{source}: {key} is an empty list; it must be a whole number above zero.")
    least = 0 if isinstance(value, list) else 1
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not least <= item <= _MAX_COUNT:
            raise ModelError(
                f"{source}: {key} is {item!r}, a {_json_kind(item)}; it must be a whole number above zero."
            )
    if key in _LAYER_COUNTS and items[0] > _MAX_LAYERS:
        raise ModelError(f"{source}: {key} is {items[0]:,}; no model has more than {_MAX_LAYERS:,} layers.")


def _json_kind(value: object) -> str:
    """What JSON calls a Python value's type."""
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")
