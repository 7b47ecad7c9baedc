"""What a request was made of, without its words: where each part ends, and keyed digests of it.

The engine makes one outline a request and puts it into the request's record; `why` compares two of them. Digests are
keyed with a secret of the process that wrote them (or of its cache directory): without it nobody can test a guess, and
with it two requests can be compared part by part.

    parts      tools, each message, the end that asks for a reply, the reply: role, place, end in tokens, digest
    masked     digest of a message whose dates, times, numbers and ids are masked: equal when only those changed
    blocks     chained digests of every 64 tokens, so that two prompts can be compared to the block
"""

from __future__ import annotations

import json
import os
import re
import secrets
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import msgspec

from mlxkv.cache.names import BLOCK_TOKEN_BYTES, BLOCK_TOKENS, TOKEN_BYTES, pack
from mlxkv.core.platform import default_cache_dir
from mlxkv.models.pieces import SPECIAL, token_pieces

MASKED_CHARACTERS = 65_536  # of one request; a longer one has messages that are compared whole only
BLOCK_DIGITS = 8
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_KEY_BYTES, _DIGEST_BYTES, _BLOCK_BYTES = 16, 6, BLOCK_DIGITS // 2
_THINKING = (b"<think>", b"</think>", b"[THINK]", b"<|channel|>\xffanalysis")
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_CUT = 48  # bytes of a message that are looked for when all of it is not found

_DATE = re.compile(r"(?<!\d)(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d\d))(?!\d)")
_TIME = re.compile(r"(?<!\d)\d{1,2}:\d\d(?!\d)")
_NUMBER = re.compile(r"\W*\d+(?:[.,:/]\d+)*\W*")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
           "December")  # fmt: skip
_NAMES = frozenset(form for name in (*_DAYS, *_MONTHS) for form in (name, name[:3], name.upper()))


@dataclass(frozen=True, slots=True)
class Part:
    """Some tokens of a prompt that belong together, up to token `end`.

    `role` is a message's role, or `tools`, `prompt` (a prompt without messages), `end` (what asks for the reply) or
    `reply`; `index` is the message's place. `volatile` has a digest of all dates, times, numbers and ids in the
    message, one a kind; `thinking` says whether a thinking part is among the tokens.
    """

    role: str
    index: int | None
    end: int
    digest: str
    masked: str = ""
    volatile: Mapping[str, str] = field(default_factory=dict)
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Outline:
    """One prompt. Two outlines can be compared when `key` is the same.

    `tools` has a digest a tool in the order sent, the order of keys apart; `options` is a digest of what the template
    was given beside messages and tools; `bos_tokens` counts the leading marks of a beginning.
    """

    key: str
    template: str
    options: str
    bos_tokens: int
    tools: tuple[str, ...]
    parts: tuple[Part, ...]
    blocks: str

    def to_fields(self) -> dict[str, object]:
        """The form it has in a record: what is empty is left out."""
        return {
            "key": self.key,
            "template": self.template,
            "options": self.options,
            "bos_tokens": self.bos_tokens,
            "tools": list(self.tools),
            "parts": [_part_fields(part) for part in self.parts],
            "blocks": self.blocks,
        }

    @classmethod
    def from_fields(cls, found: Mapping[str, Any]) -> Outline:
        """The inverse of `to_fields`; fields it does not know are skipped.

        Raises:
            KeyError, TypeError, msgspec.ValidationError: no outline, or one of another make.
        """
        return msgspec.convert({**found, "parts": [{"index": None, **part} for part in found["parts"]]}, cls)

    @property
    def prompt_tokens(self) -> int:
        """Tokens without the reply."""
        return next((part.end for part in reversed(self.parts) if part.role != "reply"), 0)

    def at(self, token: int) -> Part | None:
        """The part that token number `token` is in; None behind the last."""
        return next((part for part in self.parts if token < part.end), None)

    def start_of(self, part: Part) -> int:
        """The first token of a part."""
        i = self.parts.index(part)
        return self.parts[i - 1].end if i else 0


def _part_fields(part: Part) -> dict[str, object]:
    found: dict[str, object] = {"role": part.role, "end": part.end, "digest": part.digest}
    if part.index is not None:
        found["index"] = part.index
    if part.masked:
        found["masked"] = part.masked
    if part.volatile:
        found["volatile"] = dict(part.volatile)
    if part.thinking:
        found["thinking"] = True
    return found


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a part's own text was found: bytes [start, stop) of the decoded prompt."""

    start: int
    stop: int
    role: str
    index: int | None
    text: str


class Outliner:
    """Makes outlines of one model's prompts. Holds no state of a request; may be used from any thread.

    Cost: about 4 ms for 10,000 tokens in 80 messages; building it walks the vocabulary once.
    """

    def __init__(self, tokenizer: Any, *, key: bytes | None = None) -> None:
        """Bind a tokenizer.

        Args:
            tokenizer: mlx-lm's wrapper.
            key: up to 64 bytes; outlines made with the same key can be compared. A new one when absent.
        """
        self._key = secrets.token_bytes(_KEY_BYTES) if key is None else key
        self.pieces = token_pieces(tokenizer)
        self._lengths = [len(piece) for piece in self.pieces]
        self._bos: int | None = tokenizer.bos_token_id
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._key_name = self._digest(b"key")
        self._template = self._digest(str(tokenizer.chat_template).encode())

    def outline(
        self,
        tokens: Sequence[int],
        messages: Sequence[Mapping[str, Any]] = (),
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Outline:
        """The outline of a prompt.

        Args:
            tokens: the rendered prompt.
            messages: as the OpenAI API has them, those it was rendered from; none for a prompt given as text.
            tools: those it was rendered with.
            options: what else the template was given.
        """
        packed = pack(tokens)
        text, ends = self._decode(tokens)
        spans = list(_find_all(text, messages, tools))
        parts = self._parts(tokens, packed, text, ends, spans, "end" if messages else "prompt")
        given = json.dumps(dict(options or {}), sort_keys=True, default=str).encode()
        return Outline(
            key=self._key_name,
            template=self._template,
            options=self._digest(given),
            bos_tokens=next((i for i, token in enumerate(tokens) if token != self._bos), len(tokens)),
            tools=tuple(self._digest(json.dumps(tool, sort_keys=True, default=str).encode()) for tool in tools),
            parts=tuple(parts),
            blocks=self._blocks(packed),
        )

    def with_reply(self, outline: Outline, reply: Sequence[int]) -> Outline:
        """The outline with the reply's tokens as its last part: what a chain holds when the request has ended."""
        if not reply:
            return outline
        text, _ = self._decode(reply)
        part = Part(
            "reply", None, outline.prompt_tokens + len(reply), self._digest(pack(reply)), thinking=_thinks(text)
        )
        return replace(outline, parts=(*outline.parts, part))

    def text(self, tokens: Sequence[int]) -> str:
        """The tokens as text, special tokens spelled out."""
        return self._decode(tokens)[0].replace(SPECIAL, b"").decode(errors="replace")

    def _decode(self, tokens: Sequence[int]) -> tuple[bytes, list[int]]:
        """The text of `tokens`, and where each token ends in it."""
        known = len(self.pieces)
        if max(tokens, default=0) >= known:
            pieces = [self.pieces[token] if token < known else b"" for token in tokens]
            return b"".join(pieces), list(accumulate(map(len, pieces)))
        return b"".join(map(self.pieces.__getitem__, tokens)), list(accumulate(map(self._lengths.__getitem__, tokens)))

    def _parts(
        self, tokens: Sequence[int], packed: bytes, text: bytes, ends: list[int], spans: list[_Span], last: str
    ) -> Iterator[Part]:
        start = 0
        left = MASKED_CHARACTERS
        for span in spans:
            stop = min(bisect_left(ends, span.stop) + 1, len(tokens))
            if stop < len(tokens) and tokens[stop] in self._eos:
                stop += 1
                if stop < len(tokens) and self.pieces[tokens[stop]].isspace():
                    stop += 1
            if stop <= start:
                continue
            masked, volatile = "", dict[str, str]()
            if 0 < len(span.text) <= left:
                left -= len(span.text)
                masked, volatile = self._mask(span.text)
            yield self._part(span.role, span.index, start, stop, packed, text, ends, masked, volatile)
            start = stop
        if start < len(tokens):
            yield self._part(last, None, start, len(tokens), packed, text, ends, "", {})

    def _part(
        self, role: str, index: int | None, start: int, stop: int, packed: bytes, text: bytes, ends: list[int],
        masked: str, volatile: Mapping[str, str],
    ) -> Part:  # fmt: skip
        digest = self._digest(packed[start * TOKEN_BYTES : stop * TOKEN_BYTES])
        thinking = _thinks(text[ends[start - 1] if start else 0 : ends[stop - 1]])
        return Part(role, index, stop, digest, masked, volatile, thinking)

    def _mask(self, text: str) -> tuple[str, dict[str, str]]:
        """Digests of the text with everything masked that may change by itself, and of what was masked, by kind."""
        words = text.split()
        kinds = {word: kind for word in set(words) if (kind := _kind(word))}
        masked = " ".join(["0" if word in kinds else word for word in words] if kinds else words)
        spacing = f"{text.count(' ')} {text.count(chr(10))}"
        found: dict[str, list[str]] = {}
        for word in words if kinds else ():
            if word in kinds:
                found.setdefault(kinds[word], []).append(word)
        return self._digest(f"{spacing}\0{masked}".encode()), {
            kind: self._digest("\0".join(values).encode()) for kind, values in sorted(found.items())
        }

    def _blocks(self, packed: bytes) -> str:
        before, digests = b"", []
        for start in range(0, len(packed) - BLOCK_TOKEN_BYTES + 1, BLOCK_TOKEN_BYTES):
            block = packed[start : start + BLOCK_TOKEN_BYTES]
            before = blake2b(before + block, digest_size=16, key=self._key).digest()
            digests.append(before[:_BLOCK_BYTES])
        return b"".join(digests).hex()

    def _digest(self, data: bytes) -> str:
        return blake2b(data, digest_size=_DIGEST_BYTES, key=self._key).hexdigest()


def load_key() -> bytes:
    """The secret of this user's outlines, made once and kept beside the cache, so that they compare across restarts.

    Where it cannot be kept it is a new one each time.
    """
    path = default_cache_dir().parent / "outline.key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(os.open(path, _NEW_FILE, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        key = path.read_bytes()
    except OSError:
        key = b""
    return key if len(key) == _KEY_BYTES else secrets.token_bytes(_KEY_BYTES)


def common_blocks(a: Outline, b: Outline) -> int:
    """How many leading blocks of 64 tokens two outlines share for sure; 0 when their keys differ."""
    if a.key != b.key:
        return 0
    size = min(len(a.blocks), len(b.blocks)) // BLOCK_DIGITS
    lowest, highest = 0, size  # a block's digest covers all before it, so equality is monotonic
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        at = slice((middle - 1) * BLOCK_DIGITS, middle * BLOCK_DIGITS)
        if a.blocks[at] == b.blocks[at]:
            lowest = middle
        else:
            highest = middle - 1
    return lowest


def shared_tokens(a: Outline, b: Outline) -> tuple[int, int]:
    """Between which numbers the count of leading tokens that two prompts share lies, both included.

    Blocks tell it to 64 tokens, parts that are equal and end at the same token narrow it.
    """
    least = common_blocks(a, b) * BLOCK_TOKENS
    most = min(least + BLOCK_TOKENS - 1, a.prompt_tokens, b.parts[-1].end if b.parts else 0)
    for mine, other in zip(a.parts, b.parts, strict=False):
        if a.key != b.key or mine.role == "reply" or (mine.end, mine.digest) != (other.end, other.digest):
            break
        least = max(least, mine.end)
    return least, max(most, least)


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message: its content, or the text parts of it joined; empty when it has none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return ""


def _find_all(
    text: bytes, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Iterator[_Span]:
    """Where the tools and each message are in a rendered prompt, in order; what is not found is left out."""
    listed = _find_tools(text, tools)
    at = 0
    for index, message in enumerate(messages):
        role = str(message.get("role", ""))
        span = _find_message(text, at, role, index, message)
        if listed is not None and (span is None or listed.start < span.start or role not in ("system", "developer")):
            if span is not None and span.start < listed.stop:  # a short message is found in any long text
                span = _find_message(text, listed.stop, role, index, message) or span
            if span is None or span.start >= listed.stop:
                yield listed
                at, listed = listed.stop, None
        if span is not None and span.start >= at:
            yield span
            at = span.stop
    if listed is not None and listed.start >= at:
        yield listed


def _find_tools(text: bytes, tools: Sequence[Mapping[str, Any]]) -> _Span | None:
    found: list[tuple[int, int]] = []
    for tool in tools:
        inner = tool.get("function", tool)
        written = [
            json.dumps(value, ensure_ascii=False, indent=indent) for value in (tool, inner) for indent in (None, 4, 2)
        ]
        places = [(text.find(form.encode()), len(form.encode())) for form in written]
        place = next(((at, size) for at, size in places if at >= 0), None)
        if place is None:
            name = f'"{inner.get("name", "")}"'.encode()
            place = (text.find(name), len(name))
        if place[0] >= 0:
            found.append((place[0], place[0] + place[1]))
    if not found:
        return None
    return _Span(min(start for start, _ in found), max(stop for _, stop in found), "tools", None, "")


def _find_message(text: bytes, at: int, role: str, index: int, message: Mapping[str, Any]) -> _Span | None:
    said = message_text(message)
    for form in dict.fromkeys((said, said.strip(), _THOUGHT.sub("", said).strip())):
        if not form:
            continue
        wanted = form.encode()
        for closed in (wanted + SPECIAL, wanted + b"\n" + SPECIAL, wanted):
            start = text.find(closed, at)
            if start >= 0:
                return _Span(start, start + len(wanted), role, index, said)
    called = [
        call.get("function", {}).get("name") for call in message.get("tool_calls") or () if isinstance(call, Mapping)
    ]
    for clue in (said.strip().encode()[:_CUT], *(str(name).encode() for name in called if name)):
        start = text.find(clue, at) if clue else -1
        if start >= 0:
            stop = text.find(SPECIAL, start)
            return _Span(start, stop if stop >= 0 else len(text), role, index, said)
    return None


def _kind(word: str) -> str | None:
    """What a word that may change by itself is; None for any other."""
    if word.isalpha():
        return "date" if word in _NAMES else None
    if not any(map(str.isdigit, word)):
        return "date" if word.strip(".,;:()") in _NAMES else None
    if _DATE.search(word):
        return "date"
    if _TIME.search(word):
        return "time"
    return "number" if _NUMBER.fullmatch(word) else "id"


def _thinks(text: bytes) -> bool:
    return any(mark in text for mark in _THINKING)
