"""Two hundred clients that connect and vanish at any moment: nothing is left of them, and the next one is answered."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from answering import Served, served, wait_until
from serving import tiny_model

from mlxkv.engine.scheduler import Limits

CLIENTS = 200
PHASES = ["connect", "headers", "body", "queue", "prefill", "first", "decode", "end"]
SEQUENCES = 4


def body(rng: random.Random, path: str, *, stream: bool) -> bytes:
    words = "".join(rng.choice("abcdefgh") for _ in range(rng.choice([20, 200, 500])))
    asked: dict[str, Any] = {"max_tokens": rng.choice([1, 30, 200]), "stream": stream}
    asked["messages"] = [{"role": "user", "content": words}]
    if path == "/v1/chat/completions":
        asked["n"] = rng.choice([1, 1, 2])
    return json.dumps(asked).encode()


def vanish(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def client(server: Served, number: int) -> None:
    """Go as far as a phase chosen by the number, and vanish."""
    rng = random.Random(number)
    phase = PHASES[number % len(PHASES)]
    path = rng.choice(["/v1/chat/completions", "/v1/messages"])
    stream = phase in ("first", "decode", "end") or rng.random() < 0.5
    sent = body(rng, path, stream=stream)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(sent)}\r\nConnection: close\r\n\r\n"
    ).encode()
    connection = server.raw()
    try:
        if phase == "headers":
            connection.sendall(head[: rng.randrange(1, len(head))])
        elif phase == "body":
            connection.sendall(head + sent[: rng.randrange(len(sent))])
        elif phase != "connect":
            connection.sendall(head + sent)
        if phase == "prefill":
            wait_until(lambda: server.engine.status.running)
        elif phase == "first":
            connection.recv(1)
        elif phase == "decode":
            for _ in range(rng.randint(2, 6)):
                connection.recv(200)
        elif phase == "end":
            while connection.recv(65536):
                pass
    finally:
        vanish(connection, reset=rng.random() < 0.5)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_nothing_is_left_of_two_hundred_clients_that_vanish(tmp_path: Path) -> None:
    with served(tiny_model, tmp_path, engine={"limits": Limits(sequences=SEQUENCES, queue=500)}) as server:
        ask = {"messages": [{"role": "user", "content": "the next one"}], "max_tokens": 3}
        expected = server.post("/v1/chat/completions", ask)[1]["choices"]
        server.settled()
        threads, files = threading.active_count(), open_files()
        for start in range(0, CLIENTS, 20):
            group = [
                threading.Thread(target=client, args=(server, number), daemon=True)
                for number in range(start, start + 20)
            ]
            for thread in group:
                thread.start()
            for thread in group:
                thread.join(60)
                assert not thread.is_alive()
        wait_until(lambda: not server.server.server_state.connections)
        wait_until(lambda: not server.server.server_state.tasks)  # one may be making tokens, and queue them only then
        server.settled()
        engine = server.engine
        wait_until(lambda: engine.status.live_bytes == 0)
        assert (engine.status.running, engine.status.queued, engine._waiting) == ((), 0, 0)
        assert engine.call(engine.cache.store.pins) == 0
        assert not engine._cancelled
        status, answer, _ = server.post("/v1/chat/completions", ask)
        assert (status, answer["choices"]) == (200, expected)
        wait_until(lambda: threading.active_count() <= threads + 40)  # anyio keeps some worker threads for a while
        wait_until(lambda: open_files() <= files + 8)


def test_a_client_that_gave_up_finds_its_work_on_the_next_try(tmp_path: Path) -> None:
    with served(tiny_model, tmp_path) as server:
        ask = {"prompt": "word " * 400, "max_tokens": 1}
        sent = json.dumps(ask).encode()
        with server.raw() as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(sent) + sent
            )
            wait_until(lambda: any(one.done_tokens >= 256 for one in server.engine.status.running))
        server.settled()
        usage = server.post("/v1/completions", ask)[1]["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert 256 <= cached < 1984, "what was computed, and no more was"
