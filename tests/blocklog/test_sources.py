"""The same log gives the same events however it was stored, cut, coloured or pasted."""

import gzip
import json
import os
import threading

import pytest

from mlxkv.blocklog import sources
from mlxkv.blocklog.readers import LogReader
from mlxkv.core.errors import UsageError


def line(number, event="commit", **fields):
    time = f"2026-11-30T19:{number // 60:02}:{number % 60:02}.000+01:00"
    return json.dumps({"time": time, "process": 1, "event": event, **fields}, separators=(",", ":"), ensure_ascii=False)


def request(number, **fields):
    found = {"model": "tiny", "root": "00", "request": f"r{number}", "prompt_tokens": 100 + number, "hot_tokens": 64}
    return line(number, "request", **found, cold_tokens=0, computed_tokens=36 + number, **fields)


LINES = [request(i, reason="diverged at token 64") if i % 3 == 0 else line(i, tokens=64, bytes=7) for i in range(30)]
TEXT = "\n".join(LINES) + "\n"


def events(*paths, reader=None):
    return [event.to_fields() for event in (reader or LogReader()).files([str(path) for path in paths])]


@pytest.fixture
def expected(tmp_path):
    path = tmp_path / "plain.jsonl"
    path.write_text(TEXT, encoding="utf-8")
    found = events(path)
    assert len(found) == 30
    assert sum(event["event"] == "request" for event in found) == 10
    return found


LINK = "\x1b]8;;http://x\x07"
COLOURED = "".join(f"\x1b[36m{each[:20]}\x1b[0m{each[20:40]}{LINK}{each[40:]}\x1b[1;31m\n" for each in LINES)
STORED = {
    "UTF-8 with BOM": b"\xef\xbb\xbf" + TEXT.encode(),
    "UTF-16 little-endian with BOM": TEXT.encode("utf-16"),
    "UTF-16 little-endian": TEXT.encode("utf-16-le"),
    "UTF-16 big-endian": TEXT.encode("utf-16-be"),
    "UTF-16 big-endian with BOM": b"\xfe\xff" + TEXT.encode("utf-16-be"),
    "CRLF": TEXT.replace("\n", "\r\n").encode(),
    "UTF-16 with CRLF": TEXT.replace("\n", "\r\n").encode("utf-16"),
    "half UTF-8, half UTF-16": "".join(f"{each}\n" for each in LINES[:15]).encode()
    + "".join(f"{each}\n" for each in LINES[15:]).encode("utf-16"),
    "colours, links and a lone escape": COLOURED.encode() + b"\x1b",
    "colours in UTF-16": COLOURED.encode("utf-16-le"),
    "a progress bar before a line": TEXT.replace("\n", "\n 10%\r 99%\r", 1).encode(),
    "no newline at the end": TEXT.rstrip("\n").encode(),
    "NULs where the power was cut": TEXT.replace("\n", "\n" + "\0" * 501, 3).encode() + b"\0" * 64,
    "compressed": gzip.compress(TEXT.encode()),
    "behind another program's prefix": "".join(f"web-1  | {each}\n" for each in LINES).encode(),
    "wrapped when pasted": "".join(f"{each[:70]}\n{each[70:140]}\n  {each[140:]}\n" for each in LINES).encode(),
}  # fmt: skip


@pytest.mark.parametrize("form", STORED)
def test_every_form_of_a_log_gives_the_same_events(form, tmp_path, expected):
    path = tmp_path / "stored"
    path.write_bytes(STORED[form])
    reader = LogReader()
    found = events(path, reader=reader)
    assert found == expected
    assert reader.unknown_lines == reader.torn_lines == 0


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_where_the_reading_cuts_does_not_matter(size, tmp_path, expected, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", size)
    for form in ("UTF-16 little-endian with BOM", "CRLF", "colours, links and a lone escape"):
        path = tmp_path / "stored"
        path.write_bytes(STORED[form])
        assert events(path) == expected


def test_letters_beyond_ascii_survive_utf_16(tmp_path):
    text = line(1, "request", request="r1", model="Živý 模型", prompt_tokens=1) + "\n"
    for encoding in ("utf-8", "utf-16-le", "utf-16-be"):
        path = tmp_path / encoding
        path.write_bytes(text.encode(encoding))
        assert [event["model"] for event in events(path)] == ["Živý 模型"]


def test_rotated_files_are_read_in_the_order_of_their_times_and_duplicates_once(tmp_path, expected):
    parts = {"log": LINES[20:], "log.1": LINES[10:20], "log.2.gz": LINES[:10]}
    for name, lines in parts.items():
        data = "".join(f"{each}\n" for each in lines).encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (tmp_path / "copy").write_bytes((tmp_path / "log.1").read_bytes())
    reader = LogReader()
    found = events(*[tmp_path / name for name in ("log", "copy", "log.1", "log.2.gz", "log.1")], reader=reader)
    assert found == expected
    assert len(reader.read.duplicates) == 2


def test_of_a_log_and_an_earlier_copy_of_it_the_longer_is_read(tmp_path, expected):
    (tmp_path / "whole").write_text(TEXT, encoding="utf-8")
    (tmp_path / "earlier").write_text("".join(f"{each}\n" for each in LINES[:12]), encoding="utf-8")
    assert events(tmp_path / "earlier", tmp_path / "whole") == expected


def test_a_directory_means_the_logs_in_it(tmp_path, expected):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "b.jsonl").write_text(TEXT, encoding="utf-8")
    (tmp_path / "logs" / "picture.png").write_bytes(b"\x89PNG\n")
    assert events(tmp_path / "logs") == expected
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="name the log"):
        events(tmp_path / "empty")


def test_a_line_cut_by_a_killed_process_is_counted_and_the_next_is_read(tmp_path, expected):
    path = tmp_path / "log"
    path.write_text("\n".join([*LINES[:10], LINES[10][:50], *LINES[10:]]) + "\n", encoding="utf-8")
    reader = LogReader()
    assert events(path, reader=reader) == expected
    assert reader.torn_lines == 1


def test_a_last_line_that_is_cut_is_reported(tmp_path, expected):
    path = tmp_path / "log"
    path.write_text(TEXT[:-20], encoding="utf-8")
    reader = LogReader()
    assert events(path, reader=reader) == expected[:-1]
    assert (reader.read.cut_lines, reader.torn_lines) == (1, 1)


def test_a_compressed_file_that_is_cut_gives_what_it_has(tmp_path):
    text = "".join(request(i) + "\n" for i in range(5_000))
    (tmp_path / "log.gz").write_bytes(gzip.compress(text.encode())[:-2000])
    reader = LogReader()
    found = events(tmp_path / "log.gz", reader=reader)
    assert 0 < len(found) < 5_000
    assert reader.read.cut_lines


def test_bad_bytes_cost_their_own_line_only(tmp_path, expected):
    data = TEXT.encode().split(b"\n")
    data.insert(5, b"\xff\xfe\xba\xad bytes")
    data.insert(9, b'{"time":"x","event":7}')
    (tmp_path / "log").write_bytes(b"\n".join(data))
    reader = LogReader()
    assert events(tmp_path / "log", reader=reader) == expected
    assert reader.unknown_lines + reader.torn_lines == 2


def test_an_event_nobody_knows_and_fields_nobody_knows_are_no_error(tmp_path):
    (tmp_path / "log").write_text(line(1, "merge", colour="red", request="r1") + "\n", encoding="utf-8")
    assert [(event["event"], event["request"]) for event in events(tmp_path / "log")] == [("merge", "r1")]


def test_several_programs_in_one_file_are_told_apart(tmp_path):
    omlx = "2026-11-30 19:00:00,000 - omlx.cache.prefix_cache - DEBUG - [-] - Cache miss for r9"
    mlx_lm = "2026-11-30 19:00:00,000 - INFO - Prompt processing progress: 64/64"
    (tmp_path / "log").write_text("\n".join([request(1), omlx, mlx_lm, request(2)]) + "\n", encoding="utf-8")
    assert sorted(event["source"] for event in events(tmp_path / "log")) == ["mlx_lm", "mlxkv", "mlxkv", "oMLX"]


def test_a_wrapped_line_of_omlx_is_put_together(tmp_path):
    header = "2026-11-30 19:00:00,000 - omlx.cache.prefix_cache - DEBUG - [-] - "
    text = f"{header}Stored cache for r9: 2 blocks\n  (2 saved to tiered cache), 128 tokens\n"
    (tmp_path / "log").write_text(text, encoding="utf-8")
    reader = LogReader()
    events(tmp_path / "log", reader=reader)
    assert (reader.unknown_lines, reader.continued_lines) == (0, 1)


def test_a_missing_file_and_a_damaged_one_are_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="check the path"):
        events(tmp_path / "none")
    (tmp_path / "bad.gz").write_bytes(b"\x1f\x8bnot gzip at all, but it begins so")
    with pytest.raises(UsageError, match="cannot be read"):
        events(tmp_path / "bad.gz")


def test_progress_adds_up_to_the_bytes_on_the_disk(tmp_path):
    (tmp_path / "a.log").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.log.gz").write_bytes(gzip.compress(TEXT.replace("r", "q").encode()))
    seen = []
    paths = [tmp_path / "a.log", tmp_path / "b.log.gz"]
    list(LogReader().files([str(path) for path in paths], seen.append))
    assert sum(seen) == sources.total_bytes(paths)


def test_a_named_pipe_is_read_from_its_first_byte(tmp_path):
    text = "".join(request(i) + "\n" for i in range(2_000))
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,), daemon=True)
    writer.start()
    assert [event["request"] for event in events(tmp_path / "pipe")] == [f"r{i}" for i in range(2_000)]
    writer.join()


def test_a_pipe_has_no_known_size_and_is_refused_where_it_must_be_read_twice(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert sources.total_bytes([tmp_path / "pipe"]) is None
    for name in (str(tmp_path / "pipe"), "-"):
        with pytest.raises(UsageError, match="cannot be read twice"):
            sources.need_files([name])


@pytest.mark.parametrize("stray", ['{"level":"info","message":"of another program"}', "{", '{"time":"2026-11-30T19:1'])
def test_a_line_that_is_no_event_costs_none_of_the_records_behind_it(stray, tmp_path):
    header = "2026-11-30 19:00:00,000 - omlx.cache.prefix_cache - DEBUG - [-] - "
    omlx = [f"{header}Cache miss for r{i}" for i in range(5)]
    other_order = [json.dumps(dict(sorted(json.loads(request(i)).items()))) for i in range(7, 9)]
    (tmp_path / "log").write_text(
        "\n".join([*omlx[:2], stray, *omlx[2:], stray, *other_order]) + "\n", encoding="utf-8"
    )
    reader = LogReader()
    found = [event["request"] for event in events(tmp_path / "log", reader=reader)]
    assert sorted(found) == ["r0", "r1", "r2", "r3", "r4", "r7", "r8"]
    assert (reader.lines, reader.torn_lines) == (9, 2)


def test_a_compressed_file_that_is_cut_is_read_where_its_times_belong(tmp_path):
    (tmp_path / "log").write_text("".join(f"{each}\n" for each in LINES[20:]), encoding="utf-8")
    (tmp_path / "log.1.gz").write_bytes(gzip.compress("".join(f"{each}\n" for each in LINES[:20]).encode())[:-5])
    times = [event["time"] for event in events(tmp_path / "log", tmp_path / "log.1.gz")]
    assert len(times) == 30
    assert times == sorted(times)


def test_files_are_in_order_when_the_clocks_go_back(tmp_path):
    times = {"log.1": "2026-10-25T02:50:00.000+02:00", "log": "2026-10-25T02:10:00.000+01:00"}
    for name, time in times.items():
        (tmp_path / name).write_text(json.dumps({"time": time, "event": "close"}) + "\n", encoding="utf-8")
    assert [event["time"] for event in events(tmp_path / "log", tmp_path / "log.1")] == list(times.values())
