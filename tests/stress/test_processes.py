"""Several processes, and several tiers of one process, on one root."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from blocks import OTHER_ROOT, ROOT, block_layout, payload_of, random_blocks, views_of
from driving import block_files

from mlxkv.cache.codec import inspect
from mlxkv.cache.cold import ColdTier
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import GIB, KIB

TESTS = Path(__file__).parents[1]
LAYOUT = block_layout(16 * KIB)
WAIT_S = 20.0


def open_store(directory: Path, root: bytes = ROOT, *, hot_bytes: int = GIB) -> BlockStore:
    store = BlockStore(CacheConfig(directory=directory, hot_bytes=hot_bytes, cold_bytes=GIB, floor_bytes=0))
    store.register(root, LAYOUT, {}, model="tiny")
    return store


def commit(store: BlockStore, blocks: list[Any]) -> None:
    for block in blocks:
        store.commit(block, tuple(payload_of(block, LAYOUT)))


def delete(store: BlockStore, index: int) -> None:
    """The blocks at a place of their chains go, and what continues them; on the thread that may do it."""
    cold, mover = store.cold, store._mover
    assert cold is not None
    assert mover is not None
    mover.submit(lambda: cold.delete([row for row in cold.rows() if row.index == index], reason="test"))
    assert mover.flush(WAIT_S)


def test_two_processes_commit_and_restore_on_one_root_and_every_answer_is_right(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "MLXKV_BLAS": "none"}
    workers = [
        subprocess.Popen(
            [sys.executable, TESTS / "stress" / "worker.py", directory, seed],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    found = [json.loads(worker.communicate(timeout=120)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert [result["wrong"] for result in found] == [0, 0]
    assert all(result["reused"] > result["computed"] for result in found)
    store = open_store(directory)
    assert store.cold is not None
    store.check_integrity()
    rows = store.cold.rows()
    assert {store.cold.path(row) for row in rows} == set(block_files(directory))
    assert all(inspect(store.cold.path(row), payload=True)[0] == row.identity for row in rows)
    assert store.cold.used_bytes <= 1600 * KIB
    assert list(directory.rglob("*.tmp")) == []
    assert not (directory / "quarantine").exists()
    store.close()


def test_what_one_process_writes_another_finds_without_a_restart(tmp_path: Path) -> None:
    a, b = open_store(tmp_path / "blocks"), open_store(tmp_path / "blocks")
    chain = random_blocks(4, seed=1)
    commit(a, chain)
    assert a.flush(WAIT_S)
    packed = b"".join(block.tokens for block in chain) + bytes(4)
    plan = b.plan(ROOT, packed)
    assert plan.match.tokens_of("cold") == 256
    b.release(plan)
    commit(b, chain)
    assert b.close() == 0
    assert b.cold is not None
    assert b.cold.counters.offloaded_blocks == 0, "what is there is not written twice"
    a.close()


def test_a_block_evicted_by_another_process_is_a_miss(tmp_path: Path) -> None:
    a, b = open_store(tmp_path / "blocks"), open_store(tmp_path / "blocks", hot_bytes=0)
    chain = random_blocks(4, seed=1)
    commit(a, chain)
    assert a.flush(WAIT_S)
    plan = b.plan(ROOT, b"".join(block.tokens for block in chain) + bytes(4))
    delete(a, index=2)
    room = {part.index: [bytearray(t.nbytes()) for t in LAYOUT.tensors] for part in plan.match.parts}
    everything = list(range(len(LAYOUT.tensors)))
    views = lambda index: ([memoryview(array) for array in room[index]], everything)  # noqa: E731
    read = b.read(ROOT, plan.match.parts, LAYOUT, views, WAIT_S).finish()
    assert (read.parts, read.overran) == (2, False)
    assert [b.why_gone(block.name) for block in chain] == [None, None, "evicted", None]
    b.release(plan)
    b.check_integrity()
    a.close()
    b.close()


def test_a_block_whose_parent_another_process_evicted_is_not_written(tmp_path: Path) -> None:
    store = open_store(tmp_path / "blocks")
    first, second = random_blocks(2, seed=1)
    commit(store, [first])
    assert store.flush(WAIT_S)
    delete(store, index=0)
    assert store.cold is not None
    assert store.cold.write(second, LAYOUT, views_of(payload_of(second, LAYOUT))) == "parent not held"
    assert block_files(tmp_path / "blocks") == []
    store.check_integrity()
    store.close()


def test_opening_a_second_tier_leaves_what_the_first_is_writing_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writing, go = threading.Event(), threading.Event()
    real = ColdTier._write_file

    def slow(self: ColdTier, *arguments: Any) -> tuple[int, int]:
        done = real(self, *arguments)
        writing.set()
        assert go.wait(WAIT_S)
        return done

    monkeypatch.setattr(ColdTier, "_write_file", slow)
    first = open_store(tmp_path / "blocks")
    commit(first, random_blocks(1, seed=1))
    assert writing.wait(WAIT_S)
    second = open_store(tmp_path / "blocks", OTHER_ROOT)  # another model of this process
    go.set()
    assert first.flush(WAIT_S)
    assert len(block_files(tmp_path / "blocks")) == 1
    assert second.cold is not None
    assert second.cold.totals()[0] == 1
    for store in (first, second):
        store.check_integrity()
        store.close()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []
