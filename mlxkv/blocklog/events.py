"""What every reader yields: one `Event` for each thing that happened, whichever program wrote the log.

mlxkv's own lines are events already (docs/block-log.md). Of other logs the readers make the same kinds where they say
the same thing, and kinds that mlxkv does not write: `geometry`, `scan`, `reject`, `boundary`, `enforce`, `pressure`,
`held` and `trouble`.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

Source = Literal["mlxkv", "oMLX", "mlx_lm"]

_REASON = re.compile(r"diverged at token \d+")


class Event(msgspec.Struct, gc=False, omit_defaults=True):
    """One event. What is not known is None; `event` says which fields can be there.

    `looked_up_tokens` of a request are those an index found, `hot_tokens + cold_tokens + reused_tokens` those that were
    really not computed (`reused_tokens`: no tier is named). `finished` is False where the end is not in the log.
    """

    event: str
    time: str | None = None
    process: int | None = None
    model: str | None = None
    root: str | None = None
    request: str | None = None
    block: str | None = None
    parent: str | None = None
    index: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    tier: str | None = None
    ms: float | None = None
    reason: str | None = None
    prompt_tokens: int | None = None
    hot_tokens: int | None = None
    cold_tokens: int | None = None
    tail_tokens: int | None = None
    computed_tokens: int | None = None
    matched_tokens: int | None = None
    restored_bytes: int | None = None
    restore_s: float | None = None
    ttft_s: float | None = None
    output_tokens: int | None = None
    outline: msgspec.Raw = msgspec.Raw()
    text: str | None = None
    source: str = "mlxkv"
    looked_up_tokens: int | None = None
    reused_tokens: int | None = None
    seconds: float | None = None
    finished: bool = True
    detail: dict[str, Any] | None = None

    def to_fields(self) -> dict[str, Any]:
        """What is known, as plain values; the outline as an object."""
        names = (name for name in self.__struct_fields__ if name != "outline")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        return found | ({"outline": msgspec.json.decode(self.outline)} if bytes(self.outline) else {})

    @property
    def hit_tokens(self) -> int | None:
        """Prompt tokens that were not computed; None when the log does not say."""
        known = [n for n in (self.hot_tokens, self.cold_tokens, self.reused_tokens) if n is not None]
        return sum(known) if known else None


def reason_class(reason: str | None) -> str:
    """A reason without its number, to count by.

    >>> reason_class("diverged at token 960"), reason_class(None)
    ('diverged', 'all reused')
    """
    if reason is None:
        return "all reused"
    return "diverged" if _REASON.fullmatch(reason) else reason


def seconds_of(time: str | None) -> float | None:
    """Seconds since 1970 of an event's time; a time without a zone is taken as UTC, so that differences hold."""
    if time is None:
        return None
    try:
        found = datetime.fromisoformat(time)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
