"""Apple's server over our tiers: what it was told once is found again, also by another process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from talking import save_talking_model

SOON_S = 120.0


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def server(model: Path, cache: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "mlxkv_cli", "mlx-lm-server", "--cache-dir", str(cache), "--model", str(model),
               "--port", str(port)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + SOON_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                break
        except httpx.HTTPError:
            assert process.poll() is None
            assert process.stderr is not None
            assert time.monotonic() < end
            time.sleep(0.1)
    try:
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SOON_S)


def ask(url: str, text: str, max_tokens: int = 8) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0.0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=SOON_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talking_model(tmp_path_factory.mktemp("model") / "talking")


def test_what_was_computed_is_found_again_and_by_the_next_process(model: Path, tmp_path: Path) -> None:
    text = "the same long prompt, again and again. " * 6
    with server(model, tmp_path) as url:
        first = ask(url, text)
        tokens = first["usage"]["prompt_tokens"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = ask(url, text)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens - 1
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        longer = ask(url, text + "and once more")
        assert longer["usage"]["prompt_tokens_details"]["cached_tokens"] >= tokens - 15
        assert ask(url, text, 1)["usage"]["completion_tokens"] == 1, "an exact resend does not end its thread"
        assert ask(url, text + "and once more")["choices"] is not None
    with server(model, tmp_path) as url:
        found = ask(url, text)
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= tokens // 64 * 64
        assert found["choices"][0]["message"] == first["choices"][0]["message"]
