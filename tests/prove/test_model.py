"""Restored = fresh, speed and memory with tiny models; each fault that is planted is seen."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from saved import save_model
from tiny import ALL_TINY, tiny_llama, tiny_mamba2

from mlxkv.budget.memory import Deployment
from mlxkv.core.errors import MlxkvError
from mlxkv.models.loader import load
from mlxkv.prompt_cache import block_cache
from mlxkv.prompt_cache.adapter import Adapter
from mlxkv.prove import memory
from mlxkv.prove.equality import check_equality, compare
from mlxkv.prove.memory import check_memory
from mlxkv.prove.runs import Run, Subject, make_prompt, run_apart, run_plain
from mlxkv.prove.speed import check_speed

BLOCKS = 4
HOT, COLD = 1, 2


def subject_of(path, scratch, blocks=BLOCKS):
    scratch.mkdir(exist_ok=True)
    loaded = load(str(path))
    return Subject(loaded, str(path), scratch, make_prompt(loaded, blocks))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "llama", tiny_llama())


@pytest.fixture
def subject(llama, tmp_path):
    return subject_of(llama, tmp_path / "scratch")


def test_a_prompt_is_whole_blocks_and_a_token(subject):
    assert len(subject.prompt) == BLOCKS * 64 + 1


def test_hot_cold_and_from_a_new_process_are_equal_to_the_bit(subject):
    found = check_equality(subject)
    assert [check.verdict for check in found] == ["ok"] * 4, found
    assert [check.figures["restored_tokens"] for check in found] == [0, 256, 256, 256]
    assert all(check.figures["state_equal"] and check.figures["logits_equal"] for check in found)
    assert all("equal to the bit" in check.said for check in found)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_next"])
def test_models_with_windows_or_states_are_held_by_their_logits(kind, tmp_path):
    subject = subject_of(save_model(tmp_path / kind, ALL_TINY[kind]()), tmp_path / "scratch")
    found = check_equality(subject, apart=False)
    assert [check.verdict for check in found] == ["ok"] * 3, found
    assert all(check.figures["restored_tokens"] for check in found[1:])
    assert all(check.figures["state_equal"] is None for check in found)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_is_equal_to_the_bit_too(subject, dtype):
    subject.model.module.set_dtype(dtype)
    found = check_equality(subject, apart=False)
    assert [check.verdict for check in found] == ["ok"] * 3, found
    assert all(check.figures["state_equal"] for check in found)
    assert {check.figures["dtype"] for check in found} == {str(dtype).rpartition(".")[2]}


@pytest.mark.parametrize(("apart", "verdict"), [(0.0, "ok"), (5e-4, "ok"), (5e-3, "fail"), (float("nan"), "fail")])
def test_logits_are_equal_within_the_bound_or_fail_and_it_is_said_which(apart, verdict):
    fresh = Run(np.array([[-1.0, 1.0]]), "state", 0, 0, 0.1, (), 0, 0.0)
    found = compare("hot", replace(fresh, logits=fresh.logits + apart, hot_tokens=64), fresh, fresh, "float32")
    assert found.verdict == verdict
    assert ("logits equal to the bit" in found.said) == (apart == 0)
    assert ("within 5e-04, where float32 allows 1e-03" in found.said) == (apart == 5e-4)


def test_a_restore_that_changes_the_last_bit_of_one_value_fails(subject, monkeypatch):
    build = Adapter.build

    def changed(self, target, tokens, state):
        made = build(self, target, tokens, state)
        bits = made[2].keys.view(mx.uint32)
        bits[0, 1, 70, 3] = bits[0, 1, 70, 3] ^ 1
        made[2].keys = bits.view(mx.float32)
        return made

    monkeypatch.setattr(Adapter, "build", changed)
    found = check_equality(subject, apart=False)
    assert [check.verdict for check in found[:3]] == ["ok", "fail", "fail"]
    assert "not those that were published" in found[HOT].said


def test_a_restore_that_changes_a_value_by_much_is_seen_in_the_logits_of_a_window_model(tmp_path, monkeypatch):
    subject = subject_of(save_model(tmp_path / "gemma3", ALL_TINY["gemma3"]()), tmp_path / "scratch")
    build = Adapter.build

    def changed(self, target, tokens, state):
        made = build(self, target, tokens, state)
        made[1].values = made[1].values * 1.5
        return made

    monkeypatch.setattr(Adapter, "build", changed)
    found = check_equality(subject, apart=False)
    assert found[HOT].verdict == found[COLD].verdict == "fail"
    assert "logits differ" in found[HOT].said


def test_a_cache_that_restores_nothing_fails(subject, monkeypatch):
    monkeypatch.setattr(block_cache.BlockCache, "_worth", lambda self, plan: self.store.shorten(plan, 0, "planted"))
    found = check_equality(subject, apart=False)
    assert found[HOT].verdict == found[COLD].verdict == "fail"
    assert found[HOT].said == "nothing was restored"
    (first, *_) = check_speed(subject)
    assert first.verdict == "fail"
    assert "nothing was reused" in first.said


def test_a_process_that_fails_is_one_sentence(subject):
    with pytest.raises(MlxkvError, match="the new process failed"):
        run_apart(replace(subject, name=str(subject.scratch / "no-model")), "salt")


def test_a_model_of_which_nothing_is_kept_is_a_note(tmp_path, monkeypatch):
    subject = subject_of(save_model(tmp_path / "mamba2", tiny_mamba2()), tmp_path / "scratch")
    monkeypatch.setattr(
        block_cache, "Adapter", lambda *_, **__: (_ for _ in ()).throw(block_cache.UncachedModelError("of no kind"))
    )
    (found,) = check_equality(subject, apart=False)
    assert (found.verdict, found.said) == ("note", "nothing is kept of this model: of no kind")


def test_speed_says_first_tokens_and_rates_and_every_run_reused(subject):
    first, decode, rate = check_speed(subject)
    assert first.verdict in ("ok", "note"), first
    assert 0 < first.figures["cold_s"] < 60
    assert decode.figures["tokens_per_s"] > 0
    assert rate.figures["restored_bytes"] == 256 * 4 * 2 * 2 * 16 * 4
    assert all(rate.figures[name] > 0 for name in rate.figures if name != "disk_read_bytes_per_s")


def test_the_peak_is_what_the_budget_says(subject):
    found, share = check_memory(subject)
    assert found.verdict == "ok", found
    assert share.bytes == found.figures["runtime_share_bytes"]
    assert (share.hidden_size, share.step_tokens, share.model) == (64, 256, "llama")


def test_a_budget_far_too_small_fails_and_the_share_holds_what_was_missing(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "ALLOWED_BYTES", 0)
    bill = Deployment.memory

    def too_small(self, tokens, sequences=1):
        told = bill(self, tokens, sequences)
        return replace(told, kv_bytes=told.kv_bytes // 10, transient_bytes=told.transient_bytes // 10)

    monkeypatch.setattr(Deployment, "memory", too_small)
    found, share = check_memory(subject_of(llama, tmp_path / "scratch"))
    assert found.verdict == "fail"
    assert found.advice
    assert share.bytes > 0


def test_a_plain_run_computes_what_the_model_computes(subject):
    run = run_plain(subject.model, subject.prompt[:65], steps=1)
    expected = subject.model.module(mx.array(subject.prompt[:65])[None])[0, -1]
    assert abs(run.logits[0] - expected).max() < 1e-4
