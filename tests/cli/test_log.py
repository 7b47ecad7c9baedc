"""`mlxkv log`: a page for a person, one object with --json, and no prompt text in either unless asked."""

import csv
import gzip
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from logs import Script, a_day

from mlxkv_cli.docs import JSON_FIELDS
from mlxkv_cli.log_page import sparkline
from mlxkv_cli.main import run

LOGS = Path(__file__).parents[1] / "data" / "logs"
MLXKV = [sys.executable, "-m", "mlxkv_cli.main"]
SECRET = "marigold"


@pytest.fixture
def day(tmp_path):
    """A log with some of everything, and prompt text in one request."""
    log = a_day().request(300, hot=100, text=f"the password is {SECRET}")
    path = tmp_path / "day.jsonl"
    path.write_text(log.text(), encoding="utf-8")
    return path


@pytest.fixture
def ask(capsys):
    """Runs `mlxkv ... --json` and returns its one object."""

    def asker(*arguments):
        code = run([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert code == 0, err
        assert out.count("\n") == 1
        return json.loads(out)

    return asker


def documented(command):
    """Every field that docs/cli.md names for a command, those within its sentences too."""
    fields = JSON_FIELDS[command]
    return {*fields, *(name for text in fields.values() for name in re.findall(r"`(\w+)`", text))}


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("log summary", []), ("log blocks", []), ("log requests", []), ("log request", ["r0"])],
)
def test_json_has_the_documented_fields(command, arguments, ask, day):
    if command == "log request":
        arguments = [ask("log", "requests", day)["requests"][0]["request"]]
    found = ask(*command.split(), *arguments, day)
    assert set(JSON_FIELDS[command]) <= found.keys() <= documented(command)


def on_a_terminal(commands, width, **environment):
    """What some commands print one after the other on a terminal of that width."""
    code = f"from mlxkv_cli.main import run\nfor command in {commands!r}: assert run(command) == 0, command"
    environment = os.environ | {"COLUMNS": str(width)} | environment
    command = ["script", "-qec", f"stty cols {width}; {sys.executable} -c {shlex.quote(code)}", "/dev/null"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.parametrize("width", [60, 80])
def test_every_line_of_a_page_fits_the_terminal(width, day):
    shown = on_a_terminal([["log", verb, str(day)] for verb in ("summary", "blocks", "requests")], width)
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip("\r") for line in shown.split("\n")]
    assert len(lines) > 60
    assert max(len(line.rpartition("\r")[2]) for line in lines) <= width


def test_no_command_shows_prompt_text_unless_asked(capsys, day, tmp_path):
    request = a_day().lines
    for arguments in (["summary"], ["blocks"], ["requests"], ["requests", "--json"], ["summary", "--json"]):
        assert run(["log", *arguments, str(day)]) == 0
    for option, name in (("--csv", "r.csv"), ("--html", "r.html"), ("--parquet", "e.parquet")):
        assert run(["log", "export", str(day), option, str(tmp_path / name)]) == 0
        assert SECRET.encode() not in (tmp_path / name).read_bytes()
    assert SECRET not in capsys.readouterr().out
    name = f"r{len(request)}"
    assert run(["log", "request", name, str(day)]) == 0
    assert SECRET not in capsys.readouterr().out
    assert run(["log", "request", name, str(day), "--text"]) == 0
    assert SECRET in capsys.readouterr().out


def test_a_log_of_omlx_is_summarised_and_its_overstated_block_size_called_out(capsys):
    assert run(["log", "summary", str(LOGS / "omlx-0.2.24-console.log")]) == 0
    out = capsys.readouterr().out
    assert "16,384.00 KB per 64-token block" in out
    assert "4,096.00 KB" in out
    assert "block size overstated" in out


def test_an_info_log_says_what_debug_would_add(capsys):
    assert run(["log", "summary", str(LOGS / "omlx-0.5.4-info.log")]) == 0
    assert "--log-level debug" in capsys.readouterr().out


def test_a_log_comes_through_stdin_compressed_too(day):
    for data in (day.read_bytes(), gzip.compress(day.read_bytes())):
        done = subprocess.run([*MLXKV, "log", "summary", "-", "--json"], input=data, capture_output=True, check=True)
        assert json.loads(done.stdout)["requests"] == a_day().summary().requests + 1


def test_a_file_that_is_no_log_or_empty_is_an_error_with_a_next_step(capsys, tmp_path):
    (tmp_path / "empty.log").write_bytes(b"")
    (tmp_path / "other.log").write_text("hello\n" * 20, encoding="utf-8")
    for name, said in (("empty.log", "is empty"), ("other.log", "none of 20 lines"), ("none.log", "there is no file")):
        assert run(["log", "summary", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err


def test_top_sort_and_chain_choose_blocks(ask, day):
    everything = ask("log", "blocks", day)["blocks"]
    assert len(ask("log", "blocks", day, "--top", 3)["blocks"]) == 3
    hits = [row["written_bytes"] for row in ask("log", "blocks", day, "--sort", "written")["blocks"]]
    assert hits == sorted((row["written_bytes"] for row in everything), reverse=True)
    assert {row["block"] for row in ask("log", "blocks", day, "--chain", "aa")["blocks"]} == {"a" * 64}
    assert run(["log", "blocks", str(day), "--sort", "colour"]) == 2


def test_last_chooses_requests(ask, day):
    everything = ask("log", "requests", day)
    assert ask("log", "requests", day, "--last", 2)["requests"] == everything["requests"][-2:]
    assert everything["count"] == len(everything["requests"])


def test_the_csv_has_a_line_a_request_with_its_figures(ask, day, tmp_path):
    ask("log", "export", day, "--csv", tmp_path / "r.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text(encoding="utf-8"))))
    requests = ask("log", "requests", day)["requests"]
    assert [int(row["computed_tokens"]) for row in rows] == [request["computed_tokens"] for request in requests]
    assert [row["reason"] for row in rows] == [request.get("reason", "") for request in requests]


def test_the_parquet_file_has_a_row_an_event_typed(ask, day, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    written = ask("log", "export", day, "--parquet", tmp_path / "e.parquet")["written"]
    table = parquet.read_table(tmp_path / "e.parquet")
    lines = [json.loads(line) for line in day.read_text(encoding="utf-8").splitlines()]
    assert written[0]["rows"] == table.num_rows == len(lines)
    assert table["bytes"].to_pylist() == [line.get("bytes") for line in lines]
    assert table["event"].to_pylist() == [line["event"] for line in lines]


def test_without_pyarrow_the_hint_says_what_to_type(capsys, day, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(["log", "export", str(day), "--parquet", str(tmp_path / "e.parquet")]) == 2
    assert "pip install 'mlxkv[log]'" in capsys.readouterr().err


class Page(HTMLParser):
    """Counts what is in a page, and checks that every tag that opens closes."""

    VOID = ("meta", "link", "br", "img", "input")

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open = {}, [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_html_page_is_whole_self_contained_and_has_its_plots(ask, day, tmp_path):
    ask("log", "export", day, "--html", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags["svg"] in (2, 3)  # without a reuse there is no distance
    assert page.tags["rect"] > 20
    assert not {"script", "link", "img", "iframe"} & page.tags.keys()
    assert [value for name, value in page.attributes if name in ("src", "href")] == []
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    found = ask("log", "summary", day)
    for sentence in found["verdict"]:
        assert sentence.replace("'", "&#39;") in text
    assert f"{found['computed_tokens']:,}" in text


def test_what_a_log_says_is_escaped_in_the_page(ask, tmp_path):
    log = Script().request(300, model="<script>alert(1)</script>", reason="<b>never</b>").block("a", model="<i>")
    (tmp_path / "log").write_text(log.text(), encoding="utf-8")
    ask("log", "export", tmp_path / "log", "--html", tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags


def test_export_without_a_place_to_write_says_so(capsys, day, tmp_path):
    assert run(["log", "export", str(day)]) == 2
    assert "--html OUT" in capsys.readouterr().err
    assert run(["log", "export", str(day), "--csv", str(tmp_path / "none" / "r.csv")]) == 2
    assert "make it first" in capsys.readouterr().err


def test_tail_shows_requests_as_they_come_over_a_rotation_and_a_truncation(tmp_path):
    path = tmp_path / "blocks.jsonl"
    path.write_text("".join(Script().request(100 + i).text() for i in range(3)), encoding="utf-8")
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [*MLXKV, "log", "tail", str(path), "--last", "2", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            seen = [json.loads(process.stdout.readline())["prompt_tokens"] for _ in range(2)]
            with path.open("a", encoding="utf-8") as file:
                text = Script().request(200).text()
                file.write(text[:40])
                file.flush()
                time.sleep(0.3)
                file.write(text[40:])
            seen.append(json.loads(process.stdout.readline())["prompt_tokens"])
            path.rename(tmp_path / "blocks.jsonl.1")
            path.write_text(Script().request(300).text(), encoding="utf-8")
            seen.append(json.loads(process.stdout.readline())["prompt_tokens"])
            path.write_text(Script().request(4).text(), encoding="utf-8")
            seen.append(json.loads(process.stdout.readline())["prompt_tokens"])
        finally:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
    assert seen == [101, 102, 200, 300, 4]


def test_a_sparkline_has_the_height_of_its_values():
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)), width=30)) <= 30


def test_what_a_log_says_cannot_steer_the_terminal(tmp_path):
    log = (
        Script()
        .request(300, model="\x1b[2Jm", request="\x1b]0;x\x07r", reason="\x1b[31mred")
        .block("a", model="\x1b[2J")
    )
    (tmp_path / "log").write_text(log.text(), encoding="utf-8")
    commands = [["log", *arguments, str(tmp_path / "log")] for arguments in (["summary"], ["requests"], ["blocks"])]
    shown = on_a_terminal([*commands, ["log", "request", "\x1b]0;x\x07r", str(tmp_path / "log")]], 100, NO_COLOR="1")
    assert "\\x1b[2J" in shown
    for code in ("\x1b[2J", "\x1b]0;", "\x1b[31m"):
        assert code not in shown


def test_what_needs_two_passes_refuses_stdin_in_place_of_leaving_half_out(capsys, tmp_path):
    for arguments in (["request", "r1", "-"], ["export", "-", "--csv", f"{tmp_path}/r", "--html", f"{tmp_path}/h"]):
        assert run(["log", *arguments]) == 2
        assert "cannot be read twice" in capsys.readouterr().err


def test_a_log_with_only_a_torn_line_is_not_called_empty(capsys, tmp_path):
    (tmp_path / "torn.jsonl").write_text('{"time":"2026-11-3', encoding="utf-8")
    assert run(["log", "summary", str(tmp_path / "torn.jsonl")]) == 2
    assert "none of 1 lines is of a known log" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--csv", "--parquet", "--html"])
def test_an_export_never_writes_over_the_log_it_reads(option, capsys, day, tmp_path):
    before = day.read_bytes()
    (tmp_path / "link.csv").symlink_to(day)
    for given, output in ((day, day), (tmp_path, day), (day, tmp_path / "link.csv"), (day, tmp_path / "." / day.name)):
        assert run(["log", "export", str(given), option, str(output)]) == 2
        assert "is the log itself" in capsys.readouterr().err
        assert day.read_bytes() == before


def test_an_export_into_a_directory_or_twice_into_one_file_is_one_sentence(capsys, day, tmp_path):
    assert run(["log", "export", str(day), "--csv", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert run(["log", "export", str(day), "--csv", str(tmp_path / "a"), "--html", str(tmp_path / "a")]) == 2
    assert "give each its own name" in capsys.readouterr().err


@pytest.mark.parametrize("event", ["geometry", "scan", "boundary", "request"])
@pytest.mark.parametrize("detail", [{}, {"unstored_tokens": "x", "scanned": None, "layers": 3}])
def test_fields_that_only_readers_set_are_not_taken_from_a_line(event, detail, ask, tmp_path):
    script = Script().request(100).add(event, detail=detail, source="oMLX", prompt_tokens=7)
    (tmp_path / "odd.jsonl").write_text(script.text(), encoding="utf-8")
    assert ask("log", "summary", tmp_path / "odd.jsonl")["sources"] in ({"mlxkv": 1}, {"mlxkv": 2})
    assert run(["log", "summary", str(tmp_path / "odd.jsonl")]) == 0
    assert run(["log", "export", str(tmp_path / "odd.jsonl"), "--html", str(tmp_path / "o.html")]) == 0


@pytest.mark.parametrize("verb", [["summary"], ["blocks"], ["requests", "--json"], ["export", "--csv", "out.csv"]])
def test_a_file_that_is_no_log_gives_no_empty_report(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("milk\neggs\n", encoding="utf-8")
    assert run(["log", *verb, "notes.txt"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "none of 2 lines is of a known log" in err


def test_the_id_of_a_process_is_no_amount(capsys, tmp_path):
    script = Script().request(1200, request="abc", process=13190)
    (tmp_path / "one.jsonl").write_text(script.text(), encoding="utf-8")
    assert run(["log", "request", "abc", str(tmp_path / "one.jsonl")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"process +13190\n", out)
    assert re.search(r"prompt_tokens +1,200\n", out)


def test_a_whole_id_is_found_behind_many_that_begin_with_it(ask, tmp_path):
    script = Script()
    for number in range(10, 30):
        script.request(100, request=f"r1{number}")
    (tmp_path / "many.jsonl").write_text(script.request(500, request="r1").text(), encoding="utf-8")
    assert ask("log", "request", "r1", tmp_path / "many.jsonl")["request"]["prompt_tokens"] == 500
    assert ask("why", tmp_path / "many.jsonl", "r1")["request"] == "r1"
