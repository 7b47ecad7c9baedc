"""A GPU that fails under a request: both official clients are told what to change, and the next request is answered."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from answering import Served, events, served
from failing import OUT_OF_MEMORY, TOO_LONG, TOO_SLOW, Device
from serving import tiny_model

from mlxkv.engine.scheduler import Limits

TEXT = "a prompt of some length, so that it takes more than one chunk; " * 4
SAID = {
    "memory": (OUT_OF_MEMORY, r"--memory \(now 1.00 GiB\), --hot \(now 64.00 MiB\) or --sequences \(now 4\)"),
    "array": (TOO_LONG, r"--prefill-chunk below 128"),
    "time": (TOO_SLOW, r"--prefill-chunk below 128"),
}
CODES = {kind: f"device_{kind}" for kind in SAID}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.fixture
def server(device: Device, tmp_path: Path) -> Iterator[Served]:
    del device  # first, for the engine to run over it
    limits = Limits(sequences=4, memory_bytes=2**30)
    with served(tiny_model, tmp_path, engine={"limits": limits, "chunk_tokens": 128}) as found:
        yield found


def by_openai(server: Served, stream: bool, retries: int = 0) -> str:
    client = server.openai().with_options(max_retries=retries)
    asked: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
    asked["extra_body"] = {"cache": {"store": False}}
    if not stream:
        return client.chat.completions.create(**asked).choices[0].message.content or ""
    chunks = client.chat.completions.create(**asked, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def by_anthropic(server: Served, stream: bool, retries: int = 0) -> str:
    client = server.anthropic().with_options(max_retries=retries)
    asked: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
    asked["extra_body"] = {"cache": {"store": False}}
    if not stream:
        return "".join(block.text for block in client.messages.create(**asked).content if block.type == "text")
    with client.messages.stream(**asked) as stream_of:
        return "".join(stream_of.text_stream)


APIS: dict[str, tuple[Callable[..., str], type[Exception], type[Exception]]] = {
    "openai": (by_openai, openai.InternalServerError, openai.APIError),
    "anthropic": (by_anthropic, anthropic.InternalServerError, anthropic.APIStatusError),
}


def thread_of(server: Served) -> int:
    return server.engine.call(threading.get_ident)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("kind", SAID)
def test_the_client_is_told_the_setting_and_the_next_request_is_answered(
    kind: str, api: str, stream: bool, server: Served, device: Device
) -> None:
    ask, status_error, stream_error = APIS[api]
    said, setting = SAID[kind]
    want = ask(server, stream)
    device.arm(thread_of(server), 0, said=said)
    with pytest.raises(stream_error if stream else status_error) as told:
        ask(server, stream)
    device.arm(0, None)
    assert re.search(setting, str(told.value)), told.value
    assert said.rstrip(".") in str(told.value)
    if not stream:
        assert told.value.status_code == 503  # type: ignore[attr-defined]
    body = told.value.body  # type: ignore[attr-defined]
    if api == "openai":
        assert (body["code"], body["type"]) == (CODES[kind], "server_error")
    else:
        assert body["error"]["type"] == "overloaded_error"
    assert ask(server, stream) == want
    assert server.engine.alive


@pytest.mark.parametrize("api", APIS)
def test_a_client_sends_again_what_may_pass_and_nothing_else(api: str, server: Served, device: Device) -> None:
    ask, status_error, _ = APIS[api]
    for kind, requests in (("time", 1), ("array", 1)):
        before = server.metrics.finished
        device.arm(thread_of(server), 0, said=SAID[kind][0])
        with pytest.raises(status_error) as told:
            ask(server, False, retries=2)
        assert server.metrics.finished - before == requests
        assert "retry-after" not in told.value.response.headers  # type: ignore[attr-defined]
    device.arm(thread_of(server), 0, said=OUT_OF_MEMORY)
    with pytest.raises(status_error) as told:
        ask(server, False)
    device.arm(0, None)
    headers = told.value.response.headers  # type: ignore[attr-defined]
    assert int(headers["retry-after"]) >= 1
    assert "x-should-retry" not in headers


def test_plain_completions_end_a_stream_with_the_error(server: Served, device: Device) -> None:
    device.arm(thread_of(server), 0, said=TOO_SLOW)
    status, text, _ = server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 4, "stream": True})
    device.arm(0, None)
    assert status == 200
    last = events(text)[-1]
    assert last["error"]["code"] == "device_time"
    assert "--prefill-chunk" in last["error"]["message"]
