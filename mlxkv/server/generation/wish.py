"""What every API can ask for, in one form, and what holds for its parts in any of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mlxkv.engine.request import Processor, Sampling
from mlxkv.models.loader import LoadedModel
from mlxkv.server.http.errors import RequestError

MOST_STOPS, MOST_STOP_LENGTH = 16, 1024
MOST_IDS = 2**21  # more than any context; checking them must not keep others waiting

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Texts = Annotated[list[Text], Field(fail_fast=True)]  # one error of a list of millions is enough
Wholes = Annotated[list[Whole], Field(fail_fast=True, max_length=MOST_IDS)]


class Lenient(BaseModel):
    """Fields nobody knows are ignored; values of the ones we know must be right."""

    model_config = ConfigDict(extra="ignore")


class CacheOptions(Lenient):
    """What a request may say about the cache: leave nothing behind, share only within a salt, keep for a while."""

    store: Flag = True
    salt: Annotated[str, Field(max_length=256)] | None = None
    pin_s: Annotated[float, Field(strict=True, ge=0, le=86_400, allow_inf_nan=False)] = 0.0


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What an API's body comes to, but for the prompt."""

    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...] = ()
    choices: int = 1
    logprobs: int | None = None
    salt: str = ""
    store: bool = True
    pin_s: float = 0.0
    processors: Callable[[], list[Processor]] | None = None


def checked_stops(given: Sequence[str], field: str) -> tuple[str, ...]:
    """Stop texts that can be looked for after every token.

    Raises:
        RequestError: there are too many, one is too long, or one is empty.
    """
    if len(given) > MOST_STOPS or any(len(text) > MOST_STOP_LENGTH for text in given):
        raise RequestError(
            f"{field}: at most {MOST_STOPS} texts of at most {MOST_STOP_LENGTH:,} characters.", field=field
        )
    if not all(given):
        raise RequestError(f"{field}: an empty text would stop every reply at once.", field=field)
    return tuple(given)


def salt_of(key_salt: str | None, asked: str | None) -> str:
    """One salt of the caller's key and the salt that was asked for; no two pairs give the same."""
    if not key_salt and not asked:
        return ""
    return hashlib.sha256(json.dumps([key_salt or "", asked or ""]).encode()).hexdigest()


def vocabulary(model: LoadedModel) -> int:
    """How many token ids the model knows."""
    level = {**model.config, **(model.config.get("text_config") or {})}
    return int(level.get("vocab_size") or len(model.tokenizer))
