"""Settings of a cache, with defaults that a stranger need not touch. None of them changes what a block is called."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlxkv.core.units import GIB, MIB

ColdMode = Literal["through", "second-use", "off"]

HOT_SHARE = 8  # the hot tier may hold one eighth of RAM
COLD_BYTES = 20 * GIB
QUEUE_BYTES = 512 * MIB
DAILY_WRITE_BYTES = 64 * GIB
FLOOR_SHARE, MOST_FLOOR_BYTES = 20, 10 * GIB  # keep a twentieth of the disk free, at most 10 GiB


def default_hot_bytes() -> int:
    """An eighth of the machine's memory: 3 GiB of 24."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // HOT_SHARE


def default_floor_bytes(directory: Path) -> int:
    """A twentieth of the disk that `directory` is (or will be) on, at most 10 GiB."""
    there = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    return min(shutil.disk_usage(there).total // FLOOR_SHARE, MOST_FLOOR_BYTES)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What a block store may use.

    Args:
        directory: root of the cold tier; None keeps everything in memory.
        hot_bytes, cold_bytes: budgets; 0 switches the tier off.
        cold_mode: `through` writes every block, `second-use` a block seen twice, `off` none.
        queue_bytes: most that may wait for the SSD.
        floor_bytes: free disk that is never used; None takes `default_floor_bytes`.
        daily_write_bytes: most that is written in a day (UTC), None for no limit.
        log: file of the block log, None for none.
    """

    directory: Path | None
    hot_bytes: int
    cold_bytes: int = COLD_BYTES
    cold_mode: ColdMode = "through"
    queue_bytes: int = QUEUE_BYTES
    floor_bytes: int | None = None
    daily_write_bytes: int | None = DAILY_WRITE_BYTES
    log: Path | None = None
