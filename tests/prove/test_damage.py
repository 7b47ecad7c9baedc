"""Damaged files are noticed on this disk, and a codec that lets one through is noticed by the check."""

import errno
import os

import numpy as np
import pytest

from mlxkv.cache import codec
from mlxkv.prove.damage import CUTS, FLIPS, SWAPS, check_bits, check_cuts, check_swaps, check_whole

ALL = [(check_bits, FLIPS), (check_cuts, CUTS - 1), (check_swaps, SWAPS)]


def believe(monkeypatch):
    """Read what is there, and hold nothing against anything."""

    def read(path, block, layout, views, tensors=None):
        del block, layout, tensors
        data = path.read_bytes().ljust(10**6, b"\0")
        for view in views:
            view[:] = data[: view.nbytes]
        return sum(view.nbytes for view in views)

    monkeypatch.setattr(codec, "read_block", read)


@pytest.mark.parametrize(("check", "set_aside"), ALL)
def test_every_damage_on_this_disk_is_a_miss(tmp_path, check, set_aside, caplog):
    found = check(tmp_path)
    assert found.verdict == "ok", found
    assert (found.figures["unnoticed"], found.figures["wrong"]) == (0, 0)
    assert found.figures["set_aside"] == set_aside
    assert not caplog.records


def test_whole_files_come_back(tmp_path):
    assert check_whole(tmp_path).verdict == "ok"


def test_a_disk_that_is_full_fails_and_says_to_free_some(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(codec, "write_block", full)
    found = check_whole(tmp_path)
    assert (found.verdict, found.figures["restored_blocks"]) == ("fail", 0)
    assert "Free some disk" in found.advice


@pytest.mark.parametrize(("check", "set_aside"), ALL)
def test_a_codec_that_believes_everything_fails(tmp_path, monkeypatch, check, set_aside):
    del set_aside
    believe(monkeypatch)
    found = check(tmp_path)
    assert found.verdict == "fail"
    assert found.figures["unnoticed"] > 0
    assert found.advice


def test_a_codec_without_digests_fails_for_flipped_bits(tmp_path, monkeypatch):
    class Equal:
        def update(self, view):
            del view

        def hexdigest(self):
            return "0" * 32

    monkeypatch.setattr(codec.xxhash, "xxh3_128", Equal)
    assert check_bits(tmp_path).verdict == "fail"


def test_a_disk_that_changes_what_is_written_fails(tmp_path, monkeypatch):
    write = codec.write_block

    def other(fd, block, layout, views):
        return write(fd, block, layout, [np.zeros(view.nbytes, np.uint8).data for view in views])

    monkeypatch.setattr(codec, "write_block", other)
    found = check_whole(tmp_path)
    assert (found.verdict, found.figures["equal"]) == ("fail", False)
