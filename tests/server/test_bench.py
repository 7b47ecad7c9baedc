"""`mlxkv bench` measures what happened: held tokens are as they must be, and a restart finds what was there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from talking import save_talking_model

from mlxkv.core.errors import MlxkvError, UsageError
from mlxkv.server.bench import Client, conversation, measure, own_server
from mlxkv_cli.main import run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talking_model(tmp_path_factory.mktemp("model") / "talking")


def test_the_whole_bench_runs_on_a_server_of_its_own(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    assert run(["bench", str(model), "--tokens", "64", "--rounds", "1", "--json", "--write", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(file.read_text())
    figures = {figure["name"]: figure for figure in told["figures"]}
    assert {"first token, cold", "first token, hot", "first token, from the SSD", "decode, one client"} <= set(figures)
    assert all(figure["median"] > 0 and figure["samples"] for figure in told["figures"])
    prompt, held = figures["first token, hot"]["detail"].removeprefix("prompt ").split(" tokens, ")
    assert int(held.removesuffix(" held")) == int(prompt) - 1
    on_disk = int(figures["first token, from the SSD"]["detail"].rpartition(", ")[2].removesuffix(" held"))
    assert on_disk >= (int(prompt) - 1) // 64 * 64, "every full block; one with the reply in it may give the rest"


def test_a_server_that_is_given_is_asked_and_not_restarted(model: Path, tmp_path: Path) -> None:
    with own_server(str(model), tmp_path) as url:
        client = Client(url, None)
        figures = measure(client, tokens=64, rounds=1, seed=1, restart=None)
        assert not any("SSD" in figure.name for figure in figures)
        assert client.ask(conversation("1-0", 64), 4).cached_tokens


def test_a_server_that_is_not_there_or_does_not_start_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is the server there"):
        Client("http://127.0.0.1:9", None).ask(conversation("x", 8), 1)
    with pytest.raises(MlxkvError, match=r"did not start[\s\S]*no model"), own_server("nothing/here/at all", tmp_path):
        pass
