"""A budget holds at every instant, counted in physical bytes of the whole root, whoever else writes there."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blocks import OTHER_ROOT, ROOT, block_layout, payload_of, random_blocks
from driving import block_files

from mlxkv.cache import store as store_module
from mlxkv.cache.codec import BlockIdentity
from mlxkv.cache.cold import INDEX_ROOM_BYTES, WAL_ROOM_BYTES
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import GIB, KIB, MIB

TESTS = Path(__file__).parents[1]
LAYOUT = block_layout(64 * KIB)
BLOCK_BYTES = 68 * KIB  # of the file: payload and header in whole pages
BUDGET = 6 * MIB
SOON_S = 20.0


class Sampler:
    """A thread that adds up the root every 10 ms; `highest` is the most it ever saw.

    Looking takes a while, and a block that goes meanwhile would be counted along with the one that takes its place.
    So it looks twice and counts what is there both times: all of that existed at the moment between.
    """

    def __init__(self, directory: Path) -> None:
        self.highest = self.samples = 0
        self._directory = directory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            before = sizes(self._directory)
            after = sizes(self._directory)
            self.highest = max(self.highest, sum(min(before[i], after[i]) for i in before.keys() & after.keys()))
            self.samples += 1


def physical_bytes(directory: Path) -> int:
    """Of every file and directory under `directory`, itself too."""
    return sum(sizes(directory).values())


def sizes(directory: Path) -> dict[tuple[str, int], int]:
    """Physical bytes of everything there is, by path and inode; what vanishes meanwhile is left out."""
    found = {}
    waiting = [str(directory)]
    while waiting:
        path = waiting.pop()
        try:
            status = os.lstat(path)
            found[path, status.st_ino] = status.st_blocks * 512
            if stat.S_ISDIR(status.st_mode):
                waiting += [entry.path for entry in os.scandir(path)]
        except FileNotFoundError:
            continue
    return found


def open_store(directory: Path, *roots: bytes, **settings: Any) -> BlockStore:
    defaults: dict[str, Any] = {"hot_bytes": 0, "cold_bytes": BUDGET, "floor_bytes": 0, "queue_bytes": 256 * KIB}
    store = BlockStore(CacheConfig(directory=directory, **{**defaults, **settings}))
    for root in roots or (ROOT,):
        store.register(root, LAYOUT, {"name": root.hex()}, model="tiny")
    return store


def write_chain(store: BlockStore, seed: int, root: bytes = ROOT, blocks: int = 10) -> list[BlockIdentity]:
    """Commit one chain, waiting for the queue as an engine does while it computes."""
    chain = random_blocks(blocks, seed, root)
    for block in chain:
        store.commit(block, tuple(payload_of(block, LAYOUT)))
        assert store._mover is not None
        store._mover.flush(SOON_S)
    return chain


def cold_bytes(store: BlockStore) -> int:
    assert store.cold is not None
    return store.cold.used_bytes


def test_two_models_on_one_root_share_one_budget_at_every_instant(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    with Sampler(directory) as sampler:
        a, b = open_store(directory, ROOT), open_store(directory, OTHER_ROOT)
        for seed in range(30):
            write_chain(*((a, seed, ROOT) if seed % 3 else (b, seed, OTHER_ROOT)))
        for store in (a, b):
            store.check_integrity()
            assert store.cold is not None
            assert store.cold.counters.evicted_blocks > 0
            store.close()
    assert sampler.samples > 20
    assert BUDGET - 10 * BLOCK_BYTES < sampler.highest <= BUDGET + BLOCK_BYTES


WRITER = """
import sys
sys.path[:0] = [sys.argv[3], sys.argv[3] + "/stress"]
from pathlib import Path
from blocks import OTHER_ROOT, ROOT
import test_budget

first = int(sys.argv[2])
store = test_budget.open_store(Path(sys.argv[1]), ROOT if first % 2 else OTHER_ROOT)
for seed in range(first, first + 18):
    test_budget.write_chain(store, seed, ROOT if first % 2 else OTHER_ROOT)
store.check_integrity()
store.close()
"""


def test_two_processes_on_one_root_share_one_budget_at_every_instant(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    with Sampler(directory) as sampler:
        commands = [[sys.executable, "-c", WRITER, str(directory), str(first), str(TESTS)] for first in (1000, 2001)]
        writers = [subprocess.Popen(command) for command in commands]
        assert [writer.wait(60) for writer in writers] == [0, 0]
    assert BUDGET - 10 * BLOCK_BYTES < sampler.highest <= BUDGET + BLOCK_BYTES
    store = open_store(directory)
    store.check_integrity()
    store.close()


def test_a_lower_budget_deletes_down_to_it_when_it_is_opened_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "blocks"
    store = open_store(directory, ROOT)
    for seed in range(9):
        write_chain(store, seed)
    store.close()
    assert physical_bytes(directory) > BUDGET - MIB
    store = open_store(directory, OTHER_ROOT)
    for seed in range(9, 14):
        write_chain(store, seed, OTHER_ROOT)
        assert physical_bytes(directory) <= BUDGET + BLOCK_BYTES
    store.close()
    before = len(block_files(directory))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    store = open_store(directory, cold_bytes=BUDGET // 2)
    assert physical_bytes(directory) <= BUDGET // 2
    gone = before - len(block_files(directory))
    assert gone > 10
    assert f"deleted {gone} blocks" in caplog.text
    store.check_integrity()
    store.close()


def test_a_budget_too_small_for_one_block_writes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path / "blocks", cold_bytes=MIB // 2)
    write_chain(store, seed=1)
    assert block_files(tmp_path / "blocks") == []
    assert store.cold is not None
    assert store.cold.refused["no room"] > 0
    assert caplog.text.count("no room within 512.00 KiB") == 1
    store.close()


def test_a_block_never_takes_the_place_of_its_own_parent(tmp_path: Path) -> None:
    store = open_store(tmp_path / "measured")
    write_chain(store, seed=1, blocks=1)
    for_one = cold_bytes(store) + INDEX_ROOM_BYTES
    store.close()
    store = open_store(tmp_path / "blocks", cold_bytes=for_one)
    first = write_chain(store, seed=1, blocks=3)[0]
    assert [path.stem for path in block_files(tmp_path / "blocks")] == [first.name.hex()]
    store.check_integrity()
    store.close()


@contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """16 MiB of disk in memory at `directory`."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False) if sys.platform == "linux" else None
    if done is None or done.returncode:
        pytest.skip(f"cannot mount a disk in memory: {done.stderr.strip() if done else sys.platform}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_the_floor_of_free_disk_is_never_crossed_and_others_get_their_room_back(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk):
        store = open_store(disk / "blocks", cold_bytes=GIB, floor_bytes=4 * MIB)
        for seed in range(30):
            write_chain(store, seed)
            assert shutil.disk_usage(disk).free >= 4 * MIB
        assert shutil.disk_usage(disk).free < 5 * MIB
        store.check_integrity()
        (disk / "others").write_bytes(os.urandom(3 * MIB))
        write_chain(store, seed=99)
        assert shutil.disk_usage(disk).free >= 4 * MIB
        store.check_integrity()
        store.close()


def test_what_the_log_may_still_grow_by_is_kept_free(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk):
        floor = shutil.disk_usage(disk).free - WAL_ROOM_BYTES
        store = open_store(disk / "blocks", cold_bytes=GIB, floor_bytes=floor)
        write_chain(store, seed=1)
        assert store.cold is not None
        assert store.cold.refused["no room"]
        assert block_files(disk / "blocks") == []
        store.close()


def test_what_others_put_into_the_root_is_counted_at_the_next_write(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    store, other = open_store(directory, ROOT), open_store(directory, OTHER_ROOT)
    write_chain(store, seed=1, blocks=60)
    assert physical_bytes(directory) > BUDGET - 2 * MIB
    (directory / "theirs").write_bytes(os.urandom(2 * MIB))
    write_chain(other, seed=2, root=OTHER_ROOT, blocks=1)
    write_chain(store, seed=3, blocks=1)
    assert physical_bytes(directory) <= BUDGET + BLOCK_BYTES
    for each in (store, other):
        each.check_integrity()
        each.close()


def test_the_daily_write_allowance_is_kept_across_restarts_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "REFUSED_PAUSE_S", 0.0)
    allowance = 5 * BLOCK_BYTES
    for seed in (1, 2):
        store = open_store(tmp_path / "blocks", daily_write_bytes=allowance, hot_bytes=GIB)
        write_chain(store, seed, blocks=8)
        assert len(store.hot) == 8
        assert len(block_files(tmp_path / "blocks")) == 5
        assert not store.flush(1.0)
        assert store.close() == (3 if seed == 1 else 8)
    assert caplog.text.count("were written today") == 2, "once a process"
    monkeypatch.setattr("mlxkv.cache.cold._today", lambda: "2999-01-01")
    store = open_store(tmp_path / "blocks", daily_write_bytes=allowance, hot_bytes=GIB)
    write_chain(store, seed=3, blocks=4)
    assert store.close() == 0


def test_second_use_writes_a_block_the_second_time_it_is_seen(tmp_path: Path) -> None:
    store = open_store(tmp_path / "blocks", hot_bytes=0, cold_mode="second-use")
    write_chain(store, seed=1)
    assert block_files(tmp_path / "blocks") == []
    write_chain(store, seed=2)
    write_chain(store, seed=1)
    assert len(block_files(tmp_path / "blocks")) == 10
    store.close()
    assert len(block_files(tmp_path / "blocks")) == 10, "the chain seen once is not written, not at the end either"


def test_second_use_writes_a_chain_that_was_reused_from_memory(tmp_path: Path) -> None:
    store = open_store(tmp_path / "blocks", hot_bytes=GIB, cold_mode="second-use")
    once, twice = write_chain(store, seed=1), write_chain(store, seed=2)
    packed = b"".join(block.tokens for block in twice) + bytes(4)
    plan = store.plan(ROOT, packed)
    assert plan.match.tokens == 640
    store.used(plan.match.parts)
    store.release(plan)
    assert store.close() == 0
    names = {path.stem for path in block_files(tmp_path / "blocks")}
    assert names == {block.name.hex() for block in twice}
    assert not names & {block.name.hex() for block in once}


def test_evicting_to_make_room_is_quick(tmp_path: Path) -> None:
    store = open_store(tmp_path / "blocks", cold_bytes=3 * MIB)
    started = time.monotonic()
    for seed in range(8):
        write_chain(store, seed)
    assert time.monotonic() - started < 10
    store.close()
