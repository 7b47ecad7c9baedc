"""The models mlxkv knows without a network: configs shipped as package data, each with the place it was copied from."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Any

from mlxkv.core.errors import ModelNotFoundError
from mlxkv.sizing.config import Config, check_config, parse_config

_SUGGESTIONS = 3


@dataclass(frozen=True)
class CatalogModel:
    """A config from the catalog.

    Attributes:
        name: what a user types, such as `Qwen2.5-0.5B-Instruct`.
        hub_id: the repository it describes, such as `Qwen/Qwen2.5-0.5B-Instruct`.
        source: where the config was copied from.
        note: what was changed in the copy, or an empty string.
        config: the checked config, without the four lines above.
    """

    name: str
    hub_id: str
    source: str
    note: str
    config: Config


def names() -> tuple[str, ...]:
    """Every name in the catalog, sorted without regard to case."""
    return tuple(sorted(_files(), key=str.casefold))


def find(name: str) -> CatalogModel:
    """The catalog's model of that name or hub id, upper and lower case alike.

    Raises `ModelNotFoundError` with the three nearest names.
    """
    wanted = name.strip().casefold()
    for known in names():
        if known.casefold() == wanted:
            return _read(known)
    if "/" in wanted:
        for known in names():
            model = _read(known)
            if model.hub_id.casefold() == wanted:
                return model
    raise ModelNotFoundError(
        f"no model {name!r} in the catalog; did you mean {', '.join(suggest(name))}? `mlxkv models` lists them all."
    )


def suggest(name: str) -> list[str]:
    """The three names nearest to `name`, nearest first; an organisation in front of it does not count.

    A name that begins as `name` does, or that `name` begins with, comes before any other.
    """
    wanted = name.strip().casefold().rpartition("/")[2]
    matcher = SequenceMatcher(b=wanted)

    def nearness(known: str) -> tuple[bool, float]:
        spelled = known.casefold()
        matcher.set_seq1(spelled)
        return spelled.startswith(wanted) or wanted.startswith(spelled), matcher.ratio()

    return sorted(names(), key=nearness, reverse=True)[:_SUGGESTIONS]


@cache
def _files() -> MappingProxyType[str, Traversable]:
    folder = files("mlxkv.sizing") / "catalog"
    return MappingProxyType({f.name.removesuffix(".json"): f for f in folder.iterdir() if f.name.endswith(".json")})


def _read(name: str) -> CatalogModel:
    raw: dict[str, Any] = parse_config(_files()[name].read_bytes(), source=f"catalog entry {name}")
    config = {key: value for key, value in raw.items() if not key.startswith("_")}
    return CatalogModel(
        name=name,
        hub_id=raw["_model"],
        source=raw["_source"],
        note=raw.get("_note", ""),
        config=check_config(config, source=f"catalog entry {name}"),
    )
