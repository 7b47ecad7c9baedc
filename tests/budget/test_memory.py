"""Bytes at any context: every term, the three checks, and what is found by bisection."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_gemma3, tiny_llama, tiny_mamba2, tiny_qwen3_next

from mlxkv.budget import Deployment, find_machine, find_source, trace_model
from mlxkv.budget.machines import METAL, UNFUSED, described_machine
from mlxkv.budget.memory import MOST_SHARE, RUNTIME_BYTES
from mlxkv.core.units import GIB
from mlxkv.sizing.weights import WeightSpec

ROOT = Path(__file__).parents[2]


@cache
def traced(name, bits=4, kv_bits=None):
    weights = WeightSpec(bits) if bits else None
    return trace_model(find_source(name), weights=weights, kv_bits=kv_bits, quick=True)


def tiny(config):
    return trace_model(find_source(config), quick=True)


def on_24_gb(model, **settings):
    return Deployment(model, described_machine(), **settings)


# terms


def test_the_total_is_the_sum_of_its_terms():
    memory = on_24_gb(traced("gemma-3-12b"), hot_bytes=GIB).memory(5000, 3)
    assert memory.total_bytes == sum(
        (memory.weights_bytes, memory.kv_bytes, memory.slack_bytes, memory.transient_bytes, RUNTIME_BYTES, GIB)
    )


def test_kv_in_use_and_as_allocated_differ_by_the_steps_of_256():
    deployment = on_24_gb(traced("Llama-3.1-8B"))
    for tokens, rows in ((1, 256), (255, 256), (256, 256), (257, 512)):
        memory = deployment.memory(tokens)
        assert memory.kv_bytes == 131_072 * tokens
        assert memory.kv_bytes + memory.slack_bytes == 131_072 * rows


def test_a_window_holds_step_minus_one_more_while_a_step_is_prefilled():
    deployment = on_24_gb(traced("gemma-3-12b"))
    memory = deployment.memory(32_768)
    assert memory.kv_bytes == 65_536 * 32_768 + 327_680 * 1024
    assert memory.slack_bytes == 327_680 * 2047
    assert replace(deployment, prefill_step_tokens=256).memory(32_768).slack_bytes == 327_680 * 255
    assert deployment.memory(32_768, 2).slack_bytes == 327_680 * 2047  # the second one is decoding


def test_a_shared_prefix_is_kept_once():
    deployment = on_24_gb(traced("Llama-3.1-8B"), shared_prefix_tokens=30_000)
    assert deployment.memory(32_768, 8).kv_bytes == 131_072 * (30_000 + 8 * 2768)
    assert deployment.memory(20_000, 8).kv_bytes == 131_072 * 20_000
    assert deployment.memory(32_768, 1).kv_bytes == 131_072 * 32_768


def test_eight_agents_with_a_common_prompt_fit_24_gb_only_with_one_copy():
    """DESIGN section 7."""
    alone = on_24_gb(traced("Llama-3.1-8B"))
    assert not alone.fits(32_000, 8)
    assert replace(alone, shared_prefix_tokens=30_000).fits(32_000, 8)


def test_windows_and_states_are_each_sequence_s_own():
    deployment = on_24_gb(tiny(tiny_qwen3_next()), shared_prefix_tokens=64)
    model = deployment.model.trace
    one = model.growth_bytes_per_token
    assert deployment.memory(100, 3).kv_bytes == one * (64 + 3 * 36) + 3 * model.fixed_bytes
    windowed = on_24_gb(tiny(tiny_gemma3()), shared_prefix_tokens=64)
    model = windowed.model.trace
    expected = model.growth_bytes_per_token * (64 + 3 * 36) + 3 * 32 * model.window_bytes_per_token
    assert windowed.memory(100, 3).kv_bytes == expected


def test_scores_are_written_out_where_metal_has_no_kernel():
    assert on_24_gb(traced("Llama-3.1-8B")).memory(32_768).transient_bytes == 0
    deployment = on_24_gb(traced("Qwen3.5-9B"))
    assert deployment.memory(32_768).transient_bytes == 16 * 2048 * 32_768 * 2
    assert deployment.memory(1000).transient_bytes == 16 * 1000 * 1000 * 2
    assert replace(deployment, prefill_step_tokens=512).memory(32_768).transient_bytes == 16 * 512 * 32_768 * 2


def test_a_window_bounds_the_scores_too():
    deployment = on_24_gb(traced("gemma-4-26B-A4B"))
    full = 16 * 2048 * 32_768 * 2  # head size 512
    assert deployment.memory(32_768).transient_bytes == full
    assert deployment.memory(2048).transient_bytes == 16 * 2048 * 2048 * 2


def test_a_model_that_takes_its_own_softmax_is_never_fused():
    assert on_24_gb(traced("gemma-2-9b")).memory(8192).transient_bytes == 16 * 2048 * 8192 * 2


def test_latent_attention_costs_its_mask_and_unpacked_keys_twice():
    expected = 2 * (128 * 2048 * 8192 + 128 * 8192 * 256) * 2
    assert on_24_gb(traced("DeepSeek-V3")).memory(8192).transient_bytes == expected


def test_the_m5_has_a_kernel_for_head_size_256():
    model = traced("Qwen3.5-9B")
    deployment = Deployment(model, described_machine(memory_bytes=32 * GIB, chip="M5"))
    assert deployment.memory(32_768).transient_bytes == 16 * 1023 * 32_768 * 2  # the rest after full steps
    assert Deployment(model, described_machine(chip="M5", macos="15")).memory(32_768).transient_bytes == 2 * 2**30


def test_quantised_kv_can_have_a_higher_peak():
    """ml-explore/mlx-lm#1587: Llama-3.2-3B at 32 k."""
    plain, quantised = on_24_gb(traced("Llama-3.2-3B")), on_24_gb(traced("Llama-3.2-3B", kv_bits=8))
    assert quantised.memory(32_768).kv_bytes == plain.memory(32_768).kv_bytes * 0.53125
    assert quantised.memory(32_768).total_bytes > plain.memory(32_768).total_bytes


@pytest.mark.parametrize(
    ("name", "longest_k", "with_step_512"),
    [("Qwen3.5-9B", 142, 284), ("Llama-3.1-8B", 111, 111), ("Qwen3-30B-A3B", 19, 19)],
)
def test_the_transient_moves_the_longest_context_as_worked_out_by_hand(name, longest_k, with_step_512):
    """data/mlx_facts.md 2.6: a limit of 17.8 GiB, nothing but weights, KV and scores; thousands of tokens."""
    model = replace(traced(name), context=None)
    limit = int(17.8 * GIB / MOST_SHARE) + int(RUNTIME_BYTES / MOST_SHARE)
    machine = replace(described_machine(memory_bytes=512 * GIB), gpu_limit_bytes=limit, kernels=METAL)
    assert Deployment(model, machine).max_context_tokens() / 1000 == pytest.approx(longest_k, rel=0.03)
    small = Deployment(model, machine, prefill_step_tokens=512)
    assert small.max_context_tokens() / 1000 == pytest.approx(with_step_512, rel=0.03)


def test_the_hot_tier_counts_against_the_limit():
    deployment = on_24_gb(traced("Llama-3.1-8B"))
    with_hot = replace(deployment, hot_bytes=4 * GIB)
    assert with_hot.memory(4096).total_bytes - deployment.memory(4096).total_bytes == 4 * GIB
    assert with_hot.max_context_tokens() < deployment.max_context_tokens()
    assert deployment.left_bytes(4096) - with_hot.left_bytes(4096) == 4 * GIB


# checks


def test_three_checks_are_apart():
    model = replace(traced("Llama-3.1-8B"), context=None)
    deployment = on_24_gb(model)
    assert deployment.judge(deployment.memory(131_072)).failed == ("gpu_limit",)
    roomy = replace(described_machine(memory_bytes=128 * GIB), max_buffer_bytes=2**27)
    assert Deployment(model, roomy).judge(Deployment(model, roomy).memory(8192)).failed == ("max_buffer",)
    wired = replace(described_machine(), gpu_limit_bytes=24 * GIB)
    judgement = Deployment(model, wired).judge(Deployment(model, wired).memory(128_000))
    assert (judgement.verdict, judgement.binding, judgement.failed) == ("tight", "system_memory", ())


def test_tight_lies_between_90_and_95_percent_of_the_limit():
    deployment = on_24_gb(replace(traced("Llama-3.1-8B"), context=None))
    seen = {}
    for tokens in range(60_000, 100_000, 256):
        memory = deployment.memory(tokens)
        share = memory.total_bytes / deployment.machine.gpu_limit_bytes
        seen.setdefault(deployment.judge(memory).verdict, []).append(share)
    assert max(seen["fits"]) <= 0.90 < min(seen["tight"])
    assert max(seen["tight"]) <= 0.95 < min(seen["does not fit"])


def test_a_plan_just_above_the_limit_is_refused():
    """C67: 108.01 GiB on a 128 GiB Mac whose limit is 107.52 GiB."""
    model = replace(traced("Llama-3.1-8B"), context=None)
    deployment = Deployment(model, described_machine(memory_bytes=128 * GIB))
    assert round(deployment.machine.gpu_limit_bytes / GIB, 2) == 107.52
    short = int(108.01 * GIB) - deployment.memory(1).total_bytes
    memory = replace(deployment.memory(1), hot_bytes=short)
    assert deployment.judge(memory).verdict == "does not fit"
    raised = replace(deployment, machine=replace(deployment.machine, gpu_limit_bytes=116 * GIB))
    assert raised.judge(memory).verdict == "tight"  # 13.5 GiB left, of which the GPU limit leaves 6 %


def test_a_context_beyond_the_model_s_maximum_does_not_fit():
    deployment = on_24_gb(traced("Qwen2.5-0.5B-Instruct"))
    assert deployment.fits(32_768)
    judgement = deployment.judge(deployment.memory(32_769))
    assert (judgement.verdict, judgement.binding) == ("does not fit", "model_context")


# bisection


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3.5-9B", "gemma-3-12b", "gpt-oss-20b", "Qwen3.5-27B"])
def test_the_longest_context_fits_and_one_token_more_does_not(name):
    deployment = on_24_gb(traced(name))
    for sequences in (1, 2):
        longest = deployment.max_context_tokens(sequences)
        assert not longest or deployment.fits(longest, sequences)
        assert not deployment.fits(longest + 1, sequences)


def test_the_number_of_sequences_fits_and_one_more_does_not():
    deployment = on_24_gb(traced("Llama-3.1-8B"), shared_prefix_tokens=4096)
    most = deployment.max_sequences(8192)
    assert deployment.fits(8192, most)
    assert not deployment.fits(8192, most + 1)
    assert on_24_gb(traced("Qwen3.5-27B", bits=None)).max_sequences(1024) == 0


MODELS = ["Llama-3.1-8B", "Qwen3.5-9B", "gemma-3-12b", "DeepSeek-V3", "granite-4.0-h-small"]


@given(
    name=st.sampled_from(MODELS),
    tokens=st.integers(1, 10**6),
    more=st.integers(1, 5000),
    sequences=st.integers(1, 64),
    step=st.sampled_from([1, 64, 512, 2048, 10**6]),
    shared=st.integers(0, 10**5),
    cpu=st.booleans(),
)
def test_more_tokens_or_sequences_never_cost_less(name, tokens, more, sequences, step, shared, cpu):
    machine = find_machine(chip="CPU") if cpu else described_machine()
    deployment = Deployment(traced(name), machine, prefill_step_tokens=step, shared_prefix_tokens=shared)
    memory = deployment.memory(tokens, sequences)
    assert memory.slack_bytes >= 0
    assert memory.total_bytes <= deployment.memory(tokens + more, sequences).total_bytes
    assert memory.total_bytes <= deployment.memory(tokens, sequences + 1).total_bytes
    assert memory.largest_buffer_bytes <= deployment.memory(tokens + more, sequences).largest_buffer_bytes
    unshared = replace(deployment, shared_prefix_tokens=0).memory(tokens, sequences)
    assert memory.total_bytes <= unshared.total_bytes


def test_a_model_without_kv_costs_the_same_at_every_length():
    deployment = on_24_gb(replace(tiny(tiny_mamba2()), context=None))
    assert deployment.memory(1).total_bytes == deployment.memory(10**6).total_bytes
    assert deployment.max_context_tokens() == 10**9


# this machine


def measured(*arguments):
    """`benchmarks/prefill_memory.py` in a process of its own, with the fast BLAS that other tests do without."""
    variables = {name: value for name, value in os.environ.items() if name != "MLXKV_BLAS"} | {
        "OPENBLAS_NUM_THREADS": "1"
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "prefill_memory.py"), "--json", *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_peak_of_a_real_prefill_on_the_cpu_is_met_within_5_percent():
    for row in measured("--tokens", "512"):
        assert row["layers"] == 30
        assert abs(row["error"]) < 0.05


def test_so_it_is_for_a_full_step_where_the_transient_is_half_of_the_peak():
    """The whole model at 2,048 and 4,096 tokens is in the benchmark; a transient is that of one layer."""
    for row in measured("--tokens", "2048", "--layers", "4"):
        assert abs(row["error"]) < 0.05


def test_on_the_cpu_scores_are_always_written_out():
    model = tiny(tiny_llama() | {"head_dim": 64})
    deployment = Deployment(model, find_machine(chip="CPU"))
    assert deployment.machine.kernels == UNFUSED
    assert deployment.memory(512).runtime_bytes == 0
    scores, mask, grown = 4 * 512 * 512 * 2, 512 * 512, 512 * 2 * 2 * 64 * 2
    assert deployment.memory(512).transient_bytes == scores + mask + grown + 18 * 64 * 512 * 2
