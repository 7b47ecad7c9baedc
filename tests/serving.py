"""Engines over tiny models, and what a request through one gives."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.nn as nn
from kinds import CONFIGS
from mlx_lm.tokenizer_utils import TokenizerWrapper
from talking import plain_tokenizer
from tiny import ALL_TINY, build_tiny

from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import GIB, MIB
from mlxkv.engine.chunks import Chunks
from mlxkv.engine.engine import Engine, Opened
from mlxkv.engine.request import Failed, Finished, Piece, Request, Sampling
from mlxkv.engine.scheduler import Limits
from mlxkv.models.loader import LoadedModel
from mlxkv.prompt_cache.block_cache import BlockCache

SOON_S = 60.0
NO_END = -1  # no token ends a reply: ids of a random model mean nothing


@dataclass
class Reply:
    """What came back; `end` is Finished or Failed."""

    tokens: list[int] = field(default_factory=list)
    segments: list[tuple[str, str]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    end: Finished | Failed | None = None

    @property
    def text(self) -> str:
        return "".join(text for kind, text in self.segments if kind == "text")

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished), self.end
        return self.end


class Asked:
    """A request on its way; `wait` collects it."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        engine.submit(request, self.events.put)

    def wait(self) -> Reply:
        reply = Reply()
        while reply.end is None:
            event = self.events.get(timeout=SOON_S)
            if isinstance(event, Piece):
                reply.segments += [(segment.kind, segment.text) for segment in event.segments]
                if event.token is not None:
                    reply.tokens.append(event.token)
                if event.logprob is not None:
                    reply.logprobs.append(event.logprob)
            elif isinstance(event, (Finished, Failed)):
                reply.end = event
        return reply


def ask(engine: Engine, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> Reply:
    """One request, waited for."""
    return Asked(engine, Request(prompt=tuple(prompt), max_tokens=max_tokens, **more)).wait()


def ask_all(engine: Engine, requests: Sequence[Request]) -> list[Reply]:
    """All at once, then wait for each."""
    return [asked.wait() for asked in [Asked(engine, request) for request in requests]]


def tiny_model(name: str = "llama", module: nn.Module | None = None, *, ends: bool = False) -> LoadedModel:
    """A random model with the tokenizer of `talking`; without `ends` no token ends its reply."""
    config = ALL_TINY[name]() if name in ALL_TINY else CONFIGS[name]
    tokenizer = TokenizerWrapper(plain_tokenizer())
    if not ends:
        tokenizer._eos_token_ids = {NO_END}
    return LoadedModel(name, module or build_tiny(config), tokenizer, config, {"model": name}, 4096)


@contextmanager
def running(
    make: Callable[[], LoadedModel],
    directory: Path,
    *,
    hot: int = 64 * MIB,
    cold: int = GIB,
    limits: Limits | None = None,
    chunk_tokens: int = 64,
    chunks: Chunks | None = None,
    listener: Any = None,
    **options: Any,
) -> Iterator[Engine]:
    """An engine that runs while the body does; nothing may be left pinned when it ends."""

    def open_model() -> Opened:
        model = make()
        store = BlockStore(CacheConfig(directory=directory, hot_bytes=hot, cold_bytes=cold, floor_bytes=0))
        store.log.listener = listener
        cache = BlockCache(model.module, model.fields, store, name=model.name)
        return Opened(model, cache, limits or Limits(), chunks or Chunks.of(chunk_tokens))

    engine = Engine(open_model, **options)
    engine.start(SOON_S)
    try:
        yield engine
    finally:
        engine.close(drain_s=SOON_S)
        assert not engine.status.running
        if not engine._pins:
            assert engine.cache.store.pins() == 0
        engine.cache.check_integrity()


def sampled(temperature: float = 0.8, seed: int | None = None) -> Sampling:
    return Sampling(temperature=temperature, seed=seed)
