"""Seconds and tokens a second: the arithmetic exact, the estimates held against measured rates."""

from functools import cache

import pytest
from tiny import tiny_llama

from mlxkv.budget import Deployment, find_machine, find_source, trace_model
from mlxkv.budget.latency import _pairs, estimate, prefill_flops
from mlxkv.budget.machines import described_machine
from mlxkv.core.units import GIB
from mlxkv.sizing.weights import WeightSpec


@cache
def deployment(name, bits=4, chip="M4 Pro", gib=24):
    model = trace_model(find_source(name), weights=WeightSpec(bits), quick=True)
    return Deployment(model, described_machine(memory_bytes=gib * GIB, chip=chip))


def brute_pairs(tokens, step, window):
    pairs = 0
    for start in range(0, tokens, step):
        queries = min(step, tokens - start)
        pairs += queries * ((min(start, window - 1) if window else start) + queries)
    return pairs


@pytest.mark.parametrize("window", [0, 1, 5, 32, 1000])
@pytest.mark.parametrize("step", [1, 3, 16, 64])
def test_pairs_of_query_and_key_are_counted_as_step_by_step(step, window):
    for tokens in (0, 1, 2, 15, 16, 17, 63, 64, 65, 200):
        assert _pairs(tokens, step, window) == brute_pairs(tokens, step, window)


def test_flops_of_a_tiny_model_are_those_counted_by_hand():
    model = trace_model(find_source(tiny_llama()))
    one = Deployment(model, described_machine(), prefill_step_tokens=4)
    linear = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64  # projections, MLP, norms
    flops = prefill_flops(one, 8)
    assert flops.linear == 2 * linear * 8
    assert flops.quadratic == 4 * 4 * 2 * (16 + 16) * (4 * 4 + 4 * 8)


def test_a_tied_head_is_not_taken_off_twice():
    tied = trace_model(find_source(tiny_llama() | {"tie_word_embeddings": True}))
    untied = trace_model(find_source(tiny_llama()))
    assert tied.head_is_tied
    assert not untied.head_is_tied
    assert tied.linear_params == untied.linear_params


def test_doubling_the_context_doubles_the_linear_part_and_quadruples_the_other():
    one = deployment("Llama-3.1-8B")
    short, long = prefill_flops(one, 2**16), prefill_flops(one, 2**17)
    assert long.linear == 2 * short.linear
    assert long.quadratic / short.quadratic == pytest.approx(4, rel=0.05)


# data/macs.json: decode_measured_M4Pro_24GB_4bit_tok_per_s, for the models whose config is at hand
@pytest.mark.parametrize(
    ("name", "measured"),
    [("Llama-3.1-8B", 50.2), ("Qwen3-8B", 49.4), ("Mistral-7B-v0.3", 51.6), ("Qwen2.5-7B-Instruct", 51.6),
     ("Qwen3.5-9B", 45.7), ("Llama-3.2-3B", 98.6), ("Llama-3.2-1B", 220)],
)  # fmt: skip
def test_measured_decode_rates_are_met(name, measured):
    rate = estimate(deployment(name), 128).decode_tokens_per_s
    assert rate.mid == pytest.approx(measured, rel=0.05)
    assert rate.low < measured < rate.high


# data/macs.json: prefill_measured_tok_per_s, prompt 2048, M4 Max 64 GB
@pytest.mark.parametrize(
    ("name", "bits", "measured"), [("Qwen3-4B", 4, 1622.27), ("Qwen3-4B", 16, 1780.63), ("Qwen3-30B-A3B", 4, 1753.9)]
)
def test_measured_prefill_rates_are_in_the_range(name, bits, measured):
    cold = estimate(deployment(name, bits, "M4 Max", 64), 2048).cold_s
    assert cold.low < 2048 / measured < cold.high
    assert 2048 / measured == pytest.approx(cold.mid, rel=0.2)


def test_a_prefill_of_32_k_on_an_m2_ultra_is_in_the_range():
    """ml-explore/mlx-examples#1081: 430 tokens a second over 32,188."""
    cold = estimate(deployment("Llama-3.1-8B", 4, "M2 Ultra", 192), 32_188).cold_s
    assert cold.low < 32_188 / 430 < cold.high


def test_latent_attention_is_in_the_range():
    """ml-explore/mlx-lm#839: 213 tokens a second over 4,096, 20.6 while decoding; an M3 Ultra of 512 GB."""
    latency = estimate(deployment("DeepSeek-V3", 4, "M3 Ultra", 512), 4096)
    assert latency.cold_s.low < 4096 / 213.3 < latency.cold_s.high
    assert latency.decode_tokens_per_s.low < 20.6 < latency.decode_tokens_per_s.high


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-30B-A3B", "Qwen3.5-9B", "gemma-3-12b"])
@pytest.mark.parametrize("tokens", [1, 64, 4096, 131_072])
def test_ranges_are_ordered_and_restoring_beats_computing(name, tokens):
    latency = estimate(deployment(name), tokens)
    for figure in (latency.cold_s, latency.hot_s, latency.ssd_s, latency.decode_tokens_per_s):
        assert 0 < figure.low <= figure.mid <= figure.high
    if tokens >= 4096:
        assert latency.hot_s.mid < latency.ssd_s.mid < latency.cold_s.mid


def test_more_sequences_decode_slower_each_and_faster_together():
    one, eight = (estimate(deployment("Qwen3-30B-A3B"), 4096, count).decode_tokens_per_s.mid for count in (1, 8))
    assert eight < one < 8 * eight


def test_neural_accelerators_prefill_faster():
    """Apple: 3.3 to 4.1 times the M4."""
    m4, m5 = (estimate(deployment("Qwen3-4B", 4, chip), 4096).cold_s.mid for chip in ("M4", "M5"))
    assert 3 < m4 / m5 < 4.2


def test_without_rates_there_is_no_estimate():
    model = deployment("Qwen3-4B").model
    assert estimate(Deployment(model, find_machine(chip="CPU")), 4096) is None


def test_a_step_of_one_token_and_a_billion_tokens_is_no_loop():
    assert prefill_flops(
        Deployment(deployment("Qwen3-4B").model, described_machine(), prefill_step_tokens=1), 10**9
    ).total
