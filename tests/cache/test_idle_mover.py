"""The writing thread sleeps while there is nothing to write; an offline tier wakes it for each try, and only then."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blocks import SMALL, payload_of, random_blocks, views_of
from sleeping import Waits

from mlxkv.cache import cold as cold_module
from mlxkv.cache.block_log import BlockLog
from mlxkv.cache.cold import ColdTier
from mlxkv.cache.mover import Mover
from mlxkv.core.units import MIB

WRITER = "mlxkv-write"
SOON_S = 20.0


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    monkeypatch.setattr(cold_module, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(cold_module, "LAST_RETRY_S", 0.05)
    return Waits(monkeypatch)


@pytest.fixture
def moved(waits: Waits, tmp_path: Path) -> Iterator[tuple[ColdTier, Mover]]:
    del waits  # the queues are made after it
    tier = ColdTier(tmp_path / "blocks", 4 * MIB, floor_bytes=0, daily_write_bytes=None, log=BlockLog())
    tier.open()
    mover = Mover(tier, MIB)
    yield tier, mover
    assert mover.close(SOON_S)
    tier.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def write(mover: Mover, seed: int) -> str | None:
    """Write a block; why it is not held, if it is not."""
    (block,) = random_blocks(1, seed)
    assert mover.offload(block, SMALL, views_of(payload_of(block, SMALL)))
    assert mover.flush(SOON_S)
    return mover.done()[-1].reason


def test_while_the_tier_works_the_writer_sleeps_until_it_is_told(moved: tuple[ColdTier, Mover], waits: Waits) -> None:
    assert write(moved[1], 1) is None
    assert set(waits.of(WRITER)) == {None}


def test_a_tier_that_a_reader_found_failing_comes_back_without_a_write(
    moved: tuple[ColdTier, Mover], waits: Waits
) -> None:
    tier, mover = moved
    assert write(mover, 1) is None
    before = len(waits.of(WRITER))
    tier._suspect(sqlite3.DatabaseError("file is not a database"))  # what a read on another thread does
    until(lambda: tier.offline is None)
    until(lambda: waits.of(WRITER)[-1] is None)
    assert len(waits.of(WRITER)) - before <= 3, "the nudge, the try, and asleep again"
    assert write(mover, 2) is None


def test_a_tier_whose_directory_is_gone_is_tried_again_with_longer_waits(
    moved: tuple[ColdTier, Mover], waits: Waits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, mover = moved
    tries: list[float] = []
    opening = tier.open
    monkeypatch.setattr(tier, "open", lambda: (tries.append(time.monotonic()), opening()))
    (tmp_path / "blocks").rename(tmp_path / "away")
    (tmp_path / "blocks").write_text("in the way")
    before = len(waits.of(WRITER))
    assert write(mover, 1) == "write failed"
    until(lambda: len(tries) >= 4)
    woken = len(waits.of(WRITER)) - before
    assert woken <= 2 * len(tries) + 5, "once for each try and once for each that failed"
    assert max(timeout or 0 for timeout in waits.of(WRITER)) > 0.02
    (tmp_path / "blocks").unlink()
    (tmp_path / "away").rename(tmp_path / "blocks")
    until(lambda: tier.offline is None)
    until(lambda: waits.of(WRITER)[-1] is None)
    assert write(mover, 2) is None
