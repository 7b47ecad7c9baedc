"""`mlxkv serve` and `mlxkv top` as a person meets them."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from talking import save_talking_model

from mlxkv.budget.machines import RuntimeShare, this_cpu
from mlxkv.budget.measured import remember
from mlxkv.core.units import MIB
from mlxkv.server.bench import own_server
from mlxkv_cli.main import run
from mlxkv_cli.top import screen


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory):
    """A server of a tiny model that was asked the same thing twice."""
    directory = tmp_path_factory.mktemp("serve")
    model = save_talking_model(directory / "talking")
    with own_server(str(model), directory / "cache", ["--max-tokens", "5", "--log", str(directory / "log")]) as address:
        body = {"model": "talking", "messages": [{"role": "user", "content": "a prompt of some length " * 8}]}
        for _ in range(2):
            httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        yield address, directory


def test_top_shows_what_the_server_tells(url, capsys: pytest.CaptureFixture[str]) -> None:
    address, _ = url
    assert run(["top", "--url", address, "--once"]) == 0
    shown = capsys.readouterr().out
    for said in ("talking", "2 requests", "hot", "cold", "saved", "prompt tokens", "last requests"):
        assert said in shown
    assert run(["top", "--url", address, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    tokens = told["cache"]["tokens"]
    prompt = told["requests"][0]["prompt_tokens"]
    assert tokens == {"hot": prompt - 1, "cold": 0, "computed": prompt + 1}
    assert told["requests"][0]["line"].startswith(f"prompt {prompt:,} = hot {prompt - 1:,}")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_top_fits_the_terminal(url, width: int) -> None:
    address, _ = url
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as shown:
        cache = httpx.get(f"{address}/v1/cache", timeout=60).json()
        requests = httpx.get(f"{address}/v1/cache/requests", timeout=60).json()
        console.print(screen(cache, requests))
    assert max(map(len, shown.get().splitlines())) <= width


def test_every_request_has_its_line_on_the_terminal_and_in_the_log(url) -> None:
    _, directory = url
    said = (directory / "cache" / "serve.log").read_text()
    assert said.count("prompt ") == 2
    assert "stopped matching at token 0: never seen" in said
    events = [json.loads(line) for line in (directory / "log").read_text().splitlines()]
    requests = [event for event in events if event["event"] == "request"]
    assert [event["hot_tokens"] > 0 for event in requests] == [False, True]
    assert all(event["outline"] for event in requests)
    assert "a prompt of some length" not in (directory / "log").read_text()


def test_a_server_says_that_its_runtime_share_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    remember(this_cpu(), RuntimeShare(bytes=MIB, model="tiny", hidden_size=64, step_tokens=256, date="2026-01-02"))
    with own_server(str(save_talking_model(tmp_path / "talking")), tmp_path / "cache", []):
        said = (tmp_path / "cache" / "serve.log").read_text()
    assert "runtime share as measured on this machine: 1.00 MiB with tiny" in said


def test_a_server_that_is_not_there_is_said_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--url", "http://127.0.0.1:9", "--once"]) == 2
    assert "no mlxkv server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_taken_port_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert run(["serve", "no/such/model", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "loading" not in said


def test_an_address_that_others_can_reach_needs_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "no/such/model", "--host", "0.0.0.0"]) == 2
    assert "add --api-key KEY" in capsys.readouterr().err


def test_a_model_that_is_not_there_ends_the_server_with_its_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", str(tmp_path / "nothing.gguf"), "--port", "0"]) == 2
    assert "there is no file" in capsys.readouterr().err
