"""An idle engine sleeps: it wakes for a message, for the first pin that expires, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from answering import wait_until
from driving import some_tokens
from serving import ask, running, tiny_model
from sleeping import Waits

from mlxkv.engine.engine import Engine

ENGINE, WRITER = "mlxkv-engine", "mlxkv-write"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


def asleep(engine: Engine, waits: Waits) -> float | None:
    """With which timeout the engine sleeps once it has done all that it was told."""
    before = len(waits.of(ENGINE))
    engine.call(lambda: None)
    wait_until(lambda: len(waits.of(ENGINE)) > before)
    return waits.of(ENGINE)[-1]


def test_an_idle_engine_and_its_writer_wait_for_messages_only(waits: Waits, tmp_path: Path) -> None:
    with running(tiny_model, tmp_path) as engine:
        assert asleep(engine, waits) is None
        ask(engine, some_tokens(200, seed=1), 4)
        engine.call(engine.cache.store.flush)
        assert asleep(engine, waits) is None
    assert {*waits.of(ENGINE), *waits.of(WRITER)} == {None}
    assert waits.of(WRITER)


def test_a_pin_wakes_an_idle_engine_when_it_expires(waits: Waits, tmp_path: Path) -> None:
    with running(tiny_model, tmp_path) as engine:
        ask(engine, some_tokens(200, seed=1), 2, pin_s=3600)
        assert 3500 < (asleep(engine, waits) or 0) <= 3600
        ask(engine, some_tokens(200, seed=2), 2, pin_s=0.2)
        wait_until(lambda: len(engine._pins) == 1)  # nobody tells it anything meanwhile
        assert 3500 < (asleep(engine, waits) or 0) <= 3600
        engine._pins[0][1]()
        engine._pins.clear()
