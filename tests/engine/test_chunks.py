"""A prefill chunk is as long as its depth allows, by memory and by a GPU's time, not as the longest context would."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import some_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import ask, running, tiny_model

from mlxkv.budget.machines import described_machine, this_cpu
from mlxkv.budget.memory import MOST_SHARE, Deployment
from mlxkv.budget.model import TracedModel, trace_model
from mlxkv.budget.source import find_source
from mlxkv.core.units import GIB
from mlxkv.engine.chunks import MOST_PAIRS, Chunks, plan_chunks
from mlxkv.engine.memory import TRANSIENT_SHARE, prefill_chunks
from mlxkv.sizing.trace import WeightSpec

MODELS = ("Qwen2.5-7B-Instruct", "gemma-3-4b", "gemma-3-12b", "gemma-2-9b", "gemma-3-27b", "DeepSeek-V3")
TRACED: dict[str, TracedModel] = {}


def traced(name: str) -> TracedModel:
    if name not in TRACED:
        TRACED[name] = trace_model(find_source(name), weights=WeightSpec(4))
    return TRACED[name]


def planned(name: str, gib: int) -> tuple[TracedModel, Deployment, int, Chunks]:
    model, machine = traced(name), described_machine(memory_bytes=gib * GIB, macos="26")
    spare = int(machine.gpu_limit_bytes * MOST_SHARE) - model.trace.weights.bytes
    return model, Deployment(model, machine), spare, prefill_chunks(model, machine, spare)


@pytest.mark.parametrize("gib", [16, 24, 64, 512])
@pytest.mark.parametrize("name", MODELS)
def test_a_short_prompt_gets_long_chunks_and_a_deep_one_stays_within_memory_and_time(name: str, gib: int) -> None:
    model, deployment, spare, chunks = planned(name, gib)
    if spare <= 0:
        pytest.skip(f"{name} does not fit {gib} GB")
    context = model.context.scaled_tokens if model.context else 32_768
    for length, end in chunks.peaks(context):
        assert length * end <= MOST_PAIRS or length == 64
        bill = Deployment(model, deployment.machine, prefill_step_tokens=length).memory(end)
        assert bill.transient_bytes <= max(TRANSIENT_SHARE * spare, 0) + model.hidden_size or length == 64
    if spare > 6 * GIB:
        assert chunks.at(0) == 2048


def test_gemma_3_12b_on_24_gb_prefills_a_short_prompt_2048_at_a_time() -> None:
    model, deployment, spare, chunks = planned("gemma-3-12b", 24)
    assert chunks.at(0) == chunks.at(2_000) == 2048
    assert chunks.at(100_000) < 512
    reserve = max(
        Deployment(model, deployment.machine, prefill_step_tokens=length).memory(end).transient_bytes
        for length, end in chunks.peaks(131_072)
    )
    before = Deployment(model, deployment.machine, prefill_step_tokens=256).memory(131_072).transient_bytes
    assert reserve < 0.7 * before, "what the longest context kept for itself is the hot tier's"
    assert reserve <= TRANSIENT_SHARE * spare


def test_a_fused_kernel_is_bound_by_time_alone() -> None:
    *_, chunks = planned("Qwen2.5-7B-Instruct", 64)
    assert chunks.steps[:3] == ((0, 2048), (65_536, 1024), (131_072, 512))


def test_a_cpu_has_no_watchdog() -> None:
    chunks = prefill_chunks(traced("Qwen2.5-7B-Instruct"), this_cpu(), 2**50)
    assert chunks == Chunks.of(256)


@given(
    longest=st.sampled_from([64, 100, 128, 256, 1000, 2048, 4096]),
    flat=st.integers(0, 10**9),
    pairs=st.integers(1, 2**33),
)
@settings(max_examples=60)
def test_any_plan_is_cut_at_absolute_multiples_and_never_across_a_change(longest: int, flat: int, pairs: int) -> None:
    chunks = plan_chunks(lambda length, end: length * end <= pairs and length * 1000 <= flat, longest)
    positions, lengths = zip(*chunks.steps, strict=True)
    assert positions[0] == 0
    assert list(positions) == sorted(set(positions))
    for shorter, at, length in zip(lengths[1:], positions[1:], lengths, strict=False):
        assert length % shorter == 0
        assert at % length == 0
    for at in {0, 1, longest - 1, *positions, *(position - 1 for position in positions[1:]), 10**6}:
        end, length = chunks.end(at), chunks.at(at)
        assert at < end <= at + length
        assert end % length == 0
        assert all(end <= position for position in positions if position > at)
        assert length == lengths[-1] or length * end <= pairs


def test_a_restored_run_is_cut_where_a_fresh_one_is_and_says_the_same(tmp_path: Path) -> None:
    chunks = Chunks(((0, 256), (512, 128), (768, 64)))
    prompt = some_tokens(1000, seed=1)

    def cuts(cache: str, ask_first: int) -> tuple[list[int], list[int], int]:
        seen: list[int] = []
        with running(tiny_model, tmp_path / cache, chunks=chunks) as engine:
            if ask_first:
                ask(engine, prompt[:ask_first], 1)
            module = type(engine.model.module)
            plain = module.__call__

            def noted(self, inputs, *more, **named):  # type: ignore[no-untyped-def]
                seen.append(inputs.shape[1])
                return plain(self, inputs, *more, **named)

            module.__call__ = noted
            try:
                reply = ask(engine, prompt, 6)
            finally:
                module.__call__ = plain
            held = reply.finished.cached_tokens
        ends, at = [], held
        for length in seen:
            if length > 1:
                at += length
                ends.append(at)
        return ends, reply.tokens, held

    fresh, said, _ = cuts("fresh", 0)
    assert fresh == [256, 512, 640, 768, 832, 896, 960, 999]
    for first in (300, 700, 830):
        ends, again, held = cuts(f"restored {first}", first)
        assert held >= first - 1
        assert ends == [end for end in fresh if end > held]
        assert again == said
