"""An API that is made up here is served like the others: a room of routes, bodies, replies and errors, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from serving import running, tiny_model
from starlette.testclient import TestClient

from mlxkv.engine.request import Event, Finished, Piece, Request, Sampling
from mlxkv.server.apis.openai.routes import openai_api
from mlxkv.server.generation.life import Reply, respond
from mlxkv.server.generation.service import Service
from mlxkv.server.generation.wish import Wish
from mlxkv.server.http.api import Api, Route
from mlxkv.server.http.application import application
from mlxkv.server.http.body import read
from mlxkv.server.http.errors import ErrorShape
from mlxkv.server.settings import Settings

KEY = {"authorization": "Bearer key"}


class ChatBody(BaseModel):
    """Has the name of another API's body."""

    model: str | None = None
    stream: bool | None = None
    say: str


class Shouted(ErrorShape):
    def body(self, status: int, message: str, *, code: str | None = None, field: str | None = None) -> dict[str, Any]:
        return {"shouted": message.upper(), "status": status, "code": code, "field": field}

    def event(self, body: dict[str, Any]) -> bytes:
        return f"!{body['status']}\n".encode()


class Lines(Reply):
    """A line a token."""

    ping = b".\n"
    errors = Shouted()

    def __init__(self, service: Service, body: ChatBody, requests: list[Request]) -> None:
        del service, body
        self.tokens = 0
        self.prompt = len(requests[0].prompt)

    def begin(self) -> list[bytes]:
        return [b"<\n"]

    def take(self, choice: int, event: Event) -> None:
        del choice
        self.tokens += isinstance(event, Piece)

    def frames(self, choice: int, event: Event) -> Iterator[bytes]:
        self.take(choice, event)
        if isinstance(event, Piece):
            yield b"-\n"
        if isinstance(event, Finished):
            yield f"{event.output_tokens}\n".encode()

    def end(self) -> list[bytes]:
        return [b">\n"]

    def answer(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "said": self.tokens}


def requests_of(service: Service, body: ChatBody, key_salt: str | None) -> list[Request]:
    assert key_salt, "the guard found the caller's key"
    return service.of_prompts([body.say], Wish(max_tokens=3, sampling=Sampling()))


class Paths:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def say(self, request: HttpRequest) -> Response:
        """Say something."""
        return await respond(self.service, request, await read(request, ChatBody), requests_of, Lines)

    async def open(self) -> JSONResponse:
        return JSONResponse({"open": True})

    async def broken(self) -> JSONResponse:
        raise ValueError("private detail")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    files = tmp_path_factory.mktemp("files")
    (files / "page.txt").write_text("a page")
    settings = Settings(api_keys=("key",))
    with running(tiny_model, tmp_path_factory.mktemp("cache")) as engine:
        service = Service(engine, settings, [].append)
        paths = Paths(service)
        made_up = Api(
            routes=[
                Route(method="POST", path="/v9/say", handler=paths.say, body=ChatBody),
                Route(method="GET", path="/v9/open", handler=paths.open, needs_key=False),
                Route(method="GET", path="/v9/broken", handler=paths.broken, listed=False),
            ],
            errors={"/v9": Shouted()},
            files={"/pages": files},
        )
        app = application([openai_api(service), made_up], settings)
        yield TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def test_it_answers_whole_and_as_a_stream(client: TestClient) -> None:
    whole = client.post("/v9/say", json={"say": "hello"}, headers=KEY)
    assert (whole.status_code, whole.json()) == (200, {"prompt": 5, "said": 3})
    stream = client.post("/v9/say", json={"say": "hello", "stream": True}, headers=KEY)
    assert stream.text.split() == ["<", "-", "-", "-", "3", ">"]


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "said"),
    [
        ("POST", "/v9/say", {"say": 1}, KEY, 400, "SAY: "),
        ("POST", "/v9/say", {"say": ""}, KEY, 400, "THE PROMPT HAS NO TOKENS"),
        ("POST", "/v9/say", {"say": "x", "model": "other"}, KEY, 404, "THIS SERVER HAS LLAMA"),
        ("POST", "/v9/say", {"say": "x"}, {}, 401, "THE API KEY"),
        ("POST", "/v9/say", {"say": "x"}, KEY | {"host": "evil.example"}, 403, "THIS HOST"),
        ("GET", "/v9/say", None, KEY, 405, "THIS PATH TAKES ANOTHER METHOD"),
        ("GET", "/v9/nothing", None, KEY, 404, "THERE IS NOTHING"),
        ("GET", "/v9/broken", None, KEY, 500, "AN UNEXPECTED VALUEERROR"),
    ],
)
def test_every_error_under_its_paths_has_its_shape(
    client: TestClient, method: str, path: str, body: Any, headers: dict[str, str], status: int, said: str
) -> None:
    answer = client.request(method, path, json=body, headers=headers)
    assert answer.status_code == status
    assert answer.json()["shouted"].startswith(said)
    assert "PRIVATE" not in answer.text


def test_errors_of_other_paths_keep_theirs(client: TestClient) -> None:
    for path in ("/v1/chat/completions", "/v1/nothing", "/"):
        assert set(client.get(path, headers=KEY).json()["error"]) == {"message", "type", "param", "code"}


def test_an_error_in_a_stream_is_its_event(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("private detail")

    monkeypatch.setattr("mlxkv.prompt_cache.block_cache.CachedSequence.first_token", fail)
    assert client.post("/v9/say", json={"say": "x", "stream": True}, headers=KEY).text.split() == ["<", "!500"]


def test_only_what_it_says_is_open_without_a_key(client: TestClient) -> None:
    assert client.get("/v9/open").json() == {"open": True}
    assert client.get("/pages/page.txt").text == "a page"
    for path in ("/v9/openly", "/v9/broken", "/pages", "/v1/models"):
        assert client.get(path).status_code == 401, path


def test_bodies_of_one_name_are_two_schemas(client: TestClient) -> None:
    found = client.get("/openapi.json", headers=KEY).json()
    assert set(found["paths"]) >= {"/v9/say", "/v9/open", "/v1/chat/completions"}
    fields = []
    for path in ("/v9/say", "/v1/chat/completions"):
        operation = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        fields.append(set(found["components"]["schemas"][operation["$ref"].rpartition("/")[2]]["properties"]))
    assert fields[0] == {"model", "stream", "say"}
    assert {"messages", "tools"} <= fields[1]
    assert "/v9/broken" not in found["paths"]
