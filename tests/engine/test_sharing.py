"""Running sequences that begin alike keep one copy of it, and say what each says alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import some_tokens
from serving import Asked, ask, ask_all, running, tiny_model

from mlxkv.engine.request import Piece, Request
from mlxkv.engine.scheduler import Limits
from mlxkv.prompt_cache import batch


@pytest.fixture(autouse=True)
def _share_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "SHARE_FROM_BYTES", 64 * 1024)  # tiny models have tiny blocks


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_groups_that_join_and_leave_say_what_each_says_alone(name: str, lookahead: bool, tmp_path: Path) -> None:
    commons = [some_tokens(256, seed=1), some_tokens(192, seed=2)]
    prompts = [commons[i % 2] + some_tokens(5 + 17 * i, seed=10 + i) for i in range(6)]
    prompts += [some_tokens(70, seed=30), commons[0] + some_tokens(3, seed=31)]
    lengths = [20, 3, 30, 12, 45, 7, 25, 16]
    requests = [Request(prompt=tuple(p), max_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    with running(lambda: tiny_model(name), tmp_path / "alone", hot=0, cold=0) as engine:
        alone = [ask(engine, r.prompt, r.max_tokens).tokens for r in requests]
    with running(lambda: tiny_model(name), tmp_path / "all", lookahead=lookahead, limits=Limits(sequences=4)) as engine:
        for _ in range(2):
            assert [reply.tokens for reply in ask_all(engine, requests)] == alone
            assert ask(engine, prompts[0] + alone[0], 4).finished.cached_tokens >= 256, "its blocks were kept"


def test_what_is_shared_is_counted_once(tmp_path: Path) -> None:
    common = some_tokens(512, seed=1)
    with running(tiny_model, tmp_path) as engine:
        per_token = engine.cache.layout.bytes_per_token
        asked = [Asked(engine, Request(prompt=(*common, *some_tokens(9, seed=i)), max_tokens=400)) for i in range(2, 5)]
        for item in asked:
            while not isinstance(item.events.get(timeout=60), Piece):
                pass
        assert engine.status.saved_bytes == 2 * 512 * per_token
        engine.cancel(asked[0].request.id)
        asked[0].wait()
        while len(engine.status.running) > 2:
            pass
        assert engine.status.saved_bytes == 512 * per_token
        for item in asked[1:]:
            engine.cancel(item.request.id)
            item.wait()
        assert engine.call(lambda: engine._batch.saved_bytes) == 0


def test_admission_counts_one_copy(tmp_path: Path) -> None:
    common = some_tokens(512, seed=1)
    requests = [Request(prompt=(*common, *some_tokens(9, seed=i)), max_tokens=100) for i in range(2, 6)]
    with running(tiny_model, tmp_path, limits=Limits(memory_bytes=2300 * 1024)) as engine:
        assert engine.cache.layout.bytes_per_token == 1024, "two copies of 621 tokens and a step fit, three do not"
        asked, most = [Asked(engine, request) for request in requests], 0
        while not most or engine.status.running or engine.status.queued:
            most = max(most, len(engine.status.running))
        assert [len(item.wait().tokens) for item in asked] == [100] * 4
        assert most >= 3


def test_other_salts_share_nothing(tmp_path: Path) -> None:
    common = some_tokens(512, seed=1)
    with running(tiny_model, tmp_path) as engine:
        asked = [Asked(engine, Request(prompt=(*common, i), max_tokens=300, salt=str(i))) for i in range(2)]
        for item in asked:
            while not isinstance(item.events.get(timeout=60), Piece):
                pass
        assert engine.status.saved_bytes == 0
        for item in asked:
            engine.cancel(item.request.id)
            assert item.wait().finished.cached_tokens == 0


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_prompt_that_leaves_nothing_to_prefill_joins_rows_that_share(tokens: int, tmp_path: Path) -> None:
    common = some_tokens(512, seed=1)
    prompts = [common[:tokens], [*common, *some_tokens(9, seed=2)], [*common, *some_tokens(9, seed=3)]]
    with running(tiny_model, tmp_path / "alone", hot=0, cold=0) as engine:
        alone = [ask(engine, prompt, 200).tokens for prompt in prompts]
    with running(tiny_model, tmp_path / "all") as engine:
        asked = [Asked(engine, Request(prompt=tuple(prompt), max_tokens=200)) for prompt in prompts[1:]]
        while not engine.status.saved_bytes:
            pass
        assert ask(engine, prompts[0], 200).tokens == alone[0]
        assert [item.wait().tokens for item in asked] == alone[1:]
