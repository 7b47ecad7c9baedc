"""A device that fails and says how: everybody it concerns is told, nobody else is, and memory is let go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from answering import wait_until
from driving import some_tokens
from failing import OUT_OF_MEMORY, TOO_SLOW, VICTIM, Device
from serving import Asked, Reply, ask, running, tiny_model
from talking import save_talking_model, talking_model

from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.errors import DeviceError
from mlxkv.core.units import GIB, MIB
from mlxkv.engine.chat import Chat, Sampling
from mlxkv.engine.chunks import Chunks
from mlxkv.engine.engine import Engine
from mlxkv.engine.generate import generate
from mlxkv.engine.request import Failed, Request
from mlxkv.engine.sampling import RowSampler
from mlxkv.engine.scheduler import Limits
from mlxkv.models.loader import load
from mlxkv.prompt_cache.block_cache import BlockCache

PROMPTS = [some_tokens(90, 3), some_tokens(200, 4), some_tokens(60, 6)]
LONG = 2000


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@contextmanager
def opened_cache(model: Any, directory: Path) -> Iterator[BlockCache]:
    store = BlockStore(CacheConfig(directory=directory, hot_bytes=64 * MIB, cold_bytes=GIB, floor_bytes=0))
    with BlockCache(model.module, {"model": "tiny"}, store, name="tiny") as cache:
        yield cache
        assert store.pins() == 0


def decoding(engine: Engine, **more: Any) -> list[Asked]:
    """A request for each prompt, all of which are in their replies."""
    asked = [Asked(engine, Request(prompt=tuple(prompt), max_tokens=LONG, **more)) for prompt in PROMPTS]
    wait_until(lambda: [one.phase for one in engine.status.running] == ["decode"] * len(PROMPTS))
    return asked


def told(reply: Reply) -> DeviceError:
    assert isinstance(reply.end, Failed), reply.end
    assert isinstance(reply.end.error, DeviceError), reply.end.error
    return reply.end.error


def arm(engine: Engine, device: Device, fail_at: int | None, **more: Any) -> None:
    engine.call(lambda: device.arm(threading.get_ident(), fail_at, **more))


@pytest.mark.parametrize("lookahead", [False, True], ids=["step by step", "a step ahead"])
@pytest.mark.parametrize("late", [False, True], ids=["told at once", "told late"])
def test_a_failed_step_is_told_to_every_row_and_its_aftermath_to_nobody(
    lookahead: bool, late: bool, device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tiny_model, tmp_path, lookahead=lookahead, limits=Limits(sequences=3)) as engine:
        want = [ask(engine, prompt).tokens for prompt in PROMPTS]
        asked = decoding(engine)
        waiting = Asked(engine, Request(prompt=tuple(PROMPTS[0]), max_tokens=8))
        arm(engine, device, 2, said=OUT_OF_MEMORY, late=late, then=VICTIM)
        errors = [told(one.wait()) for one in asked]
        assert {(error.kind, str(error)) for error in errors} == {("memory", str(errors[0]))}
        assert "--sequences (now 3)" in str(errors[0])
        assert waiting.wait().tokens == want[0]
        assert [ask(engine, prompt).tokens for prompt in PROMPTS] == want
    assert ["ran out of memory" in record.message and not record.exc_info for record in caplog.records] == [True]


@pytest.mark.parametrize("where", ["a processor", "log-probabilities"])
def test_what_a_row_hears_of_the_device_while_it_samples_is_told_to_every_row(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError(TOO_SLOW)

    with running(tiny_model, tmp_path, limits=Limits(sequences=4)) as engine:
        want = [ask(engine, prompt).tokens for prompt in PROMPTS]
        asked = decoding(engine)
        if where == "a processor":
            one = Request(prompt=tuple(PROMPTS[0]), max_tokens=4, processors=lambda: [fails])
        else:
            monkeypatch.setattr("mlxkv.engine.sampling.TokenLogprob", fails)
            one = Request(prompt=tuple(PROMPTS[0]), max_tokens=4, logprobs=2)
        asked.append(Asked(engine, one))
        assert {told(each.wait()).kind for each in asked} == {"time"}
        assert [ask(engine, prompt).tokens for prompt in PROMPTS] == want


@pytest.mark.parametrize(("said", "heard"), [(TOO_SLOW, True), ("no such token", False)])
def test_a_row_keeps_an_error_of_its_own_to_itself_and_raises_the_devices(said: str, heard: bool) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError(said)

    row = RowSampler(Request(prompt=(1, 2), max_tokens=4, processors=lambda: [fails]))
    with pytest.raises(RuntimeError) if heard else nullcontext():
        row.next(mx.zeros((1, 8)), None)
    assert (row.error is None) == heard, "before any row has the token of a step that may have failed"


def test_a_failed_chunk_ends_its_request_alone(tmp_path: Path) -> None:
    long = some_tokens(1500, 9)
    with running(tiny_model, tmp_path, limits=Limits(sequences=4), chunk_tokens=512) as engine:
        want = ask(engine, PROMPTS[0], 300).tokens
        other = Asked(engine, Request(prompt=tuple(PROMPTS[0]), max_tokens=300))
        wait_until(lambda: engine.status.running)
        fails = Asked(engine, Request(prompt=tuple(long), max_tokens=4))
        with pytest.MonkeyPatch.context() as patch:
            eval_ = mx.eval
            armed = iter([True])

            def failing(*arrays: Any) -> None:
                eval_(*arrays)
                if any(one.phase != "decode" for one in engine.status.running) and next(armed, False):
                    raise RuntimeError(TOO_SLOW)

            patch.setattr(mx, "eval", failing)
            assert "--prefill-chunk below 512" in str(told(fails.wait()))
        assert other.wait().tokens == want


def test_deep_in_a_prompt_the_chunk_to_shorten_is_the_one_that_failed(device: Device, tmp_path: Path) -> None:
    with running(tiny_model, tmp_path, chunks=Chunks(((0, 512), (512, 128)))) as engine:
        arm(engine, device, 6, said=TOO_SLOW)
        assert "lower --prefill-chunk below 128, or" in str(told(ask(engine, some_tokens(1000, 8))))


def test_memory_is_let_go_while_the_error_is_still_held(device: Device, tmp_path: Path) -> None:
    prompt = some_tokens(1000, 8)

    def memory() -> tuple[int, int]:
        return mx.get_active_memory(), mx.get_cache_memory()

    with running(tiny_model, tmp_path, hot=0, cold=0, chunk_tokens=512) as engine:
        ask(engine, prompt)
        engine.call(mx.clear_cache)
        before = engine.call(memory)
        errors = []
        for at in (0, 2, 5):
            arm(engine, device, at, said=OUT_OF_MEMORY)
            errors.append(told(ask(engine, prompt)))
            arm(engine, device, None)
            assert engine.call(memory) == before


def test_generate_says_what_to_change_and_lets_go(device: Device, tmp_path: Path) -> None:
    model, prompt = tiny_model(), some_tokens(1000, 8)
    ran: Callable[[], list[int]] = lambda: list(  # noqa: E731
        generate(model.module, cache, prompt, max_tokens=4, sampler=lambda x: mx.argmax(x, axis=-1), chunk_tokens=512)
    )
    with opened_cache(model, tmp_path / "want") as cache:
        want = ran()
    with opened_cache(model, tmp_path / "blocks") as cache:
        mx.clear_cache()
        before = mx.get_active_memory()
        device.arm(threading.get_ident(), 0, said=OUT_OF_MEMORY)
        with pytest.raises(DeviceError, match=r"out of memory.*give the hot tier less") as error:
            ran()
        assert error.value.exit_code == 1
        assert (mx.get_active_memory(), mx.get_cache_memory()) == (before, 0)
        device.arm(threading.get_ident(), 0, said=TOO_SLOW)
        with pytest.raises(DeviceError, match=r"took too long.*chunk_tokens="):
            ran()
        device.arm(0, None)
        assert ran() == want


def test_a_chat_is_what_it_was_before_the_device_failed(device: Device, tmp_path: Path) -> None:
    model = talking_model()
    with opened_cache(model, tmp_path) as cache:
        chat = Chat(model, cache, system="Be brief.")
        said = "".join(chat.reply("Good morning.", Sampling(max_tokens=8)))
        before = list(chat.messages)
        for at in (0, 6):
            device.arm(threading.get_ident(), at, said=OUT_OF_MEMORY)
            with pytest.raises(DeviceError, match=r"out of memory"):
                list(chat.reply("And then?", Sampling(max_tokens=24)))
            device.arm(0, None)
            assert chat.messages == before
        again = Chat(model, cache, system="Be brief.")
        assert "".join(again.reply("Good morning.", Sampling(max_tokens=8))) == said


def test_the_library_says_what_to_change(device: Device, tmp_path: Path) -> None:
    model, prompt = tiny_model(), some_tokens(200, 8)
    with opened_cache(model, tmp_path) as cache:
        for _ in range(2):
            prompt_cache = cache.restore(prompt).prompt_cache
            model.module(mx.array(prompt)[None], cache=prompt_cache)
            device.arm(threading.get_ident(), 0, said=OUT_OF_MEMORY)
            with pytest.raises(DeviceError, match=r"out of memory.*hot="):
                cache.commit(prompt, prompt_cache)
            device.arm(0, None)
            assert cache.restore(prompt).tokens == 0
        prompt_cache = cache.restore(prompt).prompt_cache
        model.module(mx.array(prompt)[None], cache=prompt_cache)
        assert cache.commit(prompt, prompt_cache) == 200


def test_weights_that_do_not_fit_are_no_broken_download(device: Device, tmp_path: Path) -> None:
    directory = str(save_talking_model(tmp_path / "talking"))
    load(directory)
    device.arm(threading.get_ident(), 0, said=OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match=r"out of memory.*take a smaller model, or one of fewer bits"):
        load(directory)
