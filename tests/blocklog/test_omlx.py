"""oMLX's logs of every version: each published shape is known, and every figure is one counted by hand."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from mlxkv.blocklog.omlx import match_shape, size_bytes
from mlxkv.blocklog.readers import LogReader
from mlxkv.blocklog.summary import summarize

DATA = Path(__file__).parents[1] / "data"
LOGS = sorted((DATA / "logs").glob("omlx-*.log"))
PUBLISHED = json.loads((DATA / "omlx_log_lines.json").read_text(encoding="utf-8"))
HEADER = re.compile(PUBLISHED["header"])
SHAPES = {name: re.compile(shape["regex"]) for name, shape in PUBLISHED["lines"].items()}


def messages(path):
    """The messages of a log, by the published header."""
    found = [HEADER.match(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [match["msg"] for match in found if match]


ALL = [message for path in LOGS for message in messages(path)]


def summary_of(path):
    reader = LogReader()
    return summarize(reader, reader.files([path])), reader


@pytest.mark.parametrize("shape", SHAPES)
def test_every_published_shape_is_in_the_corpus_and_known(shape):
    lines = [message for message in ALL if SHAPES[shape].match(message)]
    assert lines, "the corpus has no such line"
    assert [line for line in lines if match_shape(line) is None] == []


def test_only_the_line_nobody_has_seen_is_unknown():
    assert [message for message in ALL if match_shape(message) is None] == ["A line of a version nobody has seen"]


# Counted by hand in the files; None: the log does not say it.
EXPECTED = {
    "omlx-0.1.2.log": {
        "requests": 3, "unfinished_requests": 0, "unknown_requests": 1, "prompt_tokens": 350, "hot_tokens": 0,
        "cold_tokens": 128, "untiered_tokens": 0, "computed_tokens": 222, "looked_up_tokens": 256, "output_tokens": 40,
        "committed_blocks": 2, "written_blocks": 2, "written_bytes": 2 * 768 * 1024, "restores": 2,
        "evicted_blocks": {"cold": 2}, "evicted_bytes": int(1.5 * 2**20), "block_tokens": 64,
    },
    "omlx-0.2.24-console.log": {
        "requests": 3, "unfinished_requests": 0, "unknown_requests": 0, "prompt_tokens": 2500 + 2048 + 1024,
        "hot_tokens": 512, "cold_tokens": 512, "untiered_tokens": 2047, "computed_tokens": 1476 + 1 + 1024,
        "looked_up_tokens": 2048 + 2048 + 1024, "output_tokens": 60, "committed_blocks": 1, "written_blocks": 1,
        "written_bytes": 64 * 2**20, "restores": 2, "evicted_blocks": {"hot": 1}, "evicted_bytes": 0,
        "block_tokens": 1024, "unstored_tokens": 492,
    },
    "omlx-0.4.4.log": {
        "requests": 1, "unfinished_requests": 0, "unknown_requests": 0, "prompt_tokens": 300, "hot_tokens": 192,
        "cold_tokens": 64, "untiered_tokens": 0, "computed_tokens": 44, "looked_up_tokens": 256, "output_tokens": 40,
        "committed_blocks": 0, "written_blocks": 2, "written_bytes": 2 * 768 * 1024, "rewritten_bytes": 768 * 1024,
        "restores": 4, "evicted_blocks": {"hot": 1}, "block_tokens": 64,
        "scans": {"scanned": 105, "indexed": 94, "errors": 0, "stale": 1, "incompatible": 10},
    },
    "omlx-0.5.4-info.log": {
        "requests": 3, "unfinished_requests": 0, "unknown_requests": 2, "prompt_tokens": 1500, "untiered_tokens": 300,
        "computed_tokens": 700, "unknown_tokens": 500, "looked_up_tokens": 300, "output_tokens": 51,
        "unstored_tokens": 42, "restores": 0,
    },
    "omlx-0.6.4.log": {
        "requests": 3, "unfinished_requests": 1, "unknown_requests": 0, "prompt_tokens": 1000, "untiered_tokens": 448,
        "computed_tokens": 552, "looked_up_tokens": 448, "output_tokens": 70,
        "scans": {"scanned": 20, "indexed": 20, "errors": 0, "incompatible": 0, "gdn": 4},
    },
}  # fmt: skip


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_every_figure_of_the_summary_is_the_one_counted_by_hand(path):
    found, reader = summary_of(path)
    for name, expected in EXPECTED[path.name].items():
        assert getattr(found, name) == expected, name
    assert found.prompt_tokens == (
        found.hot_tokens + found.cold_tokens + found.untiered_tokens + found.computed_tokens + found.unknown_tokens
    )
    assert reader.lines == len([line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()])


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_counts_of_lines_are_those_of_the_published_patterns(path):
    found, _ = summary_of(path)
    counted = Counter(name for message in messages(path) for name, shape in SHAPES.items() if shape.match(message))
    assert sum(found.rejects.values()) - found.rejects["stale layer signature"] == (
        counted["reject"] + counted["walkback"] + counted["gdn_reject"] + counted["mismatch"]
    )
    assert found.restores == counted["load_block"]
    assert found.evicted_blocks["hot"] == counted["hot_evict"]
    assert found.logged_trouble["SSD write queue full"] == counted["queue_full"]
    assert found.logged_trouble["disk full"] == counted["disk_full"]
    assert found.logged_trouble["cache corruption"] == counted["corruption"]
    assert found.logged_trouble["cache file missing"] == counted["missing"]
    assert sum(found.pressure.values()) == counted["pressure"]
    assert len(found.geometry) == counted["model_info"]


def test_a_block_size_that_counts_layers_without_kv_is_called_out():
    sizes = {}
    for path in LOGS:
        for each in summary_of(path)[0].geometry:
            sizes[path.name] = (each.block64_bytes, each.exact_bytes, each.counts_all_layers)
    assert sizes == {
        "omlx-0.1.2.log": (768 * 1024, 24 * 2 * 64 * 2 * 2 * 64, False),
        "omlx-0.2.24-console.log": (16 * 2**20, 4 * 2**20, True),
        "omlx-0.4.4.log": (5 * 2**20, 5 * 2**18, True),
        "omlx-0.5.4-info.log": (9 * 2**20, 9 * 2**20, False),
        "omlx-0.6.4.log": (3 * 2**19, 3 * 2**19, False),
    }


def read(*lines):
    reader = LogReader()
    return summarize(reader, [*reader.events([line.encode() for line in lines]), *reader.finish()])


def debug(message, second=0, logger="scheduler"):
    return f"2026-04-01 08:00:{second:02},000 - omlx.{logger} - DEBUG - [-] - {message}"


def test_a_hit_that_failed_to_load_is_not_a_hit():
    found = read(
        debug("Cache hit for r1: 17 blocks, 1088 tokens"),
        debug("Request r1: paged cache reconstruction failed, released shared blocks"),
        debug("Submitted async store_cache for r1 (1088 tokens, 1120 total: 1100 prompt + 20 output)"),
        debug("Chat completion: 20 tokens in 1.00s (20.0 tok/s), prompt: 1100", logger="server"),
    )
    assert (found.looked_up_tokens, found.hit_tokens, found.computed_tokens) == (1088, 0, 1100)


def test_a_request_that_is_looked_up_three_times_counts_once():
    found = read(
        *[debug("Cache hit for r1: 2 blocks, 128 tokens") for _ in range(3)],
        debug("Request r1: paged cache hit, 128 tokens in 2 blocks, 22 tokens remaining, cache reconstructed"),
        debug("Chat completion: 20 tokens in 1.00s (20.0 tok/s), prompt: 150", logger="server"),
    )
    assert (found.requests, found.looked_up_tokens, found.hit_tokens) == (1, 128, 128)


def test_a_hit_without_any_end_is_an_unfinished_request_whose_reuse_is_not_known():
    found = read(debug("Cache hit for r1: 2 blocks, 128 tokens"))
    assert (found.requests, found.unfinished_requests, found.unknown_requests) == (1, 1, 1)
    assert (found.looked_up_tokens, found.hit_tokens, found.hit_share) == (128, 0, None)


def test_a_completion_goes_to_the_request_with_its_prompt():
    restore = "Prefix cache restore for {}: source=paged cached={} suffix={} blocks=1 lookup=0.1ms reconstruct=0.1ms"
    found = read(
        *[debug(restore.format(*each)) for each in (("r1", 0, 100), ("r2", 64, 36), ("r3", 64, 6))],
        debug("Chat completion: 20 tokens in 1.00s (20.0 tok/s), prompt: 70", 5, "server"),
    )
    assert (found.requests, found.unfinished_requests, found.prompt_tokens) == (3, 2, 270)


def test_prompt_text_in_a_line_is_not_in_any_event():
    reader = LogReader()
    text = [event.to_fields() for event in reader.files([DATA / "logs" / "omlx-0.4.4.log"])]
    assert "secret" not in json.dumps(text)


@pytest.mark.parametrize(("text", "expected"), [("768.00 KB", 786_432), ("512 B", 512), ("12.3GB", 13_207_024_435)])
def test_sizes_go_in_steps_of_1024(text, expected):
    assert size_bytes(text) == expected


def test_a_frequent_line_gives_the_same_event_when_it_was_wrapped():
    """Whole lines of the frequent kinds are read by one pattern; pieces put together by the table."""
    lines = [
        line
        for path in LOGS
        for line in path.read_text(encoding="utf-8").splitlines()
        if "Loaded block" in line or "Saved block" in line or "Enqueued block" in line or "Evicted hot" in line
    ]
    assert len(lines) == 17
    for line in lines:
        whole, wrapped = LogReader(), LogReader()
        cut = line.index(" block ") + 3
        expected = [event.to_fields() for event in [*whole.events([line.encode()]), *whole.finish()]]
        pieces = [line[:cut].encode(), line[cut:].encode()]
        assert [event.to_fields() for event in [*wrapped.events(pieces), *wrapped.finish()]] == expected
        assert len(expected) == 1
        assert whole.levels == wrapped.levels == {"DEBUG"}
