"""A server's life: slow prefills, full queues, a dying engine, signals, kill -9, and numbers that add up."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from answering import Served, events, served, wait_until
from serving import SOON_S, tiny_model
from talking import END, save_talking_model

from mlxkv.engine.engine import EngineStoppedError
from mlxkv.engine.request import Request
from mlxkv.engine.scheduler import Limits
from mlxkv.models.loader import LoadedModel

CHAT, TEXT, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/messages"
SLOW_S = 6.0
PATHS = [CHAT, TEXT, MESSAGE]


def asking(path: str, text: str = "hello", **more: Any) -> dict[str, Any]:
    body = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    return {"max_tokens": 2, **body, **more}


class Slow(nn.Module):
    """A model whose chunks of a prompt take `SLOW_S` seconds each."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.layers = inner.layers

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        if inputs.shape[1] > 1:
            time.sleep(SLOW_S)
        return self.inner(inputs, cache=cache)  # type: ignore[no-any-return]


def slow_model() -> LoadedModel:
    model = tiny_model()
    return replace(model, module=Slow(model.module))


def test_a_long_prefill_keeps_its_client_waiting_with_something_to_read(tmp_path: Path) -> None:
    paths = [CHAT, MESSAGE]
    gaps: dict[str, list[float]] = {path: [] for path in paths}
    texts: dict[str, str] = {}

    def ask(path: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SOON_S)
        body = json.dumps(asking(path, "w" * 30, stream=True, cache={"salt": path}))
        last = time.monotonic()
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        gaps[path].append(time.monotonic() - last)
        found = b""
        last = time.monotonic()
        while more := answer.read1(65536):
            gaps[path].append(time.monotonic() - last)
            last, found = time.monotonic(), found + more
        texts[path] = found.decode()
        connection.close()

    with served(slow_model, tmp_path) as server:
        threads = [threading.Thread(target=ask, args=(path,), daemon=True) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)
            assert not thread.is_alive()
    for path in paths:
        assert gaps[path][0] < 1.0, "the headers"
        assert gaps[path][1] < 1.0, "and something after them"
        assert max(gaps[path]) < 5.0
        assert "ping" in texts[path]
        last = events(texts[path])[-1]
        assert last == "[DONE]" or last["type"] == "message_stop"


def test_a_full_queue_is_429_and_says_when_to_come_again(tmp_path: Path) -> None:
    with served(tiny_model, tmp_path, engine={"limits": Limits(sequences=1, queue=1)}) as server:
        sent = json.dumps(asking(CHAT, max_tokens=4000, stream=True)).encode()
        with server.raw() as running, server.raw() as waiting:
            for connection in (running, waiting):
                connection.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(sent) + sent
                )
                wait_until(lambda: server.engine.status.running)
            wait_until(lambda: server.engine.status.queued == 1)
            for path, kind in ((CHAT, "invalid_request_error"), (MESSAGE, "rate_limit_error")):
                for stream in (False, True):
                    status, answer, headers = server.post(path, asking(path, stream=stream))
                    assert status == 429
                    assert answer["error"]["type"] == kind
                    assert int(headers["retry-after"]) >= 1
            assert server.post(CHAT, asking(CHAT, n=2))[0] == 429, "all of its choices or none"
        server.settled()
        assert server.post(CHAT, asking(CHAT))[0] == 200
        assert server.engine._waiting == 0


def die() -> None:
    raise MemoryError("no room")


def test_a_dead_engine_is_told_and_begins_anew_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxkv.engine.engine.RESTART_S", 1.5)
    with served(tiny_model, tmp_path) as server:
        body = asking(TEXT, "some words " * 20)
        before = server.post(TEXT, body)[1]
        assert server.get("/ready")[0] == 200
        server.engine._inbox.put(die)
        wait_until(lambda: not server.engine.alive)
        status, answer, headers = server.get("/ready")
        assert (status, answer["status"]) == (503, "the engine stopped")
        assert server.get("/health")[0] == 200
        for path in PATHS:
            status, answer, headers = server.post(path, asking(path))
            assert status == 503
            assert answer["error"]["type"] == ("overloaded_error" if path == MESSAGE else "server_error")
            assert int(headers["retry-after"]) >= 1
        wait_until(lambda: server.engine.alive)
        assert server.get("/ready")[0] == 200
        after = server.post(TEXT, body)[1]
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 219
        server.engine._inbox.put(die)
        wait_until(lambda: not server.engine._thread.is_alive())
        for path in ("/ready", "/v1/cache/blocks"):
            assert server.get(path)[0] == 503
        for path in ("/health", "/v1/models", "/v1/cache", "/v1/cache/requests", "/metrics"):
            assert server.get(path)[0] == 200
        assert server.post(CHAT, asking(CHAT))[0] == 503


def test_a_request_that_came_while_the_engine_died_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxkv.engine.engine.RESTARTS", 0)
    with served(tiny_model, tmp_path) as server:
        engine, go = server.engine, threading.Event()
        engine._inbox.put(lambda: go.wait(SOON_S) and None)
        engine._inbox.put(die)
        heard: list[Any] = []
        engine.submit(Request(prompt=(1, 2, 3), max_tokens=1), heard.append)
        go.set()
        wait_until(lambda: not engine._thread.is_alive())
        assert [type(event.error) for event in heard] == [EngineStoppedError]
        assert engine._waiting == 0


def values(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_metrics_and_the_cache_page_are_the_sums_of_what_was_answered(tmp_path: Path) -> None:
    with served(tiny_model, tmp_path) as server:
        prompt = cached = output = 0
        for i in range(12):
            path = PATHS[i % 3]
            text = "abcdefg " * (5 + 10 * (i % 4))
            body = asking(path, text, max_tokens=1 + i, stream=i % 2 == 1)
            if path != MESSAGE:
                body["stream_options"] = {"include_usage": True}
            answer = server.post(path, body)[1]
            if i % 2:
                found = events(answer)
                usage = found[-2]["usage"]
            else:
                usage = answer["usage"]
            if path == MESSAGE:
                cached += usage["cache_read_input_tokens"]
                prompt += sum(value for name, value in usage.items() if name != "output_tokens")
                output += usage["output_tokens"]
            else:
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                prompt += usage["prompt_tokens"]
                output += usage["completion_tokens"]
        assert cached > 0
        page = values(server.get("/metrics")[1])
        sources = {
            source: page[f'mlxkv_prompt_tokens_total{{source="{source}"}}'] for source in ("hot", "cold", "computed")
        }
        assert sources["hot"] + sources["cold"] == cached
        assert sum(sources.values()) == prompt
        assert page["mlxkv_output_tokens_total"] == output
        assert page["mlxkv_requests_total"] == page["mlxkv_first_token_seconds_count"] == 12
        assert page["mlxkv_between_tokens_seconds_count"] == output - 12, "one less than tokens in each reply"
        assert page["mlxkv_running_requests"] == page["mlxkv_queued_requests"] == page["mlxkv_live_bytes"] == 0
        seen = server.get("/v1/cache")[1]
        assert seen["tokens"] == sources
        assert seen["requests"]["finished"] == 12
        assert sum(step["hot"] + step["cold"] + step["computed"] for step in seen["history"]) == prompt
        assert page['mlxkv_tier_used_bytes{tier="hot"}'] == seen["hot"]["used_bytes"] <= seen["hot"]["budget_bytes"]
        lines = server.get("/v1/cache/requests")[1]
        assert lines["running"] == []
        assert sum(one["prompt_tokens"] for one in lines["requests"]) == prompt
        blocks = server.get("/v1/cache/blocks")[1]
        assert blocks["total"] == len(blocks["blocks"]) > 0


def test_a_pinned_prompt_is_not_evicted_and_one_without_store_leaves_nothing(tmp_path: Path) -> None:
    with served(tiny_model, tmp_path, engine={"hot": 6 * 64 * 1024, "cold": 0}) as server:

        def cached(text: str, **cache: Any) -> int:
            usage = server.post(TEXT, asking(TEXT, text, cache=cache))[1]["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        cached("p" * 256, pin_s=600)
        assert cached("s" * 256, store=False) == cached("s" * 256) == 0
        for letter in "abcdefghijkl":
            cached(letter * 256)
        assert cached("p" * 256) == 255

        def come_due() -> None:
            server.engine._pins = [(0.0, unpin) for _, unpin in server.engine._pins]

        server.engine.call(come_due)
        assert server.engine.call(server.engine.cache.store.pins) == 0


# a process of its own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talking_model(tmp_path_factory.mktemp("saved") / "talking")


@contextmanager
def process(model: Path, home: Path) -> Iterator[tuple[subprocess.Popen[str], Served]]:
    """`mlxkv serve` as a user runs it, in an empty home."""
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mlxkv_cli.main", "serve", str(model), "--port", "0", "--drain", "20"]
    with (home / "stderr").open("a") as errors:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        assert running.stdout is not None
        line = next((line for line in running.stdout if line.startswith("listening on")), "")
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, (home / "stderr").read_text()
        reached = _At(int(found[1]))
        wait_until(lambda: _answers(reached))
        yield running, reached
    finally:
        running.kill()
        running.wait(SOON_S)
        assert running.stdout is not None
        running.stdout.close()


class _At(Served):
    """A server in another process: only its port is known."""

    def __init__(self, port: int) -> None:
        object.__setattr__(self, "_port", port)

    @property
    def port(self) -> int:
        return int(self.__dict__["_port"])


def _answers(server: Served) -> bool:
    try:
        return server.get("/ready")[0] == 200
    except OSError:
        return False


ENDLESS = {"logit_bias": {str(END): -100}}
PROMPTS = [f"conversation {i}: " + "some common words and more of them. " * 6 for i in range(4)]


def stream_of(server: Served, text: str, max_tokens: int) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SOON_S)
    body = json.dumps(asking(CHAT, text, max_tokens=max_tokens, stream=True, **ENDLESS))
    connection.request("POST", CHAT, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    while not re.search(rb'"content":"[^"]', answer.readline()):
        pass
    return answer


def chat(server: Served, text: str) -> tuple[str, int, int]:
    """What is said to a text, its prompt tokens, and how many of them were cached."""
    status, answer, _ = server.post(CHAT, asking(CHAT, text, max_tokens=12, **ENDLESS))
    assert status == 200, answer
    usage = answer["usage"]
    return (
        answer["choices"][0]["message"]["content"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def test_sigterm_drains_and_commits_and_a_second_one_leaves_at_once(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with process(model, home) as (running, server):
        assert [one["id"] for one in server.get("/v1/models")[1]["data"]] == ["talking"], "in an empty home, offline"
        said = [chat(server, text) for text in PROMPTS]
        answer = stream_of(server, PROMPTS[0], 300)
        running.send_signal(signal.SIGTERM)
        rest = answer.read().decode()
        assert rest.rstrip().endswith("data: [DONE]"), "what ran was let finish"
        assert '"finish_reason":"length"' in rest
        assert running.wait(SOON_S) == 0
    with process(model, home) as (running, server):
        for text, (reply, tokens, _) in zip(PROMPTS, said, strict=True):
            again, _, cached = chat(server, text)
            assert again == reply
            assert cached >= tokens // 64 * 64 - 64, "every full block was committed"
        answer = stream_of(server, PROMPTS[1], 3500)
        running.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert running.poll() is None
        began = time.monotonic()
        running.send_signal(signal.SIGTERM)
        assert running.wait(SOON_S) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 2.0
        answer.close()
    assert "Traceback" not in (home / "stderr").read_text()


def test_after_kill_9_during_traffic_what_was_committed_is_found(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    said: dict[str, str] = {}
    with process(model, home) as (running, server):
        for text in PROMPTS:
            said[text] = chat(server, text)[0]
        wait_until(lambda: server.get("/v1/cache")[1]["cold"]["blocks"] >= 4 * 3)
        answer = stream_of(server, "something else entirely " * 20, 3000)
        running.kill()
        running.wait(SOON_S)
        answer.close()
    with process(model, home) as (running, server):
        for text in PROMPTS:
            again, tokens, cached = chat(server, text)
            assert again == said[text]
            assert cached >= tokens // 64 * 64 - 64
        seen = server.get("/v1/cache")[1]
        assert seen["quarantined"] == 0
        assert seen["tokens"]["cold"] > 0
        running.send_signal(signal.SIGTERM)
        assert running.wait(SOON_S) == 0
    assert "Traceback" not in (home / "stderr").read_text()
