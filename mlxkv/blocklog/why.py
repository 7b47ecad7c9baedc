"""Why a prompt was not reused further: the nearest earlier prompt, the first token that differs, and the likely cause.

Reads records only: what `outline` left in them, what the cache said (`reason`), and which blocks went. A cause is
likely, never certain: it is read off what changed between two prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec

from mlxkv.blocklog.outline import Outline, Part, shared_tokens
from mlxkv.cache.names import BLOCK_TOKENS, common_tokens

Cause = Literal[
    "nothing", "short", "new text", "date or counter", "template clock", "tools in another order",
    "tool keys in another order", "other tools", "thinking removed", "reply changed", "template changed",
    "template options", "BOS twice", "other root", "other salt", "evicted", "not held", "damaged", "unreadable",
    "withdrawn", "slower", "no checkpoint", "history cut", "message inserted", "message changed",
    "system message changed", "uncached", "unknown",
]  # fmt: skip

ADVICE: Mapping[Cause, str] = {
    "nothing": "",
    "short": "Nothing to mend: a block has 64 tokens, and shorter prompts are cheap.",
    "new text": "Nothing to mend: this text was not there before.",
    "date or counter": "Move what changes behind what stays: to the end of the last message, or leave it out.",
    "template clock": "The template writes something of its own that changes, such as today's date; pin it.",
    "tools in another order": "Send the tools in one order always, such as by name.",
    "tool keys in another order": "Write each tool's schema with its keys in one order always.",
    "other tools": "Send one set of tools through a whole conversation.",
    "thinking removed": "The reply's thinking is computed anew each turn; keep it in the history, or let it be short.",
    "reply changed": "Send the reply back exactly as it came.",
    "template changed": "Every prompt is new once after such a change; it ends by itself.",
    "template options": "Send the same template options, such as enable_thinking, with each request.",
    "BOS twice": "Let the template or the tokenizer write the mark of a beginning, not both.",
    "other root": "Blocks are only good for the model and the settings that made them; keep those the same.",
    "other salt": "Requests with another key or salt never share; use one where sharing is wanted.",
    "evicted": "Give the tier more room, or ask again sooner.",
    "not held": "Give the tiers more room; `mlxkv log summary` says what was evicted and what was never written.",
    "damaged": "Check the disk; `mlxkv cache verify` reads every block.",
    "unreadable": "Check the disk and the rights of the cache directory.",
    "withdrawn": "The server's log says why that request failed; the blocks are computed again.",
    "slower": "Nothing to mend: computing was the faster way.",
    "no checkpoint": "Nothing to mend: this model resumes at checkpoints only, and they follow by themselves.",
    "history cut": "Drop old messages seldom and many at once; each cut computes all that follows it.",
    "message inserted": "Add messages at the end only.",
    "message changed": "Leave earlier messages as they were.",
    "system message changed": "Keep one system message through a conversation, and the changing part at its end.",
    "uncached": "Nothing of this model is kept.",
    "unknown": "Records with outlines would tell; they are written by `mlxkv serve` and `mlxkv chat`.",
}
_GONE: frozenset[Cause] = frozenset({"evicted", "damaged", "unreadable", "withdrawn"})
_DIVERGED = re.compile(r"diverged at token (\d+)")
_OTHER_ROOT = re.compile(r"other root(?: \((.*)\))?")
_SAID_BY_THE_CACHE: Mapping[str, tuple[Cause, str]] = {
    "shorter than a block": ("short", "the prompt is shorter than a block of 64 tokens"),
    "slower than computing": ("slower", "restoring would have taken as long as computing"),
    "no checkpoint": ("no checkpoint", "no checkpoint was held any further"),
    "evicted": ("evicted", "the next block was evicted"),
    "damaged": ("damaged", "the next block's file was damaged and set aside"),
    "unreadable": ("unreadable", "the next block's file could not be read"),
    "withdrawn": ("withdrawn", "the request that computed the next block failed, and the block was taken back"),
    "other salt": ("other salt", "the same text is held under another salt only"),
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of one request. `tokens` are packed, where known; `text` is there only when it was asked for."""

    request: str
    time: str | None = None
    model: str | None = None
    root: str | None = None
    prompt_tokens: int = 0
    matched_tokens: int = 0
    reason: str | None = None
    outline: Outline | None = None
    text: str | None = None
    tokens: bytes = b""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Record:
        """From a `request` event as the block log and `GET /v1/cache/requests` have it.

        An outline that cannot be read, of another version or damaged, is none.
        """
        return cls(
            request=str(found.get("request", "")),
            time=_iso(found.get("time")),
            model=found.get("model"),
            root=found.get("root"),
            prompt_tokens=found.get("prompt_tokens") or 0,
            matched_tokens=found.get("matched_tokens") or 0,
            reason=found.get("reason"),
            outline=_outline(found.get("outline")),
            text=found.get("text"),
        )


def _outline(found: Any) -> Outline | None:
    if found is None:
        return None
    try:
        return Outline.from_fields(found)
    except (KeyError, TypeError, msgspec.ValidationError):
        return None


def _iso(time: str | float | None) -> str | None:
    """A time as the log writes it; a server gives seconds since 1970."""
    if time is None or isinstance(time, str):
        return time
    return datetime.fromtimestamp(time).astimezone().isoformat(timespec="milliseconds")


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A block of this request's chain that went before it was asked for: when, from where, why, and for whom."""

    block: str
    event: str
    time: str | None
    tier: str | None
    reason: str | None
    by: str | None = None


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where one prompt left what was held.

    Attributes:
        nearest: the earlier request whose chain shares most; None when none is known.
        matched_tokens: where matching stopped; what comes after it was computed.
        token: number of the first token that differs; with `exact` False it is in [token, latest_token]. It is the
            prompt's length when an earlier prompt begins with all of it.
        role, index: the part that token is in: a message's role and place, or `tools`, `end`, `reply`.
        cause, detail, advice: what likely did it, what was seen, and what to change.
        lost_tokens: prompt tokens that were computed.
    """

    request: str
    nearest: str | None
    nearest_time: str | None
    matched_tokens: int
    token: int
    latest_token: int
    exact: bool
    role: str | None
    index: int | None
    cause: Cause
    detail: str
    advice: str
    lost_tokens: int


def explain(record: Record, earlier: Iterable[Record], gone: Sequence[Gone] = ()) -> Divergence:
    """Why `record` was not reused further than it was.

    Args:
        earlier: records of requests before it, in any order; those of another model do no harm.
        gone: blocks of its chain that went, oldest first.
    """
    near, least, most = _nearest(record, earlier)
    token, latest = _place(record, near, least, most)
    cause, detail = _cause(record, near, token, latest, gone)
    part = record.outline.at(token) if record.outline is not None else None
    return Divergence(
        request=record.request,
        nearest=near.request if near else None,
        nearest_time=near.time if near else None,
        matched_tokens=record.matched_tokens,
        token=token,
        latest_token=latest,
        exact=token == latest,
        role=part.role if part else None,
        index=part.index if part else None,
        cause=cause,
        detail=detail,
        advice=ADVICE[cause],
        lost_tokens=max(record.prompt_tokens - record.matched_tokens, 0),
    )


def shared(a: Record, b: Record) -> tuple[int, int]:
    """Between which numbers the count of leading tokens that two prompts share lies, both included."""
    if a.tokens and b.tokens:
        tokens = common_tokens(a.tokens, b.tokens)
        return tokens, tokens
    if a.outline is None or b.outline is None:
        return 0, min(a.prompt_tokens, b.prompt_tokens)
    return shared_tokens(a.outline, b.outline)


def words_around(record: Record, near: Record, characters: int = 60) -> tuple[str, str, str] | None:
    """The text before the first character that differs, and both ways it goes on; None when a text is not known."""
    if record.text is None or near.text is None:
        return None
    size = min(len(record.text), len(near.text))
    at = next((i for i in range(size) if record.text[i] != near.text[i]), size)
    before = record.text[max(at - characters, 0) : at]
    return before, record.text[at : at + characters], near.text[at : at + characters]


def _nearest(record: Record, earlier: Iterable[Record]) -> tuple[Record | None, int, int]:
    """The record that shares most with this one, the latest of equals; nothing when none is related to it."""
    best: tuple[Record | None, int, int] = (None, 0, 0)
    rank = (0, 1)  # a block, or without one a message or a tool
    for other in earlier:
        if other.outline is None and not other.tokens:
            continue
        least, most = shared(record, other)
        alike = likeness(record.outline, other.outline) if record.outline and other.outline else 0
        if (least // BLOCK_TOKENS, alike) >= rank:
            best, rank = (other, least, most), (least // BLOCK_TOKENS, alike)
    return best


def likeness(mine: Outline, other: Outline) -> int:
    """How many messages (but for dates, numbers and ids) and tools two prompts have in common."""
    if mine.key != other.key:
        return 0
    masks = {part.masked for part in other.parts if part.masked}
    return sum(part.masked in masks for part in mine.parts if part.masked) + len(set(mine.tools) & set(other.tools))


def _place(record: Record, near: Record | None, least: int, most: int) -> tuple[int, int]:
    """The number of the first token that differs, as a range; the cache knows it itself, unless blocks were lost."""
    said = _DIVERGED.fullmatch(record.reason or "")
    matched = int(said[1]) if said else record.matched_tokens
    if near is None or said or record.reason in (None, "never seen") or most < matched:
        return matched, matched
    return least, most


def _cause(record: Record, near: Record | None, token: int, latest: int, gone: Sequence[Gone]) -> tuple[Cause, str]:
    reason = record.reason
    if reason is None:
        return "nothing", "all tokens but the last were reused"
    mine, other = record.outline, near.outline if near else None
    other_root = _OTHER_ROOT.fullmatch(reason)
    if other_root:
        if mine and other and mine.key == other.key and mine.template != other.template:
            return "template changed", "the chat template is not the one the earlier prompt was made with"
        fields = other_root[1] or "not known which field"
        return "other root", f"the same text is held under another root; what differs: {fields}"
    if reason in _SAID_BY_THE_CACHE:
        cause, detail = _SAID_BY_THE_CACHE[reason]
        return cause, _last_gone(gone) if cause in _GONE and gone else detail
    if not _DIVERGED.fullmatch(reason) and reason != "never seen":
        return "uncached", reason
    if gone and reason == "never seen":  # held once, and forgotten so long ago that the cache does not know
        return "evicted", _last_gone(gone)
    if near is None and mine is not None and record.matched_tokens < BLOCK_TOKENS:
        return "new text", "no earlier request is known that shares a block, a message or a tool"
    if near is not None and (least := shared(record, near)[0]) >= token + BLOCK_TOKENS:
        return "not held", f"both prompts share {least} tokens or more, and {token} were held"
    if near is not None and reason == "never seen":
        return "new text", "what is held of the earlier prompt and its reply ends here"
    if mine is None or other is None or mine.key != other.key:
        return "unknown", f"the cache says: {reason}"
    return compare(mine, other, token, latest)


def _last_gone(gone: Sequence[Gone]) -> str:
    last = gone[-1]
    where = {"hot": "memory", "cold": "the SSD"}.get(last.tier or "", "its tier")
    did = "set aside from" if last.event == "quarantine" else "dropped from" if last.event == "drop" else "evicted from"
    said = f"block {last.block[:12]} was {did} {where}"
    if last.time:
        said += f" at {last.time}"
    if last.reason:
        said += f" ({last.reason})"
    return said + (f" to make room for request {last.by}" if last.by and last.event == "evict" else "")


def compare(mine: Outline, other: Outline, token: int, latest_token: int | None = None) -> tuple[Cause, str]:
    """What made prompt `mine` leave prompt `other` at a token (or between it and `latest_token`), and what was seen.

    The first rule that holds decides: marks, template, tools, then the two parts that token is in.
    """
    latest = token if latest_token is None else latest_token
    if mine.bos_tokens != other.bos_tokens and token <= max(mine.bos_tokens, other.bos_tokens):
        return "BOS twice", f"this prompt begins with {mine.bos_tokens} BOS tokens, the earlier with {other.bos_tokens}"
    if mine.template != other.template:
        return "template changed", "the chat template is not the one the earlier prompt was made with"
    if (found := _tools(mine, other, token)) is not None:
        return found
    part, before = _parts_at(mine, other, token, latest)
    if mine.options != other.options and (part is None or before is None or _same_text(part, before)):
        return "template options", "the template was given other options than before"
    if part is None or before is None:
        return "new text", "the earlier prompt and its reply end here"
    if before.role in ("reply", "end"):
        return _reply(part, before, other)
    if part.role == "end":
        return "new text", "this prompt ends where the earlier one goes on"
    if (part.role, part.index) == (before.role, before.index):
        return _message(mine, other, part, before)
    if {part.role, before.role} & {"system", "developer"} and part.index == before.index == 0:
        return "system message changed", "one of the two prompts has no system message"
    return _moved(mine, other, part, before) or (
        "message changed", f"a {part.role} message stands where a {before.role} message stood"
    )  # fmt: skip


def _tools(mine: Outline, other: Outline, token: int) -> tuple[Cause, str] | None:
    ends = [part.end for outline in (mine, other) for part in outline.parts if part.role == "tools"]
    within = token < max(ends) if ends else bool(mine.tools or other.tools) and _head(mine, other, token)
    if not within:
        return None
    if mine.tools != other.tools:
        if sorted(mine.tools) == sorted(other.tools):
            return "tools in another order", f"the same {len(mine.tools)} tools in another order"
        new, gone = len(set(mine.tools) - set(other.tools)), len(set(other.tools) - set(mine.tools))
        return "other tools", f"{new} of {len(mine.tools)} tools are new or changed, {gone} of before are not there"
    part, before = mine.at(token), other.at(token)
    if part and before and part.role == before.role == "tools":
        return "tool keys in another order", "the same tools in the same order, written with their keys in another"
    return None


def _head(mine: Outline, other: Outline, token: int) -> bool:
    """Whether a token is in the first part of both."""
    return all(outline.parts and token < outline.parts[0].end for outline in (mine, other))


def _parts_at(mine: Outline, other: Outline, token: int, latest: int) -> tuple[Part | None, Part | None]:
    """The first two parts in [token, latest] that are not alike."""
    at = token
    while True:
        part, before = mine.at(at), other.at(at)
        if part is None or before is None or part.digest != before.digest or min(part.end, before.end) > latest:
            return part, before
        at = min(part.end, before.end)


def _same_text(part: Part, before: Part) -> bool:
    return part.role == before.role and (part.masked, dict(part.volatile)) == (before.masked, dict(before.volatile))


def _reply(part: Part, before: Part, other: Outline) -> tuple[Cause, str]:
    if part.role != "assistant":
        return "new text", "the earlier prompt ends here, and its reply is not part of this one"
    if any(each.thinking for each in other.parts if each.role in ("reply", "end")) and not part.thinking:
        return "thinking removed", "the reply had a thinking part, and the history does not have it"
    if before.role == "end":
        return "reply changed", "the template writes a reply in the history unlike the one it asks for"
    return "reply changed", "the reply in the history is not, token for token, the one that was given"


def _message(mine: Outline, other: Outline, part: Part, before: Part) -> tuple[Cause, str]:
    """Two messages of one role at one place."""
    where = f"{part.role} message" if part.index is None else f"message {part.index} ({part.role})"
    if before.thinking and not part.thinking:
        return "thinking removed", f"{where} had a thinking part, and now has none"
    if part.masked and part.masked == before.masked:
        kinds = [kind for kind in part.volatile if part.volatile[kind] != before.volatile.get(kind)]
        if kinds:
            what = " and ".join({"id": "an id"}.get(kind, f"a {kind}") for kind in kinds)
            return "date or counter", f"{where} is the same but for {what}"
        return "template clock", f"the words of {where} are the same, what the template writes around them is not"
    if part.role in ("system", "developer"):
        return "system message changed", f"{where} has other words"
    moved = _moved(mine, other, part, before)
    if moved is not None:
        return moved
    later = [
        each for each in mine.parts if each.index is not None and part.index is not None and each.index > part.index
    ]
    if part.index is None or not later:
        return "new text", "the last message is a new one" if part.index is not None else "the prompt has other words"
    return "message changed", f"{where} has other words than before"


def _moved(mine: Outline, other: Outline, part: Part, before: Part) -> tuple[Cause, str] | None:
    """Whether one prompt goes on with what comes later in the other."""
    behind = list(other.parts[other.parts.index(before) + 1 :])
    ahead = list(mine.parts[mine.parts.index(part) + 1 :])
    if (skipped := _position(part, behind)) is not None:
        return "history cut", f"{skipped + 1} messages that stood here are gone"
    if (skipped := _position(before, ahead)) is not None:
        return "message inserted", f"{skipped + 1} messages are new before one that was here"
    return None


def _position(part: Part, later: Sequence[Part]) -> int | None:
    """Where in `later` the same message is."""
    if not part.masked:
        return None
    return next((i for i, each in enumerate(later) if _same_text(part, each)), None)
