"""The block log: what the code writes is what docs/block-log.md says, and a log that fails harms nobody."""

import json
import logging
import os
import re
import typing
from dataclasses import fields
from datetime import datetime
from pathlib import Path

import pytest
from blocks import ROOT, SMALL, blocks_of, payload_of, random_blocks

from mlxkv.cache.block_log import KEEP_FILES, ROTATE_BYTES, BlockEvent, BlockLog, EventKind, RequestEvent, TierName
from mlxkv.cache.codec import relative_path
from mlxkv.cache.names import pack
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig

DOC = (Path(__file__).parents[2] / "docs" / "block-log.md").read_text(encoding="utf-8")
EXAMPLES = [json.loads(line) for line in re.findall(r"```json\n(.*?)\n```", DOC, re.DOTALL)]
EVERY_LINE = ("time", "process", "event")
JSON_TYPES = {"text": str, "hex": str, "integer": int, "number": (int, float), "object": dict}

REQUEST = RequestEvent(
    model="tiny", root=ROOT, request="r1", prompt_tokens=10, hot_tokens=4, cold_tokens=0, tail_tokens=4,
    computed_tokens=6, matched_tokens=4, restored_bytes=40, restore_s=0.1, ttft_s=None, output_tokens=0, reason=None,
)  # fmt: skip


def documented(section: str) -> dict[str, str]:
    """Field -> type of the table under a heading of the page."""
    text = DOC.split(f"## {section}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.MULTILINE))


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table_of(line: dict[str, object]) -> dict[str, str]:
    section = "The event of a request" if line["event"] == "request" else "Events of a block or a tier"
    return documented("Every line") | documented(section)


def check_line(line: dict[str, object]) -> None:
    """A line has documented fields of the documented types, and becomes its dataclass again."""
    table = table_of(line)
    assert line.keys() <= table.keys()
    for field, value in line.items():
        assert isinstance(value, JSON_TYPES[table[field]]), field
        if table[field] == "hex":
            assert len(bytes.fromhex(value)) == 32
    assert datetime.fromisoformat(line["time"]).tzinfo is not None
    event = {field: value for field, value in line.items() if field not in ("time", "process")}
    absent = {"ttft_s": None, "reason": None}
    assert RequestEvent(**absent | event) if line["event"] == "request" else BlockEvent(**event)


def test_the_page_and_the_dataclasses_have_the_same_fields():
    assert list(documented("Every line")) == list(EVERY_LINE)
    for section, event in (("Events of a block or a tier", BlockEvent), ("The event of a request", RequestEvent)):
        assert set(documented(section)) == {field.name for field in fields(event)} - {"event"}


def test_the_page_shows_a_line_of_every_event_and_no_other():
    kinds = {*typing.get_args(EventKind), "request"}
    assert sorted(line["event"] for line in EXAMPLES) == sorted(kinds)
    assert set(re.findall(r"^\*\*`(\w+)`\*\*:", DOC, re.MULTILINE)) == kinds


@pytest.mark.parametrize("line", EXAMPLES, ids=lambda line: line["event"])
def test_an_example_of_the_page_is_a_line_the_code_could_write(line):
    check_line(line)
    assert line.get("tier", "hot") in typing.get_args(TierName)
    if line["event"] == "request":
        assert line["prompt_tokens"] == line["hot_tokens"] + line["cold_tokens"] + line["computed_tokens"]


def test_the_page_says_how_files_rotate():
    assert f"would pass {ROTATE_BYTES // 2**20} MiB" in DOC
    assert f"`FILE.{KEEP_FILES}`" in DOC
    assert f"{ROTATE_BYTES * (KEEP_FILES + 1) // 2**20} MiB at most" in DOC


def test_a_store_writes_documented_lines_only_whatever_happens(tmp_path):
    """One run that makes the store write every kind of block event."""
    log, root = tmp_path / "log", tmp_path / "cache"
    config = CacheConfig(directory=root, hot_bytes=3 * SMALL.block_bytes, cold_bytes=2**26, floor_bytes=0, log=log)
    store = BlockStore(config)
    store.register(ROOT, SMALL, {"model": "tiny"}, model="tiny")
    chains = [random_blocks(3, seed) for seed in range(3)]
    tail = blocks_of(range(70))
    for block in [*chains[0], *chains[1], *chains[2], tail[0]]:
        store.commit(block, tuple(payload_of(block, SMALL)), request="r1")
        store.flush()
    store.commit_tail(tail[1], tuple(payload_of(tail[1], SMALL)), request="r1")

    damaged, missing = chains[0][1], chains[1][2]
    (root / relative_path(ROOT, damaged.name)).write_bytes(b"")
    (root / relative_path(ROOT, missing.name)).unlink()
    for blocks in (chains[0], chains[1]):
        plan = store.plan(ROOT, b"".join(block.tokens for block in blocks) + pack([1]))
        buffer = {i: ([memoryview(bytearray(192))[:64], memoryview(bytearray(128))], [0, 1]) for i in range(3)}
        store.read(ROOT, plan.match.parts, SMALL, buffer.get, 10.0, request="r2").finish()
        store.release(plan)
    store.flush()
    store.log.write(REQUEST)
    store.check_integrity()
    store.close()

    written = lines(log)
    for line in written:
        check_line(line)
        assert line["process"] == os.getpid()
        assert "model" not in line or line["model"] == "tiny"
    assert {line["event"] for line in written} == {*typing.get_args(EventKind), "request"}


def test_absent_fields_are_left_out(tmp_path):
    log = BlockLog(tmp_path / "log")
    log.write(BlockEvent(event="evict", block=ROOT, bytes=0, reason="budget"))
    log.write(REQUEST)
    log.close()
    first, second = lines(tmp_path / "log")
    assert first.keys() == {"time", "process", "event", "block", "bytes", "reason"}
    assert first["bytes"] == 0
    assert "ttft_s" not in second
    assert second["tail_tokens"] == 4


def test_a_root_that_was_named_gives_its_events_the_model(tmp_path):
    log = BlockLog(tmp_path / "log")
    log.name_root(ROOT, "tiny")
    log.write(BlockEvent(event="drop", root=ROOT))
    log.write(BlockEvent(event="drop", root=bytes(32)))
    log.write(BlockEvent(event="open"))
    log.close()
    assert [line.get("model") for line in lines(tmp_path / "log")] == ["tiny", None, None]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = BlockLog()
    log.write(BlockEvent(event="open"))
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_appends(tmp_path):
    for _ in range(2):
        log = BlockLog(tmp_path / "log")
        log.write(BlockEvent(event="open"))
        log.close()
    assert len(lines(tmp_path / "log")) == 2


def test_no_event_can_carry_tokens_or_text():
    """Names are the only bytes, and no field is a list; `text` is only ever what the user asked to have there."""
    for event in (BlockEvent, RequestEvent):
        hints = typing.get_type_hints(event)
        assert {name for name, hint in hints.items() if bytes in (hint, *typing.get_args(hint))} <= {
            "root",
            "block",
            "parent",
        }
        lists = [name for name, hint in hints.items() if typing.get_origin(hint) in (list, tuple, dict)]
        assert lists == []


def test_the_tokens_of_a_prompt_are_nowhere_in_the_log(tmp_path):
    log = tmp_path / "log"
    store = BlockStore(CacheConfig(directory=tmp_path / "cache", hot_bytes=2**20, floor_bytes=0, log=log))
    store.register(ROOT, SMALL, {"model": "tiny", "salt": "my secret salt"}, model="tiny")
    ids = [987_654_000 + i for i in range(70)]
    for block in blocks_of(ids)[:1]:
        store.commit(block, tuple(payload_of(block, SMALL)))
    store.release(store.plan(ROOT, pack(ids)))
    store.close()
    text = log.read_text(encoding="utf-8")
    assert '"event":"offload"' in text
    assert "secret" not in text
    assert "987654" not in text
    assert pack(ids[:1]).hex() not in text


def test_a_file_that_grows_past_the_size_is_rotated_and_the_oldest_goes(tmp_path):
    log = BlockLog(tmp_path / "log", rotate_bytes=1000)
    for i in range(100):
        log.write(BlockEvent(event="drop", index=i, reason="x" * 100))
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log", *(f"log.{i + 1}" for i in range(KEEP_FILES))]
    assert all(0 < file.stat().st_size <= 1000 for file in files)
    held = [line["index"] for file in [*reversed(files[1:]), files[0]] for line in lines(file)]
    assert held == list(range(held[0], 100))


@pytest.fixture(params=["parent is a file", "is a directory", "full disk", "no rights"])
def unwritable(request, tmp_path):
    """A path no log can be written to."""
    if request.param == "parent is a file":
        (tmp_path / "file").touch()
        return tmp_path / "file" / "log"
    if request.param == "is a directory":
        return tmp_path
    if request.param == "full disk":
        if not os.path.exists("/dev/full"):
            pytest.skip("no /dev/full on this system")
        return Path("/dev/full")
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    return tmp_path / "log"


def test_a_log_that_cannot_be_written_says_so_once_at_once_and_never_raises(unwritable, caplog, capfd):
    with caplog.at_level(logging.WARNING, "mlxkv"):
        log = BlockLog(unwritable)
        log.write(BlockEvent(event="open"))
        assert [record.getMessage() for record in caplog.records] == [
            f"the block log {unwritable} cannot be written; free some disk or choose another --log"
        ]
        for _ in range(1000):
            log.write(BlockEvent(event="drop", reason="x" * 100))
        log.close()
    assert len(caplog.records) == 1
    assert "Traceback" not in capfd.readouterr().err
