"""Where a model comes from: a directory, a config.json, a GGUF file, the catalog, or a hub. Weights are never read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxkv.core.errors import ModelError, ModelNotFoundError
from mlxkv.models.gguf_header import config_from_gguf
from mlxkv.sizing import catalog
from mlxkv.sizing.config import Config, check_config, parse_config, read_config

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Source:
    """A model that can be asked about.

    Attributes:
        name: what to call it.
        origin: where its config was read, one line for a person.
        config: checked.
        files_bytes: size of its safetensors files, None where they are not here.
    """

    name: str
    origin: str
    config: Config
    files_bytes: int | None = None


def find_source(model: str | Path | Mapping[str, Any]) -> Source:
    """The model of that path, catalog name or hub id, or of a config that is already at hand.

    A path that exists comes first, then the catalog (upper and lower case alike, hub ids too), then the hub.

    Raises:
        ModelNotFoundError: nothing of that name, with three suggestions.
        ModelError: something is there and its config cannot be used; names the key.
    """
    if isinstance(model, Mapping):
        config = check_config(model)
        return Source(str(config["model_type"]), "a config given to the library", config)
    text = str(model).strip()
    path = Path(text).expanduser()
    if text and os.path.exists(path):  # Path.exists raises for names that are too long
        return _from_path(path)
    if _looks_like_a_path(text):
        raise ModelNotFoundError(f"there is no file or directory {text}; check the path, or see `mlxkv models`.")
    try:
        found = catalog.find(text)
    except ModelNotFoundError:
        if text.count("/") != 1:
            raise
    else:
        note = f" ({found.note})" if found.note else ""
        return Source(found.name, f"catalog, a copy of {found.hub_id}{note}", found.config)
    from mlxkv.budget.hub import config_from_hub  # huggingface_hub takes 0.2 s to import: only for a hub id

    config, origin = config_from_hub(text)
    return Source(text.rpartition("/")[2], origin, config)


def _from_path(path: Path) -> Source:
    if path.is_dir():
        return Source(path.resolve().name, f"directory {path}", read_config(path), _files_bytes(path))
    if path.suffix.lower() == ".gguf":
        return Source(path.stem, f"GGUF metadata of {path}", config_from_gguf(path), path.stat().st_size)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return Source(name, f"file {path}", read_config(path))


def _looks_like_a_path(text: str) -> bool:
    """Whether a person who typed this meant a file: a hub id has one slash, no dots at its ends and no suffix."""
    return text.startswith((".", "~", os.sep)) or text.count("/") > 1 or text.lower().endswith((".json", ".gguf"))


def _files_bytes(directory: Path) -> int | None:
    """Size of the weight files; None where there are none, for a config alone is enough.

    Raises `ModelError` when the index names files of which some are here and one is not.
    """
    here = {file.name: file.stat().st_size for file in directory.glob("*.safetensors")}
    if not here:
        return None
    index = directory / _INDEX
    if not index.is_file():
        return sum(here.values())
    shards = parse_config(index.read_bytes(), source=str(index)).get("weight_map")
    named = {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()
    missing = sorted(named - here.keys())
    if missing:
        raise ModelError(f"{index} names {len(named)} files and {missing[0]} is not here; download it again.")
    return sum(size for name, size in here.items() if name in named)
