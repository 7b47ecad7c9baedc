"""Apple's `mlx_lm.server` with our tiers behind it: its `LRUPromptCache` interface over a `BlockCache`.

mlx-lm keeps whole prompt caches in memory; here what it puts in is cut into blocks, and what it takes out is restored
from them, also after a restart. A prompt of which everything is held comes back all but its last token, so there is
always something to compute. Windows and states are only kept where mlx-lm hands over a cache that can be cut there;
`mlxkv serve` has no such limit.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType, ModuleType
from typing import Any

from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.errors import MlxkvError
from mlxkv.core.platform import keep_open_files_limit
from mlxkv.engine.wiring import wire_weights
from mlxkv.models.fingerprint import module_fields
from mlxkv.prompt_cache.block_cache import BlockCache

with keep_open_files_limit():
    from mlx_lm import server


class BlockPromptCache:
    """What `mlx_lm.server` asks of a prompt cache. Owner: its generation thread, from the first call on."""

    def __init__(self, provider: Any, config: CacheConfig) -> None:
        """Keep nothing yet.

        Args:
            provider: mlx-lm's `ModelProvider`; its model is the one whose cache is asked for.
        """
        self._provider = provider
        self._config = config
        self._store: BlockStore | None = None
        self._caches: dict[Any, BlockCache] = {}

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """The longest held prefix as a prompt cache, and the tokens that are still to be computed, at least one."""
        restored = self._cache(model).restore(tokens)
        return restored.prompt_cache, tokens[restored.tokens :]

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep a prompt cache that was run over `tokens`."""
        del cache_type  # blocks are kept by use, not by who wrote them
        self._cache(model).commit(tokens, prompt_cache)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Hold at most so many bytes in memory; what the SSD has stays there."""
        del n_sequences
        if self._store is not None and n_bytes is not None:
            while self._store.hot.used_bytes > max(n_bytes, 0) and self._store.hot.evict() is not None:
                pass

    @property
    def nbytes(self) -> int:
        return self._store.hot.used_bytes if self._store is not None else 0

    def __len__(self) -> int:
        return len(self._store.hot) if self._store is not None else 0

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """mlx-lm logs this; the one type we have is the block."""
        return {"blocks": {"n_sequences": len(self), "n_bytes": self.nbytes}}

    def close(self) -> int:
        """Write what waits; returns how many blocks the SSD lacks."""
        return self._store.close() if self._store is not None else 0

    def _cache(self, model: Any) -> BlockCache:
        if model not in self._caches:
            if self._store is None:
                wire_weights()
                self._store = BlockStore(self._config)
            module, tokenizer = self._provider.model, self._provider.tokenizer
            name = str(model[0]).rstrip("/").rpartition("/")[2]
            self._caches[model] = BlockCache(module, module_fields(module, tokenizer), self._store, name=name)
        return self._caches[model]


def run(arguments: Sequence[str], config: CacheConfig) -> int:
    """Run `mlx_lm.server` with its own arguments until it is stopped; returns blocks that the SSD lacks.

    Raises:
        MlxkvError: this mlx-lm has another server.
    """
    lost: list[int] = []
    argv = sys.argv
    _its_own(server, "_run_http_server")
    with ExitStack() as changes:
        changes.enter_context(_in_place_of(server, "run", partial(_run, config, lost)))
        for module in (server, sys.modules[server.BatchGenerator.__module__]):
            changes.enter_context(_in_place_of(module, "maybe_set_recommended_wired_limit", _wire_nothing_else))
        sys.argv = ["mlxkv mlx-lm-server", *arguments]
        try:
            server.main()
        finally:
            sys.argv = argv
    return sum(lost)


@contextmanager
def _in_place_of(module: ModuleType, name: str, ours: Callable[..., object]) -> Iterator[None]:
    its = _its_own(module, name)
    setattr(module, name, ours)
    try:
        yield
    finally:
        setattr(module, name, its)


def _its_own(module: ModuleType, name: str) -> object:
    its = vars(module).get(name)
    if not callable(its):
        raise MlxkvError("this mlx-lm has another server than the one this was written for; use `mlxkv serve`.")
    return its


def _wire_nothing_else() -> None:
    """In the place of mlx-lm's own, which wires prompt caches too; None is what it returns where nothing can be set."""


def _run(config: CacheConfig, lost: list[int], host: str, port: int, model_provider: Any) -> None:
    """mlx-lm's own `run`, with the other prompt cache."""
    cache = BlockPromptCache(model_provider, config)
    generator = server.ResponseGenerator(model_provider, cache)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        server._run_http_server(host, port, generator)
    finally:
        generator.stop_and_join()
        lost.append(cache.close())


def _interrupt(sig: int, frame: FrameType | None) -> None:
    del sig, frame
    raise KeyboardInterrupt
