"""A device that fails: what it did not compute is never published, whenever and to whomever it tells.

One call after another fails: every cache that the step writes holds rubbish, and this call or the next raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from driving import some_tokens
from failing import Device
from mlx_lm.generate import generate_step
from serving import Asked, ask, running, tiny_model

from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.errors import DeviceError
from mlxkv.core.units import GIB, MIB
from mlxkv.engine.engine import Engine
from mlxkv.engine.generate import generate
from mlxkv.engine.request import Failed, Request
from mlxkv.prompt_cache import batch, block_cache
from mlxkv.prompt_cache.block_cache import BlockCache


def failing_in_turn(
    device: Device, directory: Path, module: Any, run: Callable[[BlockCache], Any], *, late: bool
) -> Iterator[Path]:
    """Fail in one call after another of `run`, which must raise; yields the directories it leaves behind."""
    with opened_cache(module, directory / "whole") as cache:
        device.arm(threading.get_ident(), None)
        run(cache)
    for at in places(device.calls - late, 12):  # told after the last call is told to somebody else
        with opened_cache(module, directory / f"call {at}") as cache:
            device.arm(threading.get_ident(), at, late=late)
            with pytest.raises((RuntimeError, DeviceError), match="METAL"):
                run(cache)
            device.arm(0, None)
        yield directory / f"call {at}"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(block_cache, "MEASURED_TOKENS", 10**9)  # a tiny model computes faster than it restores
    monkeypatch.setattr(batch, "SHARE_FROM_BYTES", 1)
    return Device(monkeypatch)


def greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def opened_cache(module: Any, directory: Path, *, hot: int = 64 * MIB, cold: int = GIB) -> BlockCache:
    store = BlockStore(CacheConfig(directory=directory, hot_bytes=hot, cold_bytes=cold, floor_bytes=0))
    return BlockCache(module, {"model": "tiny"}, store, name="tiny")


def requests(prompts: list[list[int]], max_tokens: int) -> list[Request]:
    return [Request(prompt=tuple(prompt), max_tokens=max_tokens) for prompt in prompts]


def thread_of(engine: Engine) -> int:
    return engine.call(threading.get_ident)


def together(engine: Engine, asked: list[Request]) -> list[Any]:
    return [one.wait() for one in [Asked(engine, request) for request in asked]]


SHARED = some_tokens(140, 5)
SCENES: dict[str, tuple[str, list[list[int]], int, bool]] = {
    "one alone": ("llama", [some_tokens(300, 1)], 30, False),
    "three, a step ahead": ("llama", [some_tokens(90, 3), some_tokens(200, 4), some_tokens(60, 6)], 20, True),
    "a shared prefix": ("llama", [SHARED + some_tokens(n, n) for n in (20, 33)], 40, True),
    "windows": ("gemma3", [some_tokens(150, 7), some_tokens(100, 8)], 30, True),
    "states": ("qwen3_next", [some_tokens(150, 9), some_tokens(100, 10)], 30, False),
}


def places(calls: int, most: int) -> list[int]:
    """Every call where there are few, else some from everywhere."""
    return sorted({*range(0, calls, max(calls // most, 1)), calls - 1})


@pytest.mark.parametrize("late", [False, True], ids=["told at once", "told late"])
@pytest.mark.parametrize("scene", SCENES)
def test_no_failed_computation_is_ever_reused(scene: str, late: bool, device: Device, tmp_path: Path) -> None:
    name, prompts, max_tokens, ahead = SCENES[scene]
    model = tiny_model(name)
    asked = lambda: requests(prompts, max_tokens)  # noqa: E731 - each run gives them new ids

    def opened(directory: str, **more: Any) -> Any:
        return running(lambda: model, tmp_path / directory, chunk_tokens=128, lookahead=ahead, **more)

    with opened("none", hot=0, cold=0) as engine:
        want = [ask(engine, prompt, max_tokens).tokens for prompt in prompts]
    with opened("whole") as engine:
        device.arm(thread_of(engine), None)
        assert [reply.tokens for reply in together(engine, asked())] == want
        calls = device.calls
    failed = 0
    for at in places(calls, 5):
        with opened(f"at {at}") as engine:
            device.arm(thread_of(engine), at, late=late)
            replies = together(engine, asked())
            device.arm(0, None)
            failed += sum(isinstance(reply.end, Failed) for reply in replies)
            for reply, expected in zip(replies, want, strict=True):
                if not isinstance(reply.end, Failed):
                    assert reply.tokens == expected, f"call {at} spoiled a request that was not told"
            assert [ask(engine, prompt, max_tokens).tokens for prompt in prompts] == want, f"after call {at}"
            engine.call(lambda: engine.cache.store.flush())
        with opened(f"at {at}", hot=0) as engine:
            assert [ask(engine, prompt, max_tokens).tokens for prompt in prompts] == want, f"restart after call {at}"
    assert failed, "no request was ever told"


@pytest.mark.parametrize("late", [False, True], ids=["told at once", "told late"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_generate_publishes_nothing_that_failed(name: str, late: bool, device: Device, tmp_path: Path) -> None:
    module, prompt = tiny_model(name).module, some_tokens(200, 21)

    def run(cache: BlockCache) -> list[int]:
        return list(generate(module, cache, prompt, max_tokens=6, sampler=greedy, chunk_tokens=64))

    with opened_cache(module, tmp_path / "none", hot=0, cold=0) as cache:
        want = run(cache)
    for left in failing_in_turn(device, tmp_path, module, run, late=late):
        with opened_cache(module, left) as cache:
            assert run(cache) == want, left.name


@pytest.mark.parametrize("late", [False, True], ids=["told at once", "told late"])
def test_the_library_publishes_nothing_that_failed(late: bool, device: Device, tmp_path: Path) -> None:
    model = tiny_model()
    prompt = some_tokens(200, 22)

    def run(cache: BlockCache) -> list[int]:
        prompt_cache, held = cache.restore(prompt)
        steps = generate_step(
            mx.array(prompt[held:]), model.module, max_tokens=4, prompt_cache=prompt_cache, prefill_step_size=64
        )
        said: list[int] = []
        try:
            said += [token for token, _ in steps]
        finally:
            cache.commit([*prompt, *said], prompt_cache)
        return said

    with opened_cache(model.module, tmp_path / "none", hot=0, cold=0) as cache:
        want = run(cache)
    for left in failing_in_turn(device, tmp_path, model.module, run, late=late):
        with opened_cache(model.module, left) as cache:
            assert run(cache) == want, left.name


def test_a_prompt_cache_that_could_not_be_cut_is_not_committed_at_the_second_try(
    device: Device, tmp_path: Path
) -> None:
    module, prompt = tiny_model().module, some_tokens(200, 23)
    with opened_cache(module, tmp_path / "blocks") as cache:
        prompt_cache, _ = cache.restore(prompt)
        module(mx.array(prompt)[None], cache=prompt_cache)
        device.arm(threading.get_ident(), 0)
        with pytest.raises((RuntimeError, DeviceError), match="METAL"):
            cache.commit(prompt, prompt_cache)
        device.arm(0, None)
        assert cache.commit(prompt, prompt_cache) == 0
        assert cache.restore(prompt).tokens == 0


def test_an_interrupt_keeps_what_was_computed(tmp_path: Path) -> None:
    module, prompt = tiny_model().module, some_tokens(200, 24)
    with opened_cache(module, tmp_path / "blocks") as cache:
        prompt_cache, _ = cache.restore(prompt)
        module(mx.array(prompt)[None], cache=prompt_cache)
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert cache.commit(prompt, prompt_cache) == 200


@pytest.mark.parametrize("tells", [True, False], ids=["told by advance", "told by commit"])
def test_a_sequence_that_is_finished_after_an_error_keeps_what_came_before_it(
    tells: bool, device: Device, tmp_path: Path
) -> None:
    module, prompt = tiny_model().module, some_tokens(200, 25)
    with opened_cache(module, tmp_path / "blocks") as cache:
        sequence = cache.start(prompt)
        for stop in (64, 128):
            module(mx.array(prompt[stop - 64 : stop])[None], cache=sequence.prompt_cache)
            device.arm(threading.get_ident(), 0 if stop == 128 else None)
            try:
                mx.eval([layer.state for layer in sequence.prompt_cache])
            except RuntimeError:
                break
            finally:
                device.arm(0, None)
            if tells:
                sequence.advance(64)
            sequence.commit()
        sequence.finish()
        assert cache.restore(prompt).tokens == 64
