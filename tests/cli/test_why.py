"""`mlxkv why`: from a log and from a server, with the words only when asked."""

import json
import threading
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prompts import Asker, common, conversation

from mlxkv_cli.docs import JSON_FIELDS
from mlxkv_cli.main import run

RULES = "You are a careful guide to the old harbour. Answer in one sentence. " * 3
ASK = Asker()
BEFORE = ASK(conversation(f"It is 09:15. {RULES}", "Which way?"))
NOW = ASK(conversation(f"It is 09:16. {RULES}", "Which way?"))
SHARED = common(BEFORE.tokens, NOW.tokens)


def request(name, asked, *, text, **fields):
    found = {
        "time": f"2026-11-30T19:00:0{len(name)}.000+00:00", "process": 1, "event": "request", "model": "tiny",
        "root": "0" * 64, "request": name, "prompt_tokens": len(asked.tokens), "hot_tokens": 0, "cold_tokens": 0,
        "computed_tokens": len(asked.tokens), "matched_tokens": 0, "outline": asked.outline.to_fields(),
    }  # fmt: skip
    return found | fields | ({"text": asked.text} if text else {})


def two(*, text=True):
    now = {"reason": f"diverged at token {SHARED}", "matched_tokens": SHARED}
    return [request("first", BEFORE, text=text, reason="never seen"), request("later", NOW, text=text, **now)]


@pytest.fixture
def log(tmp_path):
    def write(lines):
        path = tmp_path / "blocks.jsonl"
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")
        return str(path)

    return write


def test_json_names_the_token_the_message_and_the_cause(log, capsys):
    assert run(["why", log(two()), "later", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(JSON_FIELDS["why"]) - {"words"} <= found.keys()
    assert (found["token"], found["exact"], found["index"], found["role"]) == (SHARED, True, 0, "system")
    assert (found["nearest"], found["cause"]) == ("first", "date or counter")
    assert found["lost_tokens"] == len(NOW.tokens) - SHARED


def test_the_words_are_shown_only_when_asked_and_only_when_they_are_there(log, capsys):
    path = log(two())
    assert run(["why", path, "later"]) == 0
    assert "09:1" not in capsys.readouterr().out
    assert run(["why", path, "later", "--text"]) == 0
    out = capsys.readouterr().out
    assert "now     6. You" in out
    assert "before  5. You" in out
    assert run(["why", log(two(text=False)), "later", "--text"]) == 0
    assert "--log-text" in capsys.readouterr().err


def test_a_log_without_a_request_or_a_request_without_a_log_says_what_to_type(log, capsys):
    assert run(["why", log(two()), "nobody"]) == 2
    assert "mlxkv log requests" in capsys.readouterr().err
    assert run(["why", "later"]) == 2
    assert "mlxkv why FILE ID" in capsys.readouterr().err


class Server(BaseHTTPRequestHandler):
    """Gives the records a server keeps, to who has the key."""

    def do_GET(self):
        right = self.path == "/v1/cache/requests" and self.headers["Authorization"] == "Bearer sesame"
        newest_first = [{**each, "time": datetime.fromisoformat(each["time"]).timestamp()} for each in reversed(two())]
        body = json.dumps({"running": [], "requests": newest_first}).encode()
        self.send_response(200 if right else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_gives_the_same_answer_as_its_log(url, log, capsys):
    assert run(["why", "--url", url, "--api-key", "sesame", "later", "--json"]) == 0
    from_server = json.loads(capsys.readouterr().out)
    assert run(["why", log(two()), "later", "--json"]) == 0
    from_log = json.loads(capsys.readouterr().out)
    times = [datetime.fromisoformat(each.pop("nearest_time")) for each in (from_server, from_log)]
    assert times[0] == times[1]
    assert from_server == from_log


def test_a_server_that_refuses_or_is_not_there_is_one_sentence(url, capsys):
    assert run(["why", "--url", url, "later"]) == 1
    assert "check the address and the key" in capsys.readouterr().err
    assert run(["why", "--url", "http://127.0.0.1:9", "later"]) == 1
    assert "check the address and the key" in capsys.readouterr().err
    assert run(["why", "--url", url, "a file", "later"]) == 2


def test_an_outline_of_a_later_version_is_compared_by_the_fields_that_are_known(log, capsys):
    lines = two()
    for line in lines:
        line["outline"]["made_by"] = "a later version"
        line["outline"]["parts"] = [part | {"colour": "red"} for part in line["outline"]["parts"]]
    path = log(lines)
    assert run(["why", path, "later", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cause"] == "date or counter"
    assert run(["log", "summary", path, "--json"]) == 0
    assert [each["cause"] for each in json.loads(capsys.readouterr().out)["causes"]] == ["date or counter", "new text"]


@pytest.mark.parametrize(
    "damage", [{}, 5, [1], {"parts": 5}, {"parts": [7]}, {"key": None, "parts": [{"role": "user"}]}]
)
def test_an_outline_that_cannot_be_read_is_none_and_no_error(damage, log, capsys):
    lines = two()
    lines[1]["outline"] = damage
    nameless = {name: value for name, value in lines[0].items() if name != "request"}
    path = log([nameless, *lines])
    for command in (["why", path, "later"], ["log", "summary", path], ["log", "request", "later", path]):
        assert run(command) == 0
    assert "unknown: the cache says: diverged" in capsys.readouterr().out


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"5", b'{"requests": 5}', b'{"requests": [5]}', b"<html>"])
def test_an_address_of_another_server_is_one_sentence(answer, capsys):
    class Other(Server):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert run(["why", "--url", f"http://127.0.0.1:{server.server_port}", "later"]) == 1
        server.shutdown()
    assert "check the address" in capsys.readouterr().err
