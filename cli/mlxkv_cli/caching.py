"""From a command's options to an open cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mlxkv.core.config import COLD_BYTES, CacheConfig, default_hot_bytes
from mlxkv.core.platform import default_cache_dir
from mlxkv_cli.output import Output

if TYPE_CHECKING:
    from mlxkv.models.loader import LoadedModel
    from mlxkv.prompt_cache.block_cache import BlockCache


def cache_config(
    cache_dir: Path | None, hot: int | None, cold: int | None, no_cold: bool, log: Path | None
) -> CacheConfig:
    """What the common options ask for, with the defaults where they say nothing."""
    return CacheConfig(
        directory=None if no_cold else cache_dir or default_cache_dir(),
        hot_bytes=default_hot_bytes() if hot is None else hot,
        cold_bytes=COLD_BYTES if cold is None else cold,
        log=log,
    )


@contextmanager
def open_cache(
    model: LoadedModel, config: CacheConfig, output: Output, *, kv_bits: int | None = None
) -> Iterator[BlockCache]:
    """The model's cache, its weights wired; when the body ends, what waits is written, and what was lost is said."""
    from mlxkv.cache.store import BlockStore
    from mlxkv.engine.wiring import wire_weights
    from mlxkv.prompt_cache.block_cache import BlockCache

    with warnings_on(output):
        wire_weights()
        cache = BlockCache(model.module, model.fields, BlockStore(config), name=model.name, kv_bits=kv_bits)
        if cache.uncached:
            output.warn(cache.uncached)
        try:
            yield cache
        finally:
            lost = cache.close()
            if lost:
                output.warn(f"{lost} blocks did not reach the SSD and will be computed again")


@contextmanager
def warnings_on(output: Output) -> Iterator[None]:
    """Show what mlxkv's logger warns about as the command's own talk."""
    logger = logging.getLogger("mlxkv")
    handler = _Shown(output)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


class _Shown(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.warn(record.getMessage())
