"""The share that was proved is the one a server counts."""

from dataclasses import replace

import pytest
from saved import save_model
from tiny import tiny_llama

from mlxkv.budget.machines import RuntimeShare, this_cpu
from mlxkv.budget.measured import measured_file, remember, with_measured
from mlxkv.core.units import GIB
from mlxkv.engine.memory import share_memory
from mlxkv.models.loader import load
from mlxkv.prove import memory
from mlxkv.prove.memory import keep

SHARE = RuntimeShare(bytes=GIB, model="tiny", hidden_size=64, step_tokens=256, date="2026-01-02")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_server_takes_the_measured_share_from_what_it_gives_away(tmp_path):
    model = load(str(save_model(tmp_path / "model", tiny_llama())))
    before = share_memory(model, hot_bytes=0, chunk_tokens=256)
    assert keep(SHARE).verdict == "ok"
    after = share_memory(model, hot_bytes=0, chunk_tokens=256)
    assert (before.runtime, after.runtime) == (None, SHARE)
    assert before.live_bytes - after.live_bytes == GIB


def test_a_share_that_cannot_be_kept_is_a_note(tmp_path):
    (tmp_path / "cache").write_text("a file in the way")
    found = keep(SHARE)
    assert found.verdict == "note"
    assert str(tmp_path) not in found.said + found.advice


def test_on_a_device_without_known_limits_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: replace(this_cpu(), here=False))
    assert keep(SHARE).verdict == "note"
    assert not measured_file().exists()


def test_what_was_measured_on_the_gpu_is_no_damage_to_the_cpu(caplog):
    remember(replace(this_cpu(), chip="M4 Pro", on_cpu=False), SHARE)
    assert with_measured(this_cpu()).runtime is None
    assert not caplog.records
