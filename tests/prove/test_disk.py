"""What the cold tier needs of a file system: there on this disk, and missed where it is not."""

import errno
import os
import shutil
import sqlite3
from functools import partial
from pathlib import Path

import pytest

from mlxkv.core.errors import CacheRootError
from mlxkv.prove import disk
from mlxkv.prove.disk import check_lock, check_place, check_publish, check_rename, check_sync, file_system
from mlxkv.prove.scratch import scratch_beside


def refuse(code):
    def call(*_, **__):
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("check", [check_rename, check_publish, check_sync, check_lock, check_place])
def test_this_disk_has_what_is_needed(tmp_path, check):
    found = check(tmp_path)
    assert found.verdict == "ok", found
    assert str(tmp_path) not in str(found)


def test_a_rename_that_first_deletes_fails(tmp_path, monkeypatch):
    def in_two_steps(source, target):
        shutil.copyfile(source, target)  # empty for a moment, then growing
        os.unlink(source)

    monkeypatch.setattr(disk.os, "replace", in_two_steps)
    found = check_rename(tmp_path)
    assert found.verdict == "fail"
    assert found.figures["torn_reads"] == 1


def test_a_disk_without_hard_links_is_no_fault_and_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    found = check_publish(tmp_path)
    assert (found.verdict, found.figures["hard_links"]) == ("ok", False)
    assert "by renames" in found.said


def test_a_name_that_is_given_to_other_content_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "publish_file", os.replace)
    assert check_publish(tmp_path).verdict == "fail"


def test_a_disk_that_cannot_sync_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "sync_file", refuse(errno.EIO))
    found = check_sync(tmp_path)
    assert found.verdict == "fail"
    assert "cannot be made durable" in found.said


def test_a_lock_that_does_not_exclude_fails(tmp_path, monkeypatch):
    without_locks = partial(sqlite3.connect, uri=True)
    monkeypatch.setattr(
        disk.sqlite3, "connect", lambda path, **settings: without_locks(f"file:{path}?vfs=unix-none", **settings)
    )
    found = check_lock(tmp_path)
    assert found.verdict == "fail"
    assert "did not keep another process out" in found.said


def test_little_free_disk_is_a_note(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert check_place(tmp_path).verdict == "note"


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_mounts", lambda: {"/": "apfs", str(tmp_path): "exfat"})
    assert file_system(tmp_path / "deep" / "blocks") == "exfat"
    assert file_system(tmp_path.parent) == "apfs"


def test_a_network_disk_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_mounts", lambda: {"/": "smbfs"})
    assert check_place(tmp_path).verdict == "note"


def test_scratch_lies_beside_the_root_and_nothing_of_it_stays(tmp_path):
    root = tmp_path / "cache" / "blocks"
    with scratch_beside(root) as scratch:
        assert scratch.parent == root.parent
        assert scratch.stat().st_mode & 0o777 == 0o700
        (scratch / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing_and_the_users_blocks_are_as_they_were(tmp_path):
    root = tmp_path / "blocks"
    root.mkdir()
    (root / "block").write_text("mine")

    def interrupted():
        with scratch_beside(root):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["blocks", "blocks/block"]


def test_what_a_killed_run_left_is_deleted_and_what_a_running_one_needs_is_not(tmp_path):
    dead = tmp_path / ".mlxkv-prove-4194305-0123abcd"  # above the largest number of a process
    running = tmp_path / f".mlxkv-prove-{os.getpid()}-0123abcd"
    foreign = tmp_path / ".mlxkv-prove-mine"
    for path in (dead, running, foreign):
        path.mkdir()
    with scratch_beside(tmp_path / "blocks"):
        pass
    assert sorted(tmp_path.iterdir()) == sorted([running, foreign])


def test_a_place_that_cannot_be_written_to_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CacheRootError, match="choose another --cache-dir"),
        scratch_beside(tmp_path / "file" / "blocks"),
    ):
        pass


def test_a_disk_that_is_not_mounted_is_not_made_up():
    path = Path("/Volumes/MLXKV-TEST-ABSENT/blocks")
    with pytest.raises(CacheRootError, match="is not mounted"), scratch_beside(path):
        pass
    assert not path.parent.exists()
