"""Two thousand requests that are wrong: never a 5xx, never silence, and the next one is answered.

Some are drawn by schemathesis from the server's own /openapi.json, which takes its time over each, and most are bytes
made by hand; both are the same in each run.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from answering import Served, events, served
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from serving import SOON_S, tiny_model

CHAT, TEXT, MESSAGE, COUNT = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"
POSTS = (CHAT, TEXT, MESSAGE, COUNT)
DRAWN = {GenerationMode.NEGATIVE: 30, GenerationMode.POSITIVE: 10}
HAND_MADE = 1_840
DEADLINE_S = 2.0
CONTEXT = 64  # so that no reply is long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("malformed")
    with served(
        lambda: replace(tiny_model(), context_tokens=CONTEXT), directory, read_deadline_s=DEADLINE_S, max_tokens=2
    ) as found:
        yield found
        assert found.engine.error is None


def check(path: str, status: int, text: bytes, kind: str) -> None:
    """Below 500, and an error in its API's shape: as an answer, or as the last event of a stream."""
    assert status < 500, text
    if kind.startswith("text/event-stream"):
        found = events(text.decode())[-1]
        assert found == "[DONE]" or found["type"] == "message_stop", found
    elif status >= 400:
        error = json.loads(text)
        assert error["error"]["message"]
        if path.startswith(MESSAGE):
            assert error["type"] == "error"
            assert error["error"]["type"].endswith(("_error", "_too_large"))
        else:
            assert error["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("mode", list(DRAWN), ids=lambda mode: str(mode.value))
@pytest.mark.parametrize("path", POSTS)
def test_what_schemathesis_draws_is_answered(server: Served, path: str, mode: GenerationMode) -> None:
    operation = schemathesis.openapi.from_dict(server.get("/openapi.json")[1])[path]["POST"]
    statuses: list[int] = []

    @settings(
        max_examples=DRAWN[mode],
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        answer = case.call(base_url=server.url, timeout=SOON_S)
        check(path, answer.status_code, answer.content, answer.headers.get("content-type", [""])[0])
        statuses.append(answer.status_code)

    send()
    assert len(statuses) >= DRAWN[mode] * 0.9
    if mode is GenerationMode.NEGATIVE:
        assert statuses.count(400) > DRAWN[mode] / 2
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 1})[0] == 200


GOOD = {
    CHAT: b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0.5, "stop": ["x"]}',
    TEXT: b'{"prompt": [104, 101], "max_tokens": 2, "logit_bias": {"7": 1.5}, "stream": false, "logprobs": 1}',
    MESSAGE: b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 2}',
    COUNT: b'{"messages": [{"role": "user", "content": "hello"}], "system": "be kind"}',
}


def request(path: str, body: bytes, *, line: bytes | None = None, headers: bytes | None = None) -> bytes:
    head = line or f"POST {path} HTTP/1.1".encode()
    length = b"Content-Length: %d" % len(body) if headers is None else headers
    return b"\r\n".join(
        [head, b"Host: localhost", b"Content-Type: application/json", b"Connection: close", length, b"", body]
    )


def bodies(rng: random.Random, path: str) -> bytes:
    """A body that is wrong in one of many ways; some changes of bytes leave it right."""
    good = GOOD[path]
    at = rng.randrange(1, len(good))
    flipped = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        flipped[rng.randrange(len(good))] = rng.randrange(256)
    deep = rng.choice([10, 200, 5_000, 100_000])
    return rng.choice(
        [
            good[:at],
            good[at:],
            good + good,
            bytes(flipped),
            good[:at]
            + rng.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\x00", b"\xf8\x88\x80\x80\x80"])
            + good[at:],
            good.replace(b'"hello"', b'"\\ud800"').replace(b'"hi"', b'"\\udfff x"').replace(b"[104,", b'["\\ud83d",'),
            good[:-1] + b', "max_tokens": 1, "max_tokens": "2", "messages": 1, "prompt": {}}',
            good[:-1] + b', "tools": ' + b"[" * deep + b"]" * deep + b"}",
            good[:-1] + b', "tools": ' + b'{"a":' * deep + b"1" + b"}" * deep + b"}",
            b"[" * deep,
            b'{"messages": ' + b"[" * deep + b"]" * deep + b"}",
            good[:-1] + b', "temperature": 1' + b"0" * rng.choice([10, 400, 5_000]) + b"}",
            good[:-1] + b', "seed": ' + b"9" * rng.choice([20, 4_000, 6_000]) + b"}",
            good[:-1] + b', "stop": [' + b'"x",' * 5_000 + b'"x"]}',
            good[:-1] + b', "logit_bias": {' + b'"7": 1,' * 5_000 + b'"a": 1}}',
            b'{"prompt": [' + b"1," * 50_000 + b'"a"], "messages": [' + b"1," * 50_000 + b"1]}",
            b"\xef\xbb\xbf" + good,
            good.decode().encode("utf-16"),
            b"--x\r\n\r\n" + good,
            rng.randbytes(rng.randint(0, 300)),
        ]
    )


def wires(rng: random.Random, path: str) -> tuple[bytes, bool]:
    """The bytes of a request that is wrong before its body, and whether the server can know that it is complete."""
    good = GOOD[path]
    chunked = b"Transfer-Encoding: chunked"
    cut = request(path, good)
    choices: list[tuple[bytes, bool]] = [
        (cut[: rng.randrange(1, len(cut))], False),
        (request(path, good, headers=b"Content-Length: %d" % (len(good) + 50)), False),
        (request(path, good, headers=b"Content-Length: 5"), True),
        (request(path, good, headers=b"Content-Length: -1"), True),
        (request(path, good, headers=b"Content-Length: 1e3"), True),
        (request(path, good, headers=b"Content-Length: 10\r\nContent-Length: 11"), True),
        (request(path, good, headers=b"Content-Length: 99999999999999999999"), True),
        (request(path, b"zz\r\n" + good, headers=chunked), True),
        (request(path, b"-5\r\n" + good + b"\r\n0\r\n\r\n", headers=chunked), True),
        (request(path, b"5\r\n" + good + b"\r\n0\r\n\r\n", headers=chunked), True),
        (request(path, b"%x\r\n" % len(good) + good + b"\r\n", headers=chunked), False),
        (request(path, b"%x\r\n" % len(good) + good + b"\r\n0\r\n\r\n", headers=chunked), True),
        (request(path, b"f" * 30 + b"\r\n", headers=chunked), True),
        (request(path, b"", headers=b"Transfer-Encoding: gzip, chunked"), True),
        (request(path, good, line=b"POST " + path.encode()), True),
        (request(path, good, line=b"POST  HTTP/1.1"), True),
        (request(path, good, line=b"POST " + path.encode() + b" HTTP/9.9"), True),
        (request(path, good, line=b"P\x00ST " + path.encode() + b" HTTP/1.1"), True),
        (request(path, good, line=rng.choice([b"PUT", b"PATCH", b"BREW"]) + b" " + path.encode() + b" HTTP/1.1"), True),
        (request(path, good, line=b"POST " + path.encode() + b"/%00%ff/../x HTTP/1.1"), True),
        (request(path, good, line=b"POST " + path.encode() + b"?" + b"a" * 4_000 + b" HTTP/1.1"), True),
        (request(path, good, headers=b"Content-Length: %d\r\nX: " % len(good) + b"a" * 70_000), True),
        (request(path, good, headers=b"Content-Length: %d\r\n" % len(good) + b"X: a\r\n" * 12_000), True),
        (request(path, good, headers=b"Content-Length: %d\r\nX\x00: a" % len(good)), True),
        (request(path, good, headers=b"Content-Length: %d\r\nX : a" % len(good)), True),
        (request(path, good, headers=b"Content-Length: %d\r\nno colon" % len(good)), True),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", True),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200) + b"\r\n\r\n", True),
        (rng.randbytes(rng.randint(1, 200)) + b"\r\n\r\n", False),
        (b"\r\n" * rng.randint(1, 50), False),
    ]
    return rng.choice(choices)


def exchange(server: Served, sent: bytes, *, complete: bool) -> bytes:
    """Everything that comes back; a request that never ends is left after it was sent."""
    found = b""
    with server.raw() as connection:
        try:
            connection.sendall(sent)
            if not complete:
                return b""
            while more := connection.recv(65536):
                found += more
        except ConnectionError:  # it hung up while more was on its way
            pass
    return found


def first_answer(found: bytes) -> tuple[bytes, bytes]:
    """Head and body of the first answer; what follows a request may be taken for another one."""
    head, _, text = found.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return head, text[: int(length[1])] if length else text


def test_bytes_made_by_hand_are_answered(server: Served) -> None:
    rng = random.Random(5)
    statuses: dict[int, int] = {}
    for number in range(HAND_MADE):
        path = POSTS[number % 4]
        in_body = rng.random() < 0.6
        sent, complete = (request(path, bodies(rng, path)), True) if in_body else wires(rng, path)
        answer = exchange(server, sent, complete=complete)
        if complete:
            head, text = first_answer(answer)
            assert head.startswith(b"HTTP/1.1 "), sent[:200]
            status = int(head.split(b" ", 2)[1])
            kind = b"event-stream" in head.lower()
            where = path if b'"type":"error"' in text.replace(b" ", b"") else CHAT
            assert where == path or not (in_body and path.startswith(MESSAGE) and status >= 400), text
            check(where, status, text, "text/event-stream" if kind else "")
            statuses[status] = statuses.get(status, 0) + 1
        if number % 50 == 0:
            assert server.post(TEXT, {"prompt": "x", "max_tokens": 1})[0] == 200
    assert statuses[400] > HAND_MADE / 3
    assert set(statuses) <= {200, 400, 403, 404, 405, 413, 415, 431}
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 1})[0] == 200
    server.settled()


def test_a_body_that_is_too_large_is_413_however_it_comes(server: Served) -> None:
    size = 33 * 2**20
    head = request(MESSAGE, b"", headers=b"Content-Length: %d" % size)
    answer = exchange(server, head, complete=True)
    assert b" 413 " in answer.splitlines()[0] + b" "
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "request_too_large"
    with server.raw() as connection:
        connection.sendall(request(CHAT, b"", headers=b"Transfer-Encoding: chunked"))
        chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        sent = 0
        try:
            while sent < 64:
                connection.sendall(chunk)
                sent += 1
        except ConnectionError:
            pass
    assert 32 <= sent < 64, "not read to its end"
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, b'{"prompt": [' + b"1," * (8 * 2**20) + b'"a"]}'),
        (TEXT, b'{"prompt": [' + b'"",' * (5 * 2**20) + b"1]}"),
        (CHAT, b'{"messages": [' + b"{}," * (5 * 2**20) + b"{}]}"),
        (MESSAGE, b'{"max_tokens": 1, "messages": [{"role": "user", "content": [' + b"{}," * (5 * 2**20) + b"{}]}]}"),
        (CHAT, b'{"messages": [{"role": "user", "content": "' + b"a" * (20 * 2**20) + b'"}]}'),
    ],
    ids=["ids", "texts", "messages", "blocks", "text"],
)
def test_millions_of_wrong_items_do_not_stop_the_server(server: Served, path: str, body: bytes) -> None:
    began = time.process_time()
    status, answer, _ = server.post(path, body)
    assert status == 400
    assert len(json.dumps(answer)) < 2_000
    assert time.process_time() - began < 5.0, "of this process: the event loop was not free for as long"


def test_a_body_that_does_not_end_in_time_is_408(server: Served) -> None:
    for path in (CHAT, MESSAGE):
        with server.raw() as connection:
            connection.sendall(request(path, b'{"mess', headers=b"Content-Length: 100"))
            began = time.monotonic()
            answer = connection.recv(65536)
            while more := connection.recv(65536):
                answer += more
        assert DEADLINE_S - 0.5 < time.monotonic() - began < DEADLINE_S + 10
        assert b" 408 " in answer.splitlines()[0]
        check(path, 408, answer.partition(b"\r\n\r\n")[2], "")


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\n",
        b"POST /x HTTP/1.1\r\nHost: evil\r\nContent-Length: 1000\r\n\r\nsome",
    ],
    ids=["nothing", "line", "header", "second", "refused"],
)
def test_whoever_sends_a_byte_now_and_then_is_cut_off(server: Served, start: bytes) -> None:
    with server.raw() as connection:
        connection.sendall(start)
        connection.settimeout(0.2)
        began = time.monotonic()
        while time.monotonic() - began < DEADLINE_S + 15:
            try:
                if not connection.recv(65536):
                    break
            except TimeoutError:
                try:
                    connection.sendall(b"a" if start else b"")
                except ConnectionError:
                    break
            except ConnectionError:
                break
        assert DEADLINE_S - 0.5 < time.monotonic() - began < DEADLINE_S + 10
