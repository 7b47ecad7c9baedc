"""The summary of mlxkv's own log is what was counted another way, and its verdict names what was planted."""

import json
import statistics
from collections import Counter

import pytest
from logs import Script, a_day

from mlxkv.blocklog.readers import LogReader
from mlxkv.blocklog.summary import BINS, SAMPLES, Bins, Lost, Quantiles, Summarizer
from mlxkv.blocklog.verdict import find_trouble, verdict
from mlxkv.core.units import MIB


def test_every_sum_is_that_of_the_lines():
    log = a_day()
    found = log.summary()
    kinds = Counter(line["event"] for line in log.lines)
    requests = [line for line in log.lines if line["event"] == "request"]
    commits = [line for line in log.lines if line["event"] == "commit"]
    for field in ("prompt_tokens", "hot_tokens", "cold_tokens", "tail_tokens", "computed_tokens", "output_tokens"):
        assert getattr(found, field) == sum(line[field] for line in requests), field
    assert found.hit_tokens + found.computed_tokens == found.prompt_tokens
    assert found.looked_up_tokens == sum(line["matched_tokens"] for line in requests)
    assert found.requests == len(requests)
    assert found.short_requests == 1
    assert found.committed_blocks == sum(line["tokens"] == 64 for line in commits)
    assert (found.committed_tails, found.committed_checkpoints) == (1, 1)
    assert found.committed_bytes == sum(line["bytes"] for line in commits)
    assert found.restores == kinds["restore"]
    assert found.restored_bytes == kinds["restore"] * MIB
    assert found.evicted_blocks == {"hot": kinds["evict"]}
    assert found.quarantined_blocks == kinds["quarantine"]
    assert found.dropped == {"no room": kinds["drop"]}
    assert (found.written_blocks, found.written_bytes) == (60, 60 * (MIB + 100))
    assert found.write_amplification == 60 / 16  # sixteen names
    assert found.block_bytes == {"tiny": Counter({MIB: 60})}
    lost = Counter()
    for line in requests:
        lost[line.get("reason", "all reused").split(" at token")[0]] += line["computed_tokens"] - 1
    assert {reason: each.tokens for reason, each in found.reasons.items()} == dict(lost)
    assert sum(found.bins.prompt) == found.prompt_tokens
    assert sum(found.bins.hits()) == found.hit_tokens
    assert (found.first_time, found.last_time) == (log.lines[0]["time"], log.lines[-1]["time"])


def test_time_to_first_token_goes_by_what_was_reused():
    log = Script()
    for i in range(100):
        log.request(100, hot=95, ttft_s=i / 100).request(100, hot=5, ttft_s=1 + i / 100).request(
            100, hot=50, ttft_s=0.5
        )
    found = log.summary()
    assert {name: sample.count for name, sample in found.ttft.items()} == {
        "reused": 100, "computed": 100, "partly reused": 100
    }  # fmt: skip
    assert found.ttft["reused"].at(0.5) == pytest.approx(statistics.median(i / 100 for i in range(100)))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 19, 20, 21, 100])
def test_median_and_95th_percentile_are_those_of_the_standard_library(count):
    values = [(i * 7919 % 1009) / 100 for i in range(count)]
    sample = Quantiles()
    for value in values:
        sample.add(value)
    assert sample.at(0.5) == pytest.approx(statistics.median(values))
    if count > 1:
        assert sample.at(0.95) == pytest.approx(statistics.quantiles(values, n=20, method="inclusive")[18])


def test_fill_is_what_went_in_less_what_went_out():
    log = Script().add("open", bytes=3 * MIB, tier="hot")
    log.block("a").block("b").block("c").block("a", "evict").block("d").block("d", "offload", tier="cold", bytes=7)
    found = log.summary()
    assert (found.tiers["hot"].peak_bytes, found.tiers["hot"].held_bytes) == (3 * MIB, 3 * MIB)
    assert found.tiers["hot"].budget_bytes == 3 * MIB
    assert found.tiers["cold"].peak_bytes == 7


def test_a_new_process_begins_with_an_empty_hot_tier():
    log = (
        Script()
        .add("open", bytes=3 * MIB, tier="hot")
        .block("a")
        .block("b")
        .add("open", bytes=3 * MIB, tier="hot")
        .block("c")
    )
    assert log.summary().tiers["hot"].peak_bytes == MIB


def test_nothing_known_is_not_a_share_of_zero():
    found = Script().add("close").summary()
    assert (found.hit_share, found.write_amplification) == (None, None)


def test_trouble_that_was_planted_is_found_and_nothing_else():
    healthy = Script().add("open", bytes=64 * MIB, tier="hot").request(1000).request(1000, hot=999).block("a")
    assert healthy.trouble() == {}
    assert verdict(healthy.summary(), [])[2] == "There is nothing to change."
    thrash = Script().request(1000, hot=100, reason="evicted").request(1000)
    assert thrash.trouble()["thrash"].tokens == 899
    unstable = (
        Script()
        .request(1000, hot=64, reason="diverged at token 64")
        .request(900, hot=64, reason="diverged at token 64")
    )
    assert unstable.trouble()["unstable prefix"].tokens == 935 + 835
    assert "the hot tier is off" in Script().add("open", bytes=0, tier="hot").trouble()
    full = Script().add("open", bytes=2 * MIB, tier="hot").block("a").block("b").block("a", "evict")
    assert "budget too small" in full.trouble()
    assert "damaged files" in Script().block("a", "quarantine", tier="cold").trouble()
    assert "blocks not written" in Script().block("a", "drop", tier="cold", reason="no room").trouble()
    written = Script().block("a", "offload", tier="cold").block("a", "offload", tier="cold")
    assert "written again and again" in written.trouble()


def test_the_verdict_begins_with_the_share_and_names_the_greatest_loss():
    log = Script().request(1000, hot=400, reason="evicted").request(100, hot=50, reason="diverged at token 50")
    found = log.summary()
    first, second, third = verdict(found, find_trouble(found, set()))
    assert first.startswith("41% of 1,100 prompt tokens were reused")
    assert "evicted (599 tokens in 1 request)" in second
    assert "599 tokens, thrash" in third
    assert "--hot" in third


def test_requests_without_a_word_on_reuse_are_apart():
    log = Script().add("request", request="r1", prompt_tokens=500).request(100)
    found = log.summary()
    assert (found.requests, found.unknown_requests, found.unknown_tokens, found.computed_tokens) == (2, 1, 500, 100)


@pytest.mark.parametrize("seconds", [1, 119, 120, 10_000, 1_000_000])
def test_time_has_at_most_120_steps_and_loses_no_token(seconds):
    bins = Bins()
    for at in (0, seconds / 3, seconds / 2, seconds, seconds / 4):
        bins.add(1e9 + at, 1, 2, 3, 10)
    assert len(bins.prompt) <= BINS
    assert (sum(bins.hot), sum(bins.cold), sum(bins.untiered), sum(bins.prompt)) == (5, 10, 15, 50)


def test_a_large_sample_keeps_its_size_and_its_middle():
    sample = Quantiles()
    for i in range(50_000):
        sample.add(i / 50_000)
    assert (sample.count, len(sample._values)) == (50_000, SAMPLES)
    assert sample.at(0.5) == pytest.approx(0.5, abs=0.02)


def test_adding_in_two_goes_is_adding_at_once():
    log = a_day()
    reader = LogReader()
    events = list(reader.events([json.dumps(line).encode() for line in log.lines]))
    summarizer = Summarizer()
    summarizer.add_all(events[:50])
    twice = summarizer.add_all(events[50:])
    assert twice.prompt_tokens == log.summary().prompt_tokens
    assert twice.tiers == log.summary().tiers


def test_blocks_that_a_user_deleted_are_no_sign_of_a_small_budget():
    log = Script().add("open", bytes=2 * MIB, tier="hot").block("a").block("b")
    log.block("a", "evict", reason="prune").block("b", "evict", reason="parent gone")
    assert log.trouble() == {}
    assert log.summary().evicted_blocks == {"hot": 2}
    assert "budget too small" in log.block("c").block("c", "evict", reason="budget").trouble()


def test_an_ssd_that_was_full_before_the_log_began_is_a_small_budget():
    log = Script().add("open", bytes=64 * MIB, tier="cold")
    for old, new in ("ab", "cd"):
        log.block(old, "evict", tier="cold", reason="budget").block(new, "offload", tier="cold")
    assert "evicted 2 blocks" in log.trouble()["budget too small"].seen


def test_the_change_that_would_save_most_is_the_one_with_most_tokens():
    log = Script().request(1000, hot=100, reason="evicted").request(1000, hot=100, reason="evicted")
    for tokens, name in ((700, "thrash"), (1900, "date or counter")):
        found = log.summary()
        found.causes["date or counter"] = Lost(1, tokens)
        assert f", {name})" in verdict(found, find_trouble(found, set()))[2]


@pytest.mark.parametrize(("never_seen", "says"), [(600, "Most were computed"), (400, "The largest part was computed")])
def test_the_verdict_says_most_of_more_than_half_only(never_seen, says):
    log = Script().request(never_seen).request(300, reason="evicted").request(250, reason="damaged")
    found = log.summary()
    assert verdict(found, find_trouble(found, set()))[1].startswith(f"{says} because of: never seen")


def test_the_verdict_on_a_log_without_requests_says_so():
    found = Script().add("open", bytes=MIB, tier="hot").summary()
    assert verdict(found, [])[0] == "No request is in the log."
