"""The block log: one JSON object a line for everything that happened to a block or a request.

Prompt text is in it only where the user asked for it.

The schema is the two dataclasses below and `docs/block-log.md`. A field that does not apply is left out of the line.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

from mlxkv.cache.names import BlockName

EventKind = Literal["commit", "offload", "restore", "evict", "quarantine", "drop", "open", "close"]
TierName = Literal["hot", "cold"]

ROTATE_BYTES = 64 * 2**20
KEEP_FILES = 4


@dataclass(frozen=True, kw_only=True)
class BlockEvent:
    """Something happened to a block or a tier.

    `tokens` is the block's own token count (64, or fewer for a tail), `index` its place in the chain, `bytes` what
    moved or went, `ms` how long it took, `reason` why (`budget`, `free disk`, `payload digest`, ...).
    """

    event: EventKind
    model: str | None = None
    root: BlockName | None = None
    request: str | None = None
    block: BlockName | None = None
    parent: BlockName | None = None
    index: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    tier: TierName | None = None
    ms: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class RequestEvent:
    """One request, told once it ended: prompt_tokens = hot + cold + computed; tail_tokens are part of hot_tokens.

    `matched_tokens` is where matching stopped and `reason` why; None when all but the last token was held.
    `request` is unique within the process. `ttft_s` is the time to the first token. `outline` is what
    `blocklog.outline` made of the prompt; `text` is the prompt itself, only when the user asked for it.
    """

    event: Literal["request"] = "request"
    model: str
    root: BlockName
    request: str
    prompt_tokens: int
    hot_tokens: int
    cold_tokens: int
    tail_tokens: int
    computed_tokens: int
    matched_tokens: int
    restored_bytes: int
    restore_s: float
    ttft_s: float | None
    output_tokens: int
    reason: str | None
    outline: Mapping[str, object] | None = None
    text: str | None = None


def as_fields(event: BlockEvent | RequestEvent) -> dict[str, object]:
    """The event as the log writes it, without time and process: names as hex, absent fields left out."""
    found: dict[str, object] = {}
    for field in fields(event):
        value = getattr(event, field.name)
        if value is not None:
            found[field.name] = value.hex() if isinstance(value, bytes) else value
    return found


class BlockLog:
    """Writes events to a file that is rotated by size, or nowhere. Owner: any thread; the handler has a lock.

    A log that cannot be written says so once through `logging` and never stops a request. `listener`, when it is set,
    hears every event too, on the thread it happens on.
    """

    listener: Callable[[BlockEvent | RequestEvent], None] | None = None

    def __init__(self, path: Path | None = None, *, rotate_bytes: int = ROTATE_BYTES) -> None:
        self._process = os.getpid()
        self._path = path
        self._handler: RotatingFileHandler | None = None
        self._warned = False
        self._models: dict[BlockName | None, str] = {}
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._handler = RotatingFileHandler(
                    path, maxBytes=rotate_bytes, backupCount=KEEP_FILES, encoding="utf-8"
                )
            except OSError:
                self._failed()
            else:
                self._handler.handleError = self._failed  # type: ignore[method-assign]

    def name_root(self, root: BlockName, model: str) -> None:
        """From now on events of `root` carry the model's name."""
        self._models[root] = model

    def model_of(self, root: BlockName) -> str | None:
        """The name that `name_root` gave; None when it gave none."""
        return self._models.get(root)

    def write(self, event: BlockEvent | RequestEvent) -> None:
        """Add one line."""
        if self.listener is not None:
            self.listener(event)
        if self._handler is None:
            return
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        line = {"time": now, "process": self._process, **as_fields(event)}
        if event.root in self._models:
            line.setdefault("model", self._models[event.root])
        text = json.dumps(line, separators=(",", ":"), ensure_ascii=False)
        self._handler.handle(logging.LogRecord("mlxkv", logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        if self._handler is not None:
            try:
                self._handler.close()
            except OSError:  # what is still in the buffer cannot be written either
                self._failed()

    def _failed(self, record: logging.LogRecord | None = None) -> None:  # noqa: ARG002 - the signature is logging's
        if not self._warned:
            self._warned = True
            logging.getLogger("mlxkv").warning(
                "the block log %s cannot be written; free some disk or choose another --log", self._path
            )
