"""Taking back what was published by mistake: it is never matched again, in memory, on its way to the SSD, or on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import ROOT, SMALL, payload_of, random_blocks

from mlxkv.cache.block_log import BlockLog
from mlxkv.cache.codec import BlockIdentity, checkpoint_identity
from mlxkv.cache.cold import ColdTier
from mlxkv.cache.names import pack
from mlxkv.cache.store import BlockStore, Plan
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import MIB

CHAIN = random_blocks(4, seed=11)


def opened(directory: Path, *, hot_bytes: int = MIB) -> BlockStore:
    store = BlockStore(
        CacheConfig(directory=directory, hot_bytes=hot_bytes, cold_bytes=4 * MIB, floor_bytes=0, daily_write_bytes=None)
    )
    store.register(ROOT, SMALL, {"model": "tiny"}, model="tiny")
    return store


@pytest.fixture(params=[MIB, 0], ids=["hot and cold", "cold only"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStore]:
    store = opened(tmp_path / "blocks", hot_bytes=request.param)
    yield store
    store.flush()
    assert store.pins() == 0
    store.check_integrity()
    store.close()


def commit(store: BlockStore, blocks: list[BlockIdentity]) -> None:
    for block in blocks:
        store.commit(block, tuple(payload_of(block, SMALL)))


def plan(store: BlockStore, blocks: list[BlockIdentity] = CHAIN) -> Plan:
    return store.plan(ROOT, b"".join(block.tokens for block in blocks) + pack([1]))


def matched(store: BlockStore, blocks: list[BlockIdentity] = CHAIN) -> int:
    found = plan(store, blocks)
    store.release(found)
    return found.match.tokens // 64


def hold_the_mover(store: BlockStore) -> threading.Event:
    """Let nothing be written until the event is set."""
    go_on = threading.Event()
    store._mover.submit(go_on.wait)
    return go_on


def test_a_withdrawn_block_and_what_continues_it_are_gone_from_both_tiers_and_after_a_restart(
    store: BlockStore, tmp_path: Path
) -> None:
    commit(store, CHAIN)
    assert store.flush()
    store.withdraw([CHAIN[2].name])
    assert matched(store) == 2
    assert store.flush()
    assert matched(store) == 2
    assert not store.cold.path(CHAIN[2]).exists()
    assert not store.cold.path(CHAIN[3]).exists()
    store.close()
    again = opened(tmp_path / "blocks")
    assert matched(again) == 2
    again.close()


def test_a_block_withdrawn_while_it_waits_for_the_ssd_never_gets_there(store: BlockStore) -> None:
    go_on = hold_the_mover(store)
    commit(store, CHAIN)
    assert matched(store) == 4
    store.withdraw([CHAIN[1].name])
    assert matched(store) == 1
    store.check_integrity()
    go_on.set()
    assert store.flush()
    assert matched(store) == 1
    assert [row.name for row in store.cold.rows()] == [CHAIN[0].name]


def test_what_is_computed_again_is_kept_though_the_withdrawn_one_is_still_being_written(store: BlockStore) -> None:
    go_on = hold_the_mover(store)
    commit(store, CHAIN)
    store.withdraw([CHAIN[1].name])
    commit(store, CHAIN[1:])
    assert matched(store) == 4
    go_on.set()
    assert store.flush()
    assert matched(store) == 4
    assert len(store.cold.rows()) == 4
    assert store.cold.counters.offloaded_blocks == 4 + 3


def test_a_pin_does_not_keep_a_withdrawn_block_and_is_given_back_all_the_same(store: BlockStore) -> None:
    commit(store, CHAIN)
    assert store.flush()
    held = plan(store)
    store.withdraw([CHAIN[3].name])
    assert matched(store) == 3
    commit(store, CHAIN[3:])
    again = plan(store)
    store.release(held)
    store.release(again)
    assert store.pins() == 0
    assert matched(store) == 4


def test_a_checkpoint_goes_with_its_block(store: BlockStore) -> None:
    commit(store, CHAIN)
    checkpoint = checkpoint_identity(CHAIN[3])
    store.commit(checkpoint, tuple(payload_of(checkpoint, SMALL)))
    store.withdraw([CHAIN[3].name])
    assert store.flush()
    assert checkpoint.name not in store.hot
    assert store.cold.find(checkpoint.name) is None


def test_the_reason_is_said_to_who_asks_next(tmp_path: Path) -> None:
    store = opened(tmp_path / "blocks")
    commit(store, CHAIN)
    store.withdraw([CHAIN[0].name])
    found = plan(store)
    store.release(found)
    assert found.reason == "withdrawn"
    store.close()


def test_a_tier_that_is_offline_deletes_them_when_it_is_back(tmp_path: Path) -> None:
    tier = ColdTier(tmp_path / "blocks", 4 * MIB, floor_bytes=0, daily_write_bytes=None, log=BlockLog())
    tier.open()
    tier.describe(ROOT, {"model": "tiny"})
    for block in CHAIN:
        assert tier.write(block, SMALL, [memoryview(array) for array in payload_of(block, SMALL)]) is None
    tier.path(CHAIN[0]).parents[2].rename(tmp_path / "away")
    (tmp_path / "blocks").write_text("in the way")
    tier._fail("the disk went away")
    tier._index.close()
    tier._index = None
    tier.withdraw([CHAIN[1].name])
    (tmp_path / "blocks").unlink()
    (tmp_path / "away").rename(tmp_path / "blocks")
    tier.retry(now=True)
    assert tier.offline is None
    assert [row.name for row in tier.rows()] == [CHAIN[0].name]
    tier.check_integrity()
    tier.close()
