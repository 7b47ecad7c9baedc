"""Many requests at once: each gets what it would get alone, and none harms another."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from driving import some_tokens
from serving import SOON_S, Asked, ask, ask_all, running, sampled, tiny_model

from mlxkv.core.errors import BudgetError
from mlxkv.engine.engine import Engine, EngineStoppedError, QueueFullError
from mlxkv.engine.request import Failed, Piece, Request, Sampling
from mlxkv.engine.scheduler import Limits

KINDS = ["llama", "qwen3_next", "gemma3", "mamba2", "gpt_oss", "deepseek_v3", "lfm2"]


def until(condition: Any) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def turns(engine: Engine, conversations: int, count: int, *, together: bool) -> list[list[int]]:
    """Every conversation's replies, one list; each turn is asked for all at once, or one after the other."""
    told = [some_tokens(70 + 13 * i, seed=i) for i in range(conversations)]
    said: list[list[int]] = [[] for _ in told]
    for turn in range(count):
        requests = [Request(prompt=tuple(prompt), max_tokens=6 + i) for i, prompt in enumerate(told)]
        replies = ask_all(engine, requests) if together else [ask(engine, r.prompt, r.max_tokens) for r in requests]
        for i, reply in enumerate(replies):
            assert reply.finished.reason == "length"
            said[i] += reply.tokens
            told[i] += reply.tokens + some_tokens(9 + i, seed=100 * turn + i)
    return said


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_conversations_together_say_what_each_says_alone_and_without_a_cache(
    name: str, lookahead: bool, tmp_path: Path
) -> None:
    with running(lambda: tiny_model(name), tmp_path / "alone", hot=0, cold=0) as engine:
        expected = turns(engine, 5, 3, together=False)
    with running(lambda: tiny_model(name), tmp_path / "all", lookahead=lookahead) as engine:
        assert turns(engine, 5, 3, together=True) == expected
        assert turns(engine, 5, 3, together=True) == expected, "all of it from the cache"


@pytest.mark.parametrize("name", [*KINDS, "llama4"])
def test_prompts_of_one_and_two_tokens_join_longer_ones(name: str, tmp_path: Path) -> None:
    prompts = [some_tokens(tokens, seed=tokens, vocabulary=100) for tokens in (90, 1, 2, 64, 65)]
    with running(lambda: tiny_model(name), tmp_path / "alone", hot=0, cold=0) as engine:
        alone = [ask(engine, prompt, 9).tokens for prompt in prompts]
    with running(lambda: tiny_model(name), tmp_path / "all") as engine:
        requests = [Request(prompt=tuple(prompt), max_tokens=9) for prompt in prompts]
        for _ in range(2):
            assert [reply.tokens for reply in ask_all(engine, requests)] == alone


def test_eight_conversations_of_four_turns_are_equal_alone_together_and_without_a_cache(tmp_path: Path) -> None:
    with running(tiny_model, tmp_path / "off", hot=0, cold=0, limits=Limits(sequences=8)) as engine:
        off = turns(engine, 8, 4, together=False)
    with running(tiny_model, tmp_path / "on") as engine:
        assert turns(engine, 8, 4, together=True) == off
    with running(tiny_model, tmp_path / "on") as engine:
        assert turns(engine, 8, 4, together=False) == off, "from the SSD"


def test_requests_with_one_unseen_prefix_compute_it_once(tmp_path: Path) -> None:
    common = some_tokens(320, seed=1)
    prompts = [common + some_tokens(20, seed=10 + i) for i in range(6)]
    events = []
    with running(tiny_model, tmp_path, on_request=events.append) as engine:
        replies = ask_all(engine, [Request(prompt=tuple(prompt), max_tokens=4) for prompt in prompts])
        assert [reply.finished.cached_tokens for reply in replies] == [0, 320, 320, 320, 320, 320]
    assert sum(event.computed_tokens for event in events) == 340 + 5 * 20
    assert len({event.request for event in events}) == 6


def test_without_a_place_for_blocks_nobody_waits_for_them(tmp_path: Path) -> None:
    prompt = tuple(some_tokens(200, seed=1))
    with running(tiny_model, tmp_path, hot=0, cold=0) as engine:
        replies = ask_all(engine, [Request(prompt=prompt, max_tokens=2) for _ in range(3)])
        assert [reply.finished.cached_tokens for reply in replies] == [0, 0, 0]


def test_an_exact_resend_and_its_extension_at_once_are_answered(tmp_path: Path) -> None:
    prompt = some_tokens(128, seed=2)
    with running(tiny_model, tmp_path) as engine:
        first = ask(engine, prompt, 1)
        again, longer = ask_all(
            engine,
            [
                Request(prompt=tuple(prompt), max_tokens=1),
                Request(prompt=(*prompt, *first.tokens, 5, 6), max_tokens=3),
            ],
        )
        assert again.tokens == first.tokens
        assert (again.finished.cached_tokens, longer.finished.cached_tokens) == (127, 128)


def test_an_error_in_a_processor_ends_its_request_and_no_other(tmp_path: Path) -> None:
    def broken() -> list[Any]:
        def fail(tokens: mx.array, logits: mx.array) -> mx.array:
            if tokens.size > 72:
                raise ValueError("no more")
            return logits

        return [fail]

    prompts = [tuple(some_tokens(70, seed=i)) for i in range(3)]
    with running(tiny_model, tmp_path) as engine:
        alone = [ask(engine, prompt, 12).tokens for prompt in (prompts[0], prompts[2])]
        requests = [Request(prompt=prompt, max_tokens=12) for prompt in prompts]
        requests[1] = Request(prompt=prompts[1], max_tokens=12, processors=broken)
        replies = ask_all(engine, requests)
        assert isinstance(replies[1].end, Failed)
        assert "no more" in str(replies[1].end.error)
        assert [replies[0].tokens, replies[2].tokens] == alone
        assert ask(engine, prompts[1], 2).finished.output_tokens == 2


def test_a_prompt_that_cannot_be_named_ends_its_request_and_not_the_engine(tmp_path: Path) -> None:
    with running(tiny_model, tmp_path, limits=Limits(queue=1)) as engine:
        for tokens in (1, 200):
            end = ask(engine, [-1] * tokens, 2).end
            assert isinstance(end, Failed)
            assert "token" in str(end.error)
        assert ask(engine, some_tokens(70, seed=1), 2).finished.output_tokens == 2, "its place in the queue is free"


def test_a_seeded_request_says_the_same_whoever_is_beside_it(tmp_path: Path) -> None:
    prompt = tuple(some_tokens(70, seed=1))
    seeded = Request(prompt=prompt, max_tokens=12, sampling=sampled(seed=42))
    others = [Request(prompt=tuple(some_tokens(90, seed=i)), max_tokens=12, sampling=sampled()) for i in range(3)]
    with running(tiny_model, tmp_path) as engine:
        alone = ask_all(engine, [seeded])[0].tokens
        assert ask(engine, prompt, 12, sampling=sampled(seed=42)).tokens == alone, "from the cache"
        mixed = ask_all(
            engine, [others[0], Request(prompt=prompt, max_tokens=12, sampling=sampled(seed=42)), *others[1:]]
        )
        assert mixed[1].tokens == alone
        assert ask(engine, prompt, 12, sampling=sampled(seed=43)).tokens != alone
        twins = ask_all(engine, [Request(prompt=prompt, max_tokens=12, sampling=sampled()) for _ in range(2)])
        assert twins[0].tokens != twins[1].tokens


def test_log_probabilities_are_those_of_the_tokens(tmp_path: Path) -> None:
    prompt = some_tokens(70, seed=1)
    for lookahead in (False, True):
        with running(tiny_model, tmp_path, lookahead=lookahead) as engine:
            reply = ask(engine, prompt, 6, logprobs=3)
            assert [entry.token for entry in reply.logprobs] == reply.tokens
            for entry in reply.logprobs:
                assert entry.top[0] == (entry.token, entry.logprob), "greedy"
                assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
            assert ask(engine, prompt, 6).tokens == reply.tokens


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_penalty_sees_every_token_before(lookahead: bool, tmp_path: Path) -> None:
    bias = Sampling(logit_bias={7: 100.0}, presence_penalty=0.0)
    with running(tiny_model, tmp_path, lookahead=lookahead) as engine:
        assert ask(engine, some_tokens(70, seed=1), 5, sampling=bias).tokens == [7] * 5
        seen: list[list[int]] = []

        def watch() -> list[Any]:
            def note(tokens: mx.array, logits: mx.array) -> mx.array:
                seen.append(tokens.tolist())
                return logits

            return [note]

        prompt = some_tokens(70, seed=2)
        reply = ask(engine, prompt, 5, processors=watch)
        assert seen[:5] == [prompt + reply.tokens[:i] for i in range(5)]


def test_a_cancelled_request_frees_its_place_in_every_phase(tmp_path: Path) -> None:
    with running(tiny_model, tmp_path, limits=Limits(sequences=2)) as engine:
        long = [Request(prompt=tuple(some_tokens(900, seed=i)), max_tokens=400) for i in range(4)]
        asked = [Asked(engine, request) for request in long]
        until(lambda: len(engine.status.running) == 2)
        for request in reversed(long):  # two in the queue, two in prefill
            engine.cancel(request.id)
        assert [item.wait().end is not None for item in asked] == [True] * 4
        decoding = Asked(engine, Request(prompt=tuple(some_tokens(70, seed=9)), max_tokens=4000))
        while not isinstance(decoding.events.get(timeout=SOON_S), Piece):
            pass
        engine.cancel(decoding.request.id)
        assert decoding.wait().finished.reason == "cancelled"
        until(lambda: not engine.status.running and not engine.status.live_bytes)
        assert ask(engine, some_tokens(70, seed=9), 3).finished.cached_tokens == 69, "its blocks stay"


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with running(tiny_model, tmp_path, limits=Limits(memory_bytes=2**20)) as engine:
        per_token = engine.cache.layout.bytes_per_token
        most = 2**20 // per_token
        with pytest.raises(BudgetError, match=r"needs .* KV cache, and all requests together may hold 1.00 MiB"):
            ask(engine, some_tokens(100, seed=1), most)
        assert ask(engine, some_tokens(100, seed=1), most - 400).finished.reason == "length"
        replies = ask_all(engine, [Request(prompt=tuple(some_tokens(100, seed=i)), max_tokens=400) for i in range(3)])
        assert all(reply.finished.output_tokens == 400 for reply in replies), "one after the other"


def test_a_full_queue_says_so_and_takes_more_once_it_is_shorter(tmp_path: Path) -> None:
    with running(tiny_model, tmp_path, limits=Limits(sequences=1, queue=2)) as engine:
        first = Asked(engine, Request(prompt=tuple(some_tokens(900, seed=1)), max_tokens=50))
        until(lambda: engine.status.running)
        waiting = [Asked(engine, Request(prompt=(1, 2, 3), max_tokens=1)) for _ in range(2)]
        with pytest.raises(QueueFullError):
            ask(engine, (1, 2, 3), 1)
        assert [item.wait().finished.output_tokens for item in (first, *waiting)] == [50, 1, 1]
        assert ask(engine, (1, 2, 3), 1).finished.output_tokens == 1


def test_an_engine_that_dies_ends_its_requests_and_begins_anew_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxkv.engine.engine.RESTART_S", 0.2)
    prompt = some_tokens(200, seed=1)
    with running(tiny_model, tmp_path) as engine:
        reply = ask(engine, prompt, 3)

        def die() -> None:
            raise MemoryError("no room")

        victim = Asked(engine, Request(prompt=tuple(some_tokens(3000, seed=2)), max_tokens=50))
        until(lambda: engine.status.running)
        engine._inbox.put(die)
        end = victim.wait().end
        assert isinstance(end, Failed)
        assert isinstance(end.error, EngineStoppedError)
        assert not engine.alive
        until(lambda: engine.alive)
        again = ask(engine, prompt, 3)
        assert (again.tokens, again.finished.cached_tokens) == (reply.tokens, 199)
        engine._inbox.put(die)
        until(lambda: not engine._thread.is_alive())
        with pytest.raises(EngineStoppedError):
            ask(engine, prompt, 3)


def test_closing_lets_what_runs_finish_and_takes_nothing_new(tmp_path: Path) -> None:
    with running(tiny_model, tmp_path) as engine:
        asked = Asked(engine, Request(prompt=tuple(some_tokens(500, seed=1)), max_tokens=30))
        engine.close(drain_s=SOON_S)
        assert asked.wait().finished.output_tokens == 30
        with pytest.raises(EngineStoppedError):
            ask(engine, (1, 2), 1)
    with running(tiny_model, tmp_path) as engine:
        assert ask(engine, some_tokens(500, seed=1), 1).finished.cached_tokens == 499


def test_a_request_that_is_not_stored_leaves_nothing(tmp_path: Path) -> None:
    prompt = some_tokens(200, seed=1)
    with running(tiny_model, tmp_path) as engine:
        ask(engine, prompt, 2, store=False)
        assert ask(engine, prompt, 2, salt="other").finished.cached_tokens == 0
        assert ask(engine, prompt, 2).finished.cached_tokens == 0
        assert ask(engine, prompt, 2, store=False).finished.cached_tokens == 199


def test_pinned_blocks_outlive_others_and_are_let_go_in_time(tmp_path: Path) -> None:
    prompt = some_tokens(256, seed=1)
    with running(tiny_model, tmp_path, hot=6 * 64 * 1024, cold=0) as engine:
        per_block = engine.call(lambda: engine.cache.layout.block_bytes)
        assert 6 * 64 * 1024 // per_block >= 5
        ask(engine, prompt, 2, pin_s=600)
        for seed in range(10, 20):
            ask(engine, some_tokens(256, seed=seed), 2)
        assert ask(engine, prompt, 2).finished.cached_tokens == 255
        assert engine.call(engine.cache.store.pins) > 0

        def come_due() -> None:
            engine._pins = [(0.0, unpin) for _, unpin in engine._pins]

        engine.call(come_due)
        assert engine.call(engine.cache.store.pins) == 0


def test_what_opening_the_model_raises_is_raised_by_start() -> None:
    def fail() -> Any:
        raise ValueError("no such model")

    engine = Engine(fail)
    with pytest.raises(ValueError, match="no such model"):
        engine.start(SOON_S)
    assert not engine.alive
