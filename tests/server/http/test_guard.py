"""Nobody calls from elsewhere: Host, Origin, Content-Type and keys, over raw sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from answering import Served, served
from serving import SOON_S, tiny_model

from mlxkv.core.errors import UsageError
from mlxkv.server.settings import Settings

BODY = b'{"prompt": "x", "max_tokens": 1}'
JSON = "application/json"
ALLOWED = "https://friend.example"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(
        tiny_model, tmp_path_factory.mktemp("guard"), allow_origins=(ALLOWED,), allow_hosts=("mac.local",)
    ) as found:
        yield found


def raw(server: Served, method: str, headers: list[str], body: bytes = b"", path: str = "/v1/completions") -> str:
    """What comes back for exactly these headers; PORT in them is the server's."""
    lines = [f"{method} {path} HTTP/1.1", *headers, "Connection: close", f"Content-Length: {len(body)}", "", ""]
    text = "\r\n".join(lines).replace("PORT", str(server.port))
    with socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S) as connection:
        connection.sendall(text.encode("latin-1") + body)
        found = b""
        while more := connection.recv(65536):
            found += more
    return found.decode()


def status_of(answer: str) -> int:
    return int(answer.split(" ", 2)[1])


@dataclass(frozen=True)
class Case:
    """What a request says and whether it may be answered; `hosts` and `types` are as many headers."""

    allowed: bool
    hosts: tuple[str, ...] = ("127.0.0.1:PORT",)
    origin: str | None = None
    types: tuple[str, ...] = (JSON,)
    method: str = "POST"
    more: tuple[str, ...] = ()


def hosts(allowed: bool, *names: str) -> list[Case]:
    return [Case(allowed, (name,)) for name in names]


def origins(allowed: bool, *names: str) -> list[Case]:
    return [Case(allowed, origin=name) for name in names]


def types(allowed: bool, *names: str) -> list[Case]:
    return [Case(allowed, types=(name,)) for name in names]


CASES = [
    *hosts(True, "127.0.0.1:PORT", "localhost:PORT", "LOCALHOST:PORT", "LocalHost", "127.0.0.1", "[::1]:PORT", "[::1]"),
    *hosts(True, "mac.local", "MAC.local:PORT", "localhost:1"),
    *hosts(False, "evil.example", "evil.example:PORT", "localhost.evil.example", "127.0.0.1.evil.example:PORT"),
    *hosts(False, "localhost.", "localhost.:PORT", "127.0.0.1.", "mac.local.", "mac.local.evil.example", "xmac.local"),
    *hosts(False, "", ":PORT", "localhost:", "localhost:PORT:PORT", "localhost:http", "localhost:123456"),
    *hosts(
        False, "user@localhost", "user:pass@localhost:PORT", "localhost@evil.example", "localhost/evil", "local host"
    ),
    *hosts(False, "localhost#", "localhost?x", "localhost,evil.example", "http://localhost", "*", "localhost%00"),
    *hosts(False, "[::1", "::1", "[::1].evil.example", "[::1]evil", "[::ffff:127.0.0.1]", "[0:0:0:0:0:0:0:1]", "[::]"),
    *hosts(
        False, "0.0.0.0", "0", "127.1", "2130706433", "0x7f000001", "127.0.0.2", "lоcalhost".encode().decode("latin-1")
    ),
    Case(False, ()),
    Case(False, ("localhost", "evil.example")),
    Case(False, ("evil.example", "localhost")),
    Case(False, ("localhost", "localhost")),
    *origins(True, "http://127.0.0.1:PORT", "HTTP://127.0.0.1:PORT", ALLOWED, "https://FRIEND.example"),
    *origins(False, "null", "", "http://evil.example", "https://evil.example:PORT", "http://127.0.0.1", "file://"),
    *origins(False, "http://127.0.0.1:1", "https://127.0.0.1:PORT", "http://localhost:PORT", "http://127.0.0.1:PORT/"),
    *origins(False, "http://127.0.0.1:PORT.evil.example", "http://127.0.0.1:PORT@evil.example", "http://mac.local"),
    *origins(False, "http://friend.example", f"{ALLOWED}:8443", f"{ALLOWED}.evil.example", f"{ALLOWED}/", "*"),
    *origins(False, f"{ALLOWED} http://evil.example", "chrome-extension://abc", "http://[::1]:PORT"),
    Case(False, origin="http://evil.example", method="GET"),
    Case(False, ("evil.example",), "http://evil.example"),
    Case(False, ("evil.example:PORT",), "http://evil.example:PORT"),
    Case(False, more=(f"Origin: {ALLOWED}", "Origin: http://evil.example")),
    Case(False, more=("Sec-Fetch-Site: cross-site",)),
    Case(False, more=("Sec-Fetch-Site: same-site",)),
    Case(False, more=("Sec-Fetch-Site: cross-site",), method="GET"),
    Case(True, more=("Sec-Fetch-Site: none",)),
    Case(True, origin="http://127.0.0.1:PORT", more=("Sec-Fetch-Site: same-origin",)),
    *types(True, "Application/JSON", "application/json; charset=utf-8", " application/json ;x=y"),
    *types(False, "text/plain", "text/plain; application/json", "application/x-www-form-urlencoded", "", "json"),
    *types(False, "multipart/form-data; boundary=x", "application/json-seq", "application/jsonx", "text/json", "*/*"),
    *types(False, "text/plain;charset=application/json", "application/json, text/plain", "application/json/x"),
    Case(False, types=()),
    Case(False, types=("text/plain", JSON)),
    Case(False, types=(JSON, "text/plain")),
    Case(False, types=("text/plain",), origin="http://evil.example"),
    Case(False, method="OPTIONS", origin="http://evil.example", more=("Access-Control-Request-Method: POST",)),
    Case(False, method="OPTIONS", origin="null", more=("Access-Control-Request-Method: POST",)),
    Case(False, ("evil.example",), method="OPTIONS", more=("Access-Control-Request-Method: POST",)),
]


def test_the_table_is_long_and_no_case_stands_twice() -> None:
    assert len(CASES) == len(set(CASES))
    assert len(CASES) >= 60


@pytest.mark.parametrize("number", range(len(CASES)))
def test_only_callers_from_here_are_answered(server: Served, number: int) -> None:
    case = CASES[number]
    headers = [f"Host: {name}" for name in case.hosts]
    headers += [] if case.origin is None else [f"Origin: {case.origin}"]
    headers += [*case.more, *(f"Content-Type: {kind}" for kind in case.types)]
    finished = server.metrics.finished
    if case.method == "GET":
        answer = raw(server, "GET", headers, path="/v1/models")
    else:
        answer = raw(server, case.method, headers, BODY if case.method == "POST" else b"")
    head, _, body = answer.partition("\r\n\r\n")
    if case.allowed:
        assert status_of(answer) == 200
        assert ("access-control-allow-origin" in head) == ((case.origin or "").lower() == ALLOWED)
        return
    assert status_of(answer) in (400, 403, 415)
    assert "access-control" not in head
    assert json.loads(body)["error"]["message"]
    assert server.metrics.finished == finished, "nothing was computed"


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/v1/cache", "/v1/messages", "/static/x", "/x"])
def test_every_path_is_guarded(server: Served, path: str) -> None:
    assert status_of(raw(server, "GET", ["Host: evil.example"], path=path)) == 403
    assert status_of(raw(server, "GET", ["Host: localhost", "Origin: http://evil.example"], path=path)) == 403


def test_a_preflight_of_a_friend_says_what_its_page_may_do(server: Served) -> None:
    headers = ["Host: 127.0.0.1:PORT", f"Origin: {ALLOWED}", "Access-Control-Request-Method: POST"]
    answer = raw(server, "OPTIONS", headers).lower()
    assert status_of(answer) == 204
    assert f"access-control-allow-origin: {ALLOWED}" in answer
    assert "vary: origin" in answer
    assert "content-type" in answer.partition("access-control-allow-headers:")[2].partition("\r\n")[0]
    assert "access-control-allow-credentials" not in answer


def test_without_friends_no_page_is_told_anything(tmp_path: Any) -> None:
    with served(tiny_model, tmp_path) as server:
        for method in ("OPTIONS", "GET"):
            answer = raw(server, method, ["Host: localhost", f"Origin: {ALLOWED}"], path="/v1/models")
            assert status_of(answer) == 403
            assert "access-control" not in answer.lower()


def test_a_web_socket_is_not_opened(server: Served) -> None:
    headers = ["Host: localhost", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    assert status_of(raw(server, "GET", [*headers, "Sec-WebSocket-Key: x"], path="/v1/models")) == 200, "never 101"


KEYS = ("key-one-longer", "key2")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tiny_model, tmp_path_factory.mktemp("keyed"), api_keys=KEYS) as found:
        yield found


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer key"},
        {"authorization": "Bearer key22"},
        {"authorization": "Bearer KEY2"},
        {"authorization": "Bearer key2 x"},
        {"authorization": "Basic key2"},
        {"authorization": "key2"},
        {"authorization": "Bearer k\xe9y2"},
        {"x-api-key": "wrong"},
        {"x-api-key": ""},
        {"authorization": "Bearer wrong", "x-api-key": "key2"},
        {"cookie": "key=key2"},
    ],
)
def test_without_its_key_nothing_is_said(keyed: Served, headers: dict[str, str]) -> None:
    for path, body in (("/v1/completions", BODY), ("/v1/messages", b"{}")):
        status, answer, _ = keyed.post(path, body, headers)
        assert status == 401
        assert ("type" in answer) == (path == "/v1/messages")
        assert not any(key in json.dumps(answer) for key in KEYS)
    for path in ("/v1/models", "/v1/cache", "/v1/cache/blocks", "/v1/cache/requests", "/metrics", "/openapi.json"):
        assert keyed.get(path, headers)[0] == 401
    assert keyed.get("/v1/models?key=key2", headers)[0] == 401


def test_whether_the_process_is_alive_needs_no_key(keyed: Served) -> None:
    assert keyed.get("/health")[0] == keyed.get("/ready")[0] == 200


def test_two_keys_share_no_token_and_either_way_to_send_one_does(keyed: Served) -> None:
    prompt = {"prompt": "the same words " * 20, "max_tokens": 1}

    def cached(headers: dict[str, str], **more: Any) -> int:
        status, answer, _ = keyed.post("/v1/completions", {**prompt, **more}, headers)
        assert status == 200
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    one, two = ({"authorization": f"Bearer {key}"} for key in KEYS)
    assert cached(one) == 0
    assert cached(one) == 299
    assert cached(two) == 0
    assert cached({"x-api-key": KEYS[1]}) == 299
    assert cached({"authorization": f"bearer {KEYS[1]}"}) == 299
    assert cached(two, cache={"salt": "s"}) == cached(one, cache={"salt": "s"}) == 0
    assert cached(two, cache={"salt": "s"}) == 299


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "", "127.0.0.1.evil.example"])
def test_off_loopback_it_does_not_start_without_a_key(host: str) -> None:
    with pytest.raises(UsageError, match="--api-key"):
        Settings(host=host)
    Settings(host=host, api_keys=("k",))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.0.1"])
def test_on_loopback_no_key_is_needed(host: str) -> None:
    assert Settings(host=host).api_keys == ()


@pytest.mark.parametrize("key", ["", "  ", "k\n", "schlüssel"])
def test_a_key_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="API key"):
        Settings(api_keys=("good", key))
