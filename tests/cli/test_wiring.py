"""The weights are wired once by every command that keeps blocks, before its store opens, and by nothing after it.

MLX's functions are stood in for where they would reach Metal: they say what a Mac says and note what is asked of them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx_lm import server as mlx_lm_server_module
from mlx_lm import stream_generate
from talking import save_talking_model

from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import GIB, MIB, format_bytes
from mlxkv.engine import wiring
from mlxkv.models.loader import load
from mlxkv.server import mlx_lm_server
from mlxkv_cli.main import run

SOON_S = 60.0
MAC = {
    "device_name": "Apple M4 Pro",
    "memory_size": 24 * GIB,
    "max_recommended_working_set_size": 18 * GIB,
    "max_buffer_length": 12 * GIB,
    "resource_limit": 499_000,
}


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of MLX and when a store was opened, in order; this machine is a Mac as far as anybody asks."""
    noted: list[Any] = []
    clear, opened = mx.clear_cache, BlockStore.__init__

    def cleared() -> None:
        noted.append("cleared")
        clear()

    def set_limit(limit: int) -> int:
        noted.append(("limit", limit, mx.get_active_memory()))
        return 0

    def opening(self: BlockStore, *arguments: Any, **options: Any) -> None:
        noted.append("opened")
        opened(self, *arguments, **options)

    monkeypatch.setattr(mx, "device_info", lambda *_: MAC)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(wiring, "macos_version", lambda: "26.1")
    monkeypatch.setattr("mlxkv.budget.machines.macos_version", lambda: "26.1")
    monkeypatch.setattr(mx, "clear_cache", cleared)
    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    monkeypatch.setattr(BlockStore, "__init__", opening)
    return noted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_talking_model(tmp_path_factory.mktemp("model") / "talking"))


def limits(done: list[Any]) -> list[tuple[int, int]]:
    return [(entry[1], entry[2]) for entry in done if entry[0] == "limit"]


def check_wired_once_before_the_store(done: list[Any]) -> int:
    ((limit, active),) = limits(done)
    assert limit == active > 0
    at = next(i for i, entry in enumerate(done) if entry[0] == "limit")
    assert done[at - 1 : at + 2] == ["cleared", done[at], "opened"]
    return limit


def test_chat_wires_the_weights_once_before_the_store_opens(
    model: str, done: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["chat", model, "--prompt", "Good morning", "--max-tokens", "4", "--cache-dir", str(tmp_path)]) == 0
    check_wired_once_before_the_store(done)
    assert capsys.readouterr().out.strip()


def test_weights_that_leave_macos_too_little_are_not_wired(
    model: str, done: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "get_active_memory", lambda: 17 * GIB)
    assert run(["chat", model, "--prompt", "Good morning", "--max-tokens", "4", "--cache-dir", str(tmp_path)]) == 0
    assert limits(done) == []
    assert done[:2] == ["cleared", "opened"]


def test_serve_wires_the_weights_says_so_and_wires_nothing_for_requests(
    model: str, done: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found: list[Any] = []

    def ask() -> None:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + SOON_S
        while not found and time.monotonic() < end:
            try:
                cache = httpx.get(f"{url}/v1/cache", timeout=5).json()
            except httpx.HTTPError:
                time.sleep(0.05)
                continue
            body = {"prompt": "some words " * 20, "max_tokens": 4}
            found.extend([cache, httpx.post(f"{url}/v1/completions", json=body, timeout=SOON_S).status_code])
            os.kill(os.getpid(), signal.SIGINT)  # only a server that answers takes it

    client = threading.Thread(target=ask, daemon=True)
    client.start()
    assert run(["serve", model, "--port", str(port), "--cache-dir", str(tmp_path), "--hot", "64MiB"]) == 0
    client.join(SOON_S)
    cache, status = found
    limit = check_wired_once_before_the_store(done)
    assert cache["wired"] == {"wired_bytes": limit, "reason": None}
    assert status == 200
    assert f"; {format_bytes(limit)} wired" in capsys.readouterr().err


def test_apples_server_wires_the_weights_and_leaves_the_rest(
    model: str, done: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(model)

    class Provider:
        model, tokenizer = loaded.module, loaded.tokenizer

    def main() -> None:
        assert mlx_lm_server_module.maybe_set_recommended_wired_limit() is None
        blocks = mlx_lm_server.BlockPromptCache(Provider(), CacheConfig(directory=tmp_path, hot_bytes=64 * MIB))
        prompt = loaded.tokenizer.encode("Good morning")
        prompt_cache, rest = blocks.fetch_nearest_cache(("talking",), prompt)
        said = list(stream_generate(loaded.module, loaded.tokenizer, rest, max_tokens=3, prompt_cache=prompt_cache))
        assert said
        mlx_lm_server_module.BatchGenerator(loaded.module).close()
        blocks.close()

    generating = sys.modules[stream_generate.__module__]
    before = (generating.maybe_set_recommended_wired_limit, mlx_lm_server_module.maybe_set_recommended_wired_limit)
    monkeypatch.setattr(mlx_lm_server_module, "main", main)
    done.clear()
    mlx_lm_server.run([], CacheConfig(directory=None, hot_bytes=0))
    check_wired_once_before_the_store(done)
    assert before == (
        generating.maybe_set_recommended_wired_limit,
        mlx_lm_server_module.maybe_set_recommended_wired_limit,
    )


def test_doctor_says_the_most_that_would_be_wired(done: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor"])
    assert "\nwired       weights up to 16.00 GiB\n" in capsys.readouterr().out
    assert limits(done) == []
