"""docs/http.md names every path, field, metric and limit that the server has, and no metric that it has not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from answering import served
from serving import tiny_model

from mlxkv.server.apis.anthropic.bodies import CountBody, MessagesBody
from mlxkv.server.apis.openai.bodies import ChatBody, CompletionBody
from mlxkv.server.generation.wish import MOST_STOP_LENGTH, CacheOptions, Lenient
from mlxkv.server.monitoring.metrics import Metrics
from mlxkv.server.settings import MOST_BODY_BYTES, MOST_HEADER_BYTES, READ_DEADLINE_S

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
CODE = set(re.findall(r"`([^`]+)`", PAGE))


def test_every_path_is_on_the_page(tmp_path: Path) -> None:
    with served(tiny_model, tmp_path) as server:
        paths = server.get("/openapi.json")[1]["paths"]
    named = {word.replace(":path", "") for entry in CODE for word in entry.split()}
    assert set(paths) <= named | {"/v1/models/{name}"}
    assert "POST /v1/messages/count_tokens" in CODE


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, MessagesBody, CountBody, CacheOptions])
def test_every_field_is_on_the_page(body: type[Lenient]) -> None:
    assert set(body.model_fields) <= CODE


def test_the_metrics_on_the_page_are_those_that_exist() -> None:
    page = Metrics().text({"hot": (0, 0)}, 0, 0, 0).decode()
    kinds = dict(re.findall(r"# TYPE (\w+) (\w+)", page))
    assert {name for name in kinds if not name.endswith("_created")} == set(re.findall(r"mlxkv_\w+", PAGE))


def test_the_limits_on_the_page_are_those_that_hold() -> None:
    assert f"{MOST_BODY_BYTES // 2**20} MiB" in PAGE
    assert f"{MOST_HEADER_BYTES // 2**10} KiB" in PAGE
    assert f"within {READ_DEADLINE_S:.0f} s" in PAGE
    assert f"{MOST_STOP_LENGTH:,} characters" in PAGE
