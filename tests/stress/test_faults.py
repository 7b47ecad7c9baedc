"""Whatever happens to the cache directory, a request succeeds and its answer is the one without a cache.

One clear warning says what is wrong; when it is right again the cold tier comes back without a manual step.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache as remember
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest
from blocks import ROOT, block_layout, payload_of, random_blocks
from driving import (
    Fresh,
    assert_equals_fresh,
    assert_same_state,
    block_files,
    compute,
    run_fresh,
    run_warm,
    some_tokens,
    state_of,
)
from tiny import build_tiny, tiny_llama

from mlxkv.cache import cold as cold_module
from mlxkv.cache import store as store_module
from mlxkv.cache.codec import inspect
from mlxkv.cache.cold import QUARANTINE, ColdTier, absent_mount_point
from mlxkv.cache.index import FILE_NAME, Index
from mlxkv.cache.layout import Layout
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.errors import CacheRootError
from mlxkv.core.units import GIB, KIB, MIB
from mlxkv.prompt_cache.block_cache import BlockCache

TESTS = Path(__file__).parents[1]
LAYOUT = block_layout(16 * KIB)
SOON_S = 10.0


@remember
def llama() -> nn.Module:
    return build_tiny(tiny_llama())


@remember
def fresh(seed: int) -> Fresh:
    """A prompt of three blocks and eight tokens, computed without a cache."""
    return run_fresh(llama(), some_tokens(200, seed=seed))


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits before another try, shortened."""
    monkeypatch.setattr(cold_module, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(cold_module, "LAST_RETRY_S", 0.1)
    monkeypatch.setattr(store_module, "REFUSED_PAUSE_S", 0.0)


def open_cache(directory: Path, *, hot: str | int = "64MiB", cold: str | int = "1GiB") -> BlockCache:
    return BlockCache.open(llama(), cache_dir=directory, hot=hot, cold=cold)


def open_store(directory: Path, **settings: Any) -> BlockStore:
    """A store without a model, whose blocks take 16 KiB and a header."""
    defaults: dict[str, Any] = {"hot_bytes": 64 * MIB, "cold_bytes": GIB, "floor_bytes": 0}
    store = BlockStore(CacheConfig(directory=directory, **{**defaults, **settings}))
    store.register(ROOT, LAYOUT, {}, model="tiny")
    return store


def commit(store: BlockStore, blocks: list[Any], layout: Layout = LAYOUT) -> None:
    for block in blocks:
        store.commit(block, tuple(payload_of(block, layout)))


def ask(cache: BlockCache, seed: int = 1) -> int:
    """One request, equal to cold; returns the tokens that were reused."""
    warm = run_warm(cache, llama(), fresh(seed).prompt)
    assert_equals_fresh(warm, fresh(seed))
    assert cache.store.pins() == 0
    return warm.held


def forget_hot(cache: BlockCache | BlockStore) -> None:
    """Empty the hot tier, so that the next request needs the SSD."""
    store = cache if isinstance(cache, BlockStore) else cache.store
    store._collect()
    while store.hot.evict() is not None:
        pass


def on_its_thread(store: BlockStore, work: Callable[[], object]) -> None:
    """Have the mover do something to the cold tier, as only its thread may, and wait for it."""
    assert store._mover is not None
    store._mover.submit(work)
    assert store._mover.flush(SOON_S)


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.005)


def comes_back(cache: BlockCache) -> None:
    """The cold tier works again by itself, and holds what a request needs next."""
    cold = cache.store.cold
    assert cold is not None
    eventually(lambda: cold.offline is None)
    ask(cache)
    assert cache.store.flush(SOON_S)
    forget_hot(cache)
    assert ask(cache) == 192
    cache.check_integrity()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a person was told is wrong; not that it works again."""
    found = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    return [text for text in found if not text.endswith("works again")]


def is_whole(directory: Path, *, lost_files: int = 0) -> None:
    """Every block file is sound and indexed, nothing is half written, and the sums are those of the disk.

    Args:
        lost_files: so many rows may lack their file, as a kill in the middle of an eviction leaves them: a miss each.
    """
    tier = ColdTier(directory, 2**62, floor_bytes=0, daily_write_bytes=None, log=store_module.BlockLog())
    tier.open()
    assert tier.offline is None
    lost = [row for row in tier.rows() if not tier.path(row).exists()]
    assert len(lost) <= lost_files
    for row in lost:
        tier.forget(row.identity, FileNotFoundError("lost"))
    rows = tier.rows()
    tier.check_integrity()
    assert {tier.path(row) for row in rows} == set(block_files(directory))
    for row in rows:
        assert inspect(tier.path(row), payload=True)[0] == row.identity
        assert os.stat(tier.path(row)).st_blocks * 512 == row.nbytes
    assert [path for path in directory.rglob("*") if path.name.endswith(".tmp")] == []
    tier.close()


@contextmanager
def mounted(directory: Path, size: str) -> Iterator[None]:
    """A small disk in memory at `directory`."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False) if sys.platform == "linux" else None
    if done is None or done.returncode:
        pytest.skip(f"cannot mount a disk in memory: {done.stderr.strip() if done else sys.platform}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def remount(directory: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(directory)], check=True, capture_output=True)


# full disks


def test_a_disk_smaller_than_the_budget_keeps_its_floor_free_and_the_newest_prompts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(tmp_path / "disk", "2m"), open_cache(tmp_path / "disk" / "blocks", hot=0) as cache:
        for seed in range(1, 9):
            ask(cache, seed)
            assert cache.store.flush(SOON_S)
            assert shutil.disk_usage(tmp_path / "disk").free >= 2 * MIB // 20
        assert cache.store.cold is not None
        assert cache.store.cold.counters.evicted_blocks > 0
        assert ask(cache, 8) == 192
        cache.check_integrity()
    assert warnings(caplog) == []


def fill(path: Path) -> None:
    """Write until the disk of `path` is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(KIB))


def test_a_disk_that_fills_up_behind_our_back_costs_one_warning_and_is_used_again_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "disk" / "blocks"
    with mounted(tmp_path / "disk", "2m"):
        with open_cache(directory) as cache:
            ask(cache, seed=1)
            assert cache.store.flush(SOON_S)
            plenty = shutil.disk_usage(tmp_path)
            monkeypatch.setattr(cold_module.shutil, "disk_usage", lambda _: plenty)
            filler = tmp_path / "disk" / "filler"
            fill(filler)
            for seed in (2, 3):
                ask(cache, seed)
                assert not cache.store.flush(SOON_S)
            forget_hot(cache)
            assert ask(cache, seed=1) == 192, "what was written before is still good"
            assert len(block_files(directory)) == 3
            assert [path for path in directory.rglob(".*") if path.name.endswith(".tmp")] == []
            assert len(warnings(caplog)) == 1
            assert "cannot write" in warnings(caplog)[0]
            filler.unlink()
            comes_back(cache)
            ask(cache, seed=2)
            assert cache.store.flush(SOON_S)
        is_whole(directory)
        with open_cache(directory) as cache:
            assert (ask(cache, seed=1), ask(cache, seed=2)) == (192, 192)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to let any file of this process grow beyond `size`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_index_that_may_not_grow_leaves_requests_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_cache(tmp_path / "blocks") as cache:
        with largest_file(32 * KIB):
            ask(cache)
            assert not cache.store.flush(SOON_S)
            assert ask(cache) == 199
            assert block_files(tmp_path / "blocks") == []
        assert len(warnings(caplog)) == 1
        assert "cannot write" in warnings(caplog)[0]
        comes_back(cache)
    is_whole(tmp_path / "blocks")


def test_a_block_cut_by_a_limit_on_files_is_never_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    large = block_layout(MIB)
    store = open_store(tmp_path / "blocks")
    store.register(ROOT, large, {}, model="tiny")
    chain = random_blocks(3, seed=1)
    commit(store, chain[:1], large)
    assert store.flush(SOON_S)
    cold = store.cold
    assert cold is not None
    with largest_file(MIB // 2):
        commit(store, chain[1:], large)
        for _ in range(3):
            assert not store.flush(SOON_S)
            eventually(lambda: cold.offline is None)  # open again: that it cannot be written shows at the next write
        assert cold.totals()[0] == len(block_files(tmp_path / "blocks")) == 1
        assert list(tmp_path.rglob("*.tmp")) == []
    assert len(warnings(caplog)) == 1
    assert os.strerror(errno.EFBIG) in warnings(caplog)[0]
    store.check_integrity()
    assert store.close() == 0, "the blocks that were refused are offered again"
    is_whole(tmp_path / "blocks")
    assert len(block_files(tmp_path / "blocks")) == 3


# a root that cannot be used


def test_a_read_only_disk_means_memory_only_until_it_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "disk" / "blocks"
    with mounted(tmp_path / "disk", "8m"):
        with open_cache(directory) as cache:
            ask(cache)
        remount(tmp_path / "disk", "ro")
        with open_cache(directory) as cache:
            assert (ask(cache), ask(cache)) == (0, 199)
            assert len(warnings(caplog)) == 1
            assert "read-only" in warnings(caplog)[0]
            remount(tmp_path / "disk", "rw")
            comes_back(cache)
        is_whole(directory)


def test_a_plain_file_in_the_place_of_the_root_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "blocks"
    directory.write_text("mine")
    with open_cache(directory) as cache:
        assert (ask(cache), ask(cache)) == (0, 199)
        assert directory.read_text() == "mine"
        assert len(warnings(caplog)) == 1
        directory.unlink()
        comes_back(cache)


def test_a_link_to_nothing_in_the_place_of_the_root_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "blocks"
    directory.symlink_to(tmp_path / "elsewhere")
    with open_cache(directory) as cache:
        assert (ask(cache), ask(cache)) == (0, 199)
        assert not (tmp_path / "elsewhere").exists()
        assert len(warnings(caplog)) == 1
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        comes_back(cache)


@pytest.fixture
def absent() -> Iterator[Path]:
    """Where a disk of this name would be mounted; removed when somebody makes it up."""
    path = Path("/Volumes/MLXKV-TEST-ABSENT")
    yield path
    if path.exists():
        shutil.rmtree(path)


def test_a_disk_that_is_not_mounted_is_never_made_up(absent: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_cache(absent / "cache") as cache:
        assert (ask(cache), ask(cache)) == (0, 199)
        cache.check_integrity()
    assert not absent.exists()
    assert len(warnings(caplog)) == 1
    assert "not mounted" in warnings(caplog)[0]


@pytest.mark.parametrize("disk", [Path("/mnt"), Path("/")])
def test_a_directory_to_be_made_on_a_disk_mounted_at_mnt_itself_is_not_absent(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == disk)
    wanted = Path("/mnt/mlxkv-test-absent/cache")
    assert absent_mount_point(wanted) == (None if disk == Path("/mnt") else wanted.parent)


def test_a_root_that_others_may_write_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks").chmod(0o777)
    with pytest.raises(CacheRootError, match="chmod go-w"):
        open_cache(tmp_path / "blocks")


def test_without_a_cold_tier_nothing_is_created(tmp_path: Path) -> None:
    with open_cache(tmp_path / "blocks", cold=0) as cache:
        assert (ask(cache), ask(cache)) == (0, 199)
    assert not (tmp_path / "blocks").exists()


# things that happen to the directory while it is used


def test_a_directory_removed_while_running_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_cache(tmp_path / "blocks") as cache:
        ask(cache)
        assert cache.store.flush(SOON_S)
        shutil.rmtree(tmp_path / "blocks")
        forget_hot(cache)
        assert ask(cache) == 0
        ask(cache, seed=2)
        cache.store.flush(SOON_S)
        assert len(warnings(caplog)) == 1
        comes_back(cache)
    is_whole(tmp_path / "blocks")


def test_block_directories_removed_while_running_are_made_again(tmp_path: Path) -> None:
    with open_cache(tmp_path / "blocks") as cache:
        ask(cache)
        assert cache.store.flush(SOON_S)
        for path in block_files(tmp_path / "blocks"):
            shutil.rmtree(path.parents[1], ignore_errors=True)
        forget_hot(cache)
        assert ask(cache) == 0
        comes_back(cache)
    is_whole(tmp_path / "blocks")


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ELOOP])
def test_an_unreadable_file_costs_its_block_and_what_follows(
    code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(tmp_path / "blocks") as cache:
        ask(cache)
    bad = next(path for path in block_files(tmp_path / "blocks") if inspect(path, payload=False)[0].index == 1)
    real_open = os.open

    def failing_open(path: Any, *arguments: Any, **named: Any) -> int:
        if os.fspath(path) == str(bad):
            raise OSError(code, os.strerror(code), str(path))
        return real_open(path, *arguments, **named)

    with open_cache(tmp_path / "blocks") as cache:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", failing_open)
            assert ask(cache) == 64
            assert cache.store.flush(SOON_S)
        assert len(warnings(caplog)) == 1
        assert os.strerror(code) in warnings(caplog)[0]
        comes_back(cache)
    is_whole(tmp_path / "blocks")


def test_a_read_that_overruns_its_deadline_is_computed_and_what_it_writes_later_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(tmp_path / "blocks") as cache:
        ask(cache)
    go, late = threading.Event(), threading.Event()
    real_read = ColdTier.read

    def slow_read(self: ColdTier, block: Any, layout: Any, views: Any, tensors: Any) -> int:
        if block.index != 1:
            return real_read(self, block, layout, views, tensors)
        assert go.wait(SOON_S)
        for view in views:
            view[:] = b"\x7f" * view.nbytes
        late.set()
        raise FileNotFoundError("too late")

    with open_cache(tmp_path / "blocks") as cache:
        with monkeypatch.context() as patch:
            patch.setattr(ColdTier, "read", slow_read)
            cache.prefill_rate.value = 1e5  # so that the deadline is near
            sequence = cache.start(fresh(1).prompt)
            assert (sequence.held, sequence.plan.reason) == (64, "slower than computing")
            for at, end in ((64, 128), (128, 192)):
                compute(llama(), sequence.prompt_cache, fresh(1).prompt, at, [end])
            go.set()
            assert late.wait(SOON_S)
        logits = compute(llama(), sequence.prompt_cache, fresh(1).prompt, 192, [199, 200])
        assert_same_state(state_of(sequence.prompt_cache), fresh(1).state)
        assert np.abs(logits - fresh(1).logits).max() == 0.0
        sequence.finish()
        cache.prefill_rate.value = None
        comes_back(cache)


# other people's files


def test_foreign_files_are_neither_opened_nor_deleted_nor_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "blocks"
    with open_cache(directory) as cache:
        ask(cache)
    block = block_files(directory)[0]
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    other = block.with_name("0" * 64 + ".safetensors")
    companion = block.with_name(f"._{block.name}")
    companion.write_bytes(bytes.fromhex("0005160700020000").ljust(4096, b"\0"))
    (directory / ".DS_Store").write_text("mine")
    (directory / "movie.mp4").write_bytes(bytes(MIB))
    other.mkdir()
    link = block.with_name("1" * 64 + ".safetensors")
    link.symlink_to(outside)
    (directory / FILE_NAME).unlink()  # so that the files are searched
    with open_cache(directory) as cache:
        assert ask(cache) == 192
        cold = cache.store.cold
        assert cold is not None
        on_its_thread(cache.store, lambda: cold.delete(cold.rows(), reason="clear"))
        assert cold.totals()[0] == 0
    for path in (companion, directory / ".DS_Store", directory / "movie.mp4", other, outside):
        assert path.exists(), path
    assert link.is_symlink()
    assert warnings(caplog) == []
    assert not (directory / QUARANTINE).exists()


def test_foreign_files_count_against_the_budget(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir(mode=0o700)
    (tmp_path / "blocks" / "movie.mp4").write_bytes(os.urandom(MIB))
    store = open_store(tmp_path / "blocks", cold_bytes=2 * MIB)
    for seed in range(12):
        commit(store, random_blocks(5, seed))
    store.close()
    assert MIB < physical_bytes(tmp_path / "blocks") <= 2 * MIB
    assert block_files(tmp_path / "blocks")


def physical_bytes(directory: Path) -> int:
    return sum(os.lstat(path).st_blocks * 512 for path in [directory, *directory.rglob("*")])


# the index


def overwrite(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def delete(index: Path) -> None:
    for path in index.parent.glob(f"{index.name}*"):
        path.unlink()


def letters(directory: Path) -> list[str]:
    return [path.read_text() for path in directory.rglob("letter.txt")]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": delete,
    "deleted without its log": lambda index: index.unlink(),
    "emptied": lambda index: os.truncate(index, 0),
    "cut": lambda index: os.truncate(index, 5000),
    "no database": lambda index: index.write_bytes(b"garbage" * 4000),
    "damaged header": lambda index: overwrite(index, 16, b"\xff" * 84),
    "damaged pages": lambda index: overwrite(index, 4096, b"\xa5" * 16384),
    "zeroed": lambda index: overwrite(index, 0, bytes(index.stat().st_size)),
    "another schema": lambda index: (delete(index), make_other_database(index)),
    "a directory in its place": lambda index: (delete(index), make_directory(index)),
    "a directory in its log's place": lambda index: (delete(index), make_directory(Path(f"{index}-wal"))),
}


def make_directory(path: Path) -> None:
    path.mkdir()
    (path / "letter.txt").write_text("not a block")


def make_other_database(index: Path) -> None:
    connection = sqlite3.connect(index)
    connection.executescript("CREATE TABLE blocks (name TEXT); INSERT INTO blocks VALUES ('x');")
    connection.close()


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_index_damaged_between_runs_is_made_again_from_the_files(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_cache(tmp_path / "blocks") as cache:
        ask(cache)
    DAMAGE[damage](tmp_path / "blocks" / FILE_NAME)
    with open_cache(tmp_path / "blocks") as cache:
        assert ask(cache) == 192
        cache.check_integrity()
    assert len(warnings(caplog)) == (not damage.startswith(("deleted", "emptied")))
    assert letters(tmp_path) == ["not a block"] * damage.startswith("a directory")
    is_whole(tmp_path / "blocks")


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_index_damaged_while_running_never_reaches_a_request(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_cache(tmp_path / "blocks") as cache:
        ask(cache)
        assert cache.store.flush(SOON_S)
        DAMAGE[damage](tmp_path / "blocks" / FILE_NAME)
        for seed in (1, 2, 3):
            forget_hot(cache)
            ask(cache, seed)
            cache.store.flush(SOON_S)
        comes_back(cache)
        assert len([text for text in warnings(caplog) if "going on in memory" in text]) <= 1
    with open_cache(tmp_path / "blocks") as cache:
        assert ask(cache) == 192
    is_whole(tmp_path / "blocks")


def test_an_index_that_cannot_be_read_is_a_miss_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cache(tmp_path / "blocks") as cache:
        ask(cache)
        assert cache.store.flush(SOON_S)
        forget_hot(cache)
        with monkeypatch.context() as patch:
            for name in ("walk", "children", "same_start", "totals"):
                patch.setattr(Index, name, malformed)
            assert ask(cache) == 0
            assert cache.store.cold is not None
            assert cache.store.cold.totals() == (0, 0)
        assert len(warnings(caplog)) == 1
        assert "malformed" in warnings(caplog)[0]
        comes_back(cache)


def malformed(*_: object) -> Any:
    raise sqlite3.DatabaseError("database disk image is malformed")


@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "COMMIT", "INSERT INTO blocks"])
def test_a_write_to_the_index_that_fails_is_tried_again(
    statement: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path / "blocks")
    chain = random_blocks(3, seed=1)
    commit(store, chain[:1])
    assert store.flush(SOON_S)
    assert store.cold is not None
    assert store.cold._index is not None
    store.cold._index._writing = Failing(store.cold._index._writing, statement)  # type: ignore[assignment]
    commit(store, chain[1:])
    assert not store.flush(SOON_S)
    eventually(lambda: store.cold is not None and store.cold.offline is None)
    assert store.flush(SOON_S)
    store.check_integrity()
    assert len(warnings(caplog)) == 1
    assert store.close() == 0
    is_whole(tmp_path / "blocks")
    assert len(block_files(tmp_path / "blocks")) == 3


class Failing:
    """A connection whose disk is full when one kind of statement comes."""

    def __init__(self, connection: sqlite3.Connection, statement: str) -> None:
        self._connection = connection
        self._statement = statement

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql.startswith(self._statement):
            raise sqlite3.OperationalError("database or disk is full")
        return self._connection.execute(sql, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_work_that_fails_on_the_mover_does_not_end_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "the disk is gone")

    store = open_store(tmp_path / "blocks")
    on_its_thread(store, fail)
    commit(store, random_blocks(2, seed=1))
    assert store.close() == 0
    assert len(block_files(tmp_path / "blocks")) == 2
    assert len(warnings(caplog)) == 1


def test_rows_lost_in_a_power_cut_come_back_from_the_files(tmp_path: Path) -> None:
    directory, kept = tmp_path / "blocks", tmp_path / "kept"
    with open_cache(directory) as cache:
        ask(cache, seed=1)
    shutil.copytree(directory, kept)
    with open_cache(directory) as cache:
        ask(cache, seed=2)
    shutil.copy(kept / FILE_NAME, directory / FILE_NAME)
    with open_cache(directory) as cache:
        assert (ask(cache, seed=1), ask(cache, seed=2)) == (192, 192)
    is_whole(directory)


# ends and queues


WRITER = """
import sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from blocks import ROOT, block_layout, payload_of, random_blocks
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig

layout = block_layout(65536)
store = BlockStore(CacheConfig(directory=Path(sys.argv[1]), hot_bytes=2**30, cold_bytes=4 * 2**20, floor_bytes=0))
store.register(ROOT, layout, {}, model="tiny")
for block in random_blocks(5, int(sys.argv[2]) - 1):
    store.commit(block, tuple(payload_of(block, layout)))
store.flush()
print("open", flush=True)
for seed in range(int(sys.argv[2]), int(sys.argv[2]) + 100):
    for block in random_blocks(20, seed):
        store.commit(block, tuple(payload_of(block, layout)))
store.close()
"""


def test_a_process_killed_while_it_writes_leaves_fewer_blocks_and_never_a_bad_one(tmp_path: Path) -> None:
    directory, source = tmp_path / "blocks", random.Random(16)
    for kill in range(6):
        command = [sys.executable, "-c", WRITER, str(directory), str(1000 * kill), str(TESTS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "open\n"
            time.sleep(source.uniform(0.02, 0.2))
            writer.send_signal(signal.SIGKILL)
        assert writer.returncode == -signal.SIGKILL
        is_whole(directory, lost_files=1)
        assert physical_bytes(directory) <= 4 * MIB + 70 * KIB
    assert block_files(directory)


KILLED_WHILE_EVICTING = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from blocks import ROOT, block_layout, payload_of, random_blocks, views_of
from mlxkv.cache.block_log import BlockLog
from mlxkv.cache.cold import ColdTier

unlink, wanted, seen = os.unlink, int(sys.argv[2]), 0

def unlink_and_die(path, *more, **named):
    global seen
    unlink(path, *more, **named)
    seen += str(path).endswith(".safetensors")
    if seen == wanted:
        os.kill(os.getpid(), signal.SIGKILL)

tier = ColdTier(Path(sys.argv[1]), 4 * 2**20, floor_bytes=0, daily_write_bytes=None, log=BlockLog())
tier.open()
small, large = block_layout(65536), block_layout(2**20)
for seed in range(60):
    for block in random_blocks(1, seed):
        tier.write(block, small, views_of(payload_of(block, small)))
os.unlink = unlink_and_die
for block in random_blocks(1, 1000):
    tier.write(block, large, views_of(payload_of(block, large)))
tier.shrink(2**20)
"""


@pytest.mark.parametrize("unlinks", [1, 2, 5, 13, 20])
def test_a_process_killed_while_it_makes_room_leaves_at_most_one_row_without_its_file(
    tmp_path: Path, unlinks: int
) -> None:
    command = [sys.executable, "-c", KILLED_WHILE_EVICTING, str(tmp_path / "blocks"), str(unlinks), str(TESTS)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    is_whole(tmp_path / "blocks", lost_files=1)


def test_closing_writes_every_hot_block_through_a_queue_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, 0.005)
    blocks = [*random_blocks(6, seed=1), *random_blocks(6, seed=2)]
    store = open_store(tmp_path / "blocks", queue_bytes=LAYOUT.block_bytes)
    commit(store, blocks)
    assert store.close() == 0
    assert {path.stem for path in block_files(tmp_path / "blocks")} == {block.name.hex() for block in blocks}
    is_whole(tmp_path / "blocks")


def test_closing_ends_in_time_and_says_how_many_blocks_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, 0.3)
    store = open_store(tmp_path / "blocks", queue_bytes=LAYOUT.block_bytes)
    commit(store, random_blocks(12, seed=1))
    started = time.monotonic()
    lost = store.close(timeout_s=0.5)
    assert time.monotonic() - started < 3
    assert 12 > lost >= 9
    assert store._mover is not None
    store._mover._writer.join(SOON_S)
    assert store.cold is not None
    store.cold.close()  # its owner went away before its writer had finished
    is_whole(tmp_path / "blocks")


def test_a_slow_writer_never_stalls_a_commit_and_its_queue_is_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    slow_down(monkeypatch, 0.0, wait_for=go)
    store = open_store(tmp_path / "blocks", queue_bytes=3 * LAYOUT.block_bytes)
    for block in random_blocks(100, seed=1):
        commit(store, [block])
        assert store._mover is not None
        assert store._mover.queued_bytes <= 3 * LAYOUT.block_bytes
    assert len(store.hot) == 100
    assert len(block_files(tmp_path / "blocks")) <= 1
    go.set()
    assert store.close() == 0
    is_whole(tmp_path / "blocks")
    assert len(block_files(tmp_path / "blocks")) == 100


def test_a_block_that_waits_for_the_ssd_is_not_queued_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    slow_down(monkeypatch, 0.0, wait_for=go)
    store = open_store(tmp_path / "blocks", hot_bytes=0)
    chain = random_blocks(4, seed=1)
    for _ in range(3):
        commit(store, chain)
        assert store._mover is not None
        assert store._mover.queued_bytes == 4 * LAYOUT.block_bytes
        store.check_integrity()
    go.set()
    assert store.close() == 0
    assert len(block_files(tmp_path / "blocks")) == 4


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float, wait_for: threading.Event | None = None) -> None:
    """Make every write of a file take so long."""
    real = ColdTier._write_file

    def slow(self: ColdTier, *arguments: Any) -> tuple[int, int]:
        time.sleep(seconds)
        if wait_for is not None:
            wait_for.wait(SOON_S)
        return real(self, *arguments)

    monkeypatch.setattr(ColdTier, "_write_file", slow)
