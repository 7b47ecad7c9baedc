"""The whole answer: exact bytes for every model, its JSON form, and what to change."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from tiny import tiny_llama

from mlxkv.budget import Deployment, find_machine, find_source, plan, trace_model
from mlxkv.budget.catalog import catalog_figures
from mlxkv.budget.machines import described_machine, with_wired_limit
from mlxkv.budget.plot import plot
from mlxkv.budget.schema import json_form
from mlxkv.budget.terms import terms
from mlxkv.cache.checkpoint import positions
from mlxkv.cache.layout import ArraySpec, Layout, StateSpec
from mlxkv.core.errors import ModelError, UsageError
from mlxkv.core.units import GIB, MIB
from mlxkv.sizing.weights import WeightSpec

EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "expected_kv.json").read_text())["models"]
LENGTHS = (64, 4096, 8192, 32_768, 131_072)
LARGEST = described_machine(memory_bytes=512 * GIB)
FIGURES = {row.name: row for row in catalog_figures()}


@cache
def planned(name):
    return plan(name, weights=WeightSpec(4), contexts=LENGTHS, machine=LARGEST)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_known_model_agrees_to_the_byte(name):
    expected, answer = EXPECTED[name], planned(name)
    assert answer.kv.bytes_per_token == expected["grow_bytes_per_token"]
    assert answer.kv.window_tokens == expected["window_tokens"]
    assert answer.kv.window_bytes_per_token == expected["window_bytes_per_token"]
    assert answer.kv.fixed_bytes == expected["fixed_state_bytes"]
    assert {str(row.tokens): row.memory.kv_bytes for row in answer.contexts} == expected["kv_bytes"]
    assert answer.weights.bytes == expected["weights_bytes"]["q4_g64"]
    assert answer.weights.params == expected["params"]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_shipped_catalog_figures_are_those_of_the_trace(name):
    kv, shipped = planned(name).kv, FIGURES[name]
    assert (shipped.bytes_per_token, shipped.bytes_per_block) == (kv.bytes_per_token, kv.bytes_per_block)
    assert (shipped.window_tokens, shipped.window_bytes_per_token) == (kv.window_tokens, kv.window_bytes_per_token)
    context = planned(name).deployment.model.context
    assert (shipped.fixed_bytes, shipped.context_tokens) == (kv.fixed_bytes, context and context.scaled_tokens)


def test_qwen_0_5b_has_12_kib_a_token_and_768_a_block():
    kv = plan("Qwen2.5-0.5B-Instruct", contexts=[4096]).kv
    assert (kv.bytes_per_token, kv.bytes_per_block, kv.first_block_bytes) == (12 * 1024, 786_432, 786_432)


@pytest.mark.parametrize(
    ("name", "figures"),
    [("Qwen2.5-0.5B-Instruct", ["0.05", "0.38"]), ("Llama-3-8B", ["0.50", "4.00"]),
     ("Qwen2.5-72B-Instruct", ["1.25", "10.00"])],
)  # fmt: skip
def test_the_seed_documents_table_to_the_digit(name, figures):
    rows = plan(name, contexts=[4096, 32_768], machine=LARGEST).contexts
    assert [f"{row.memory.kv_bytes / GIB:.2f}" for row in rows] == figures


def test_default_contexts_are_powers_of_two_up_to_the_maximum():
    assert [row.tokens for row in plan("Qwen3-8B", machine=LARGEST).contexts] == [
        1024,
        2048,
        4096,
        8192,
        16_384,
        32_768,
        40_960,
    ]
    assert [row.tokens for row in plan("Llama-3-8B", machine=LARGEST).contexts][-1] == 131_072  # states no maximum
    assert [row.tokens for row in plan(tiny_llama() | {"max_position_embeddings": 100}).contexts] == [100]


def test_a_maximum_that_is_scaled_shows_both_lengths():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    answer = plan(tiny_llama() | {"max_position_embeddings": 32_768, "rope_scaling": yarn})
    context = answer.deployment.model.context
    assert (context.native_tokens, context.scaled_tokens) == (32_768, 131_072)
    assert answer.max_context_tokens == 131_072


def test_an_unknown_maximum_is_no_number():
    config = {key: value for key, value in tiny_llama().items() if key != "max_position_embeddings"}
    answer = plan(config, contexts=[10**5])
    assert answer.deployment.model.context is None
    assert answer.contexts[0].fits


def test_the_verdict_is_of_the_longest_context_asked_or_the_best_of_all():
    settings = {"weights": WeightSpec(4), "machine": described_machine()}
    assert plan("Llama-3.1-8B", contexts=[4096, 131_072], **settings).verdict == "does not fit"
    assert plan("Llama-3.1-8B", contexts=[4096], **settings).verdict == "fits"
    assert plan("Llama-3.1-8B", **settings).verdict == "fits"
    assert plan("Qwen3-32B", **settings).verdict == "does not fit"


def test_tiers_hold_whole_blocks():
    answer = plan("Qwen2.5-0.5B-Instruct", contexts=[4096], hot_bytes=786_432 * 10 + 1, cold_bytes=GIB)
    assert (answer.hot.tokens, answer.cold.tokens) == (640, GIB // (786_432 + 4096) * 64)
    assert answer.contexts[0].memory.hot_bytes == 786_432 * 10 + 1


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "LFM2-1.2B", "granite-4.0-h-small"])
def test_a_tier_that_is_said_to_hold_a_prefix_has_room_for_its_checkpoints(name):
    plans = [plan(name, contexts=[4096], hot_bytes=size) for size in (0, 64 * 2**20, 160 * 2**20, 4 * GIB)]
    kv, state = plans[0].kv.bytes_per_block, plans[0].kv.fixed_bytes
    for answer in plans:
        found = answer.hot.tokens
        ends = positions(layout_with(kv // 64, state), found + 1, ())
        assert bool(ends) == (answer.hot.bytes >= kv + state)
        assert found // 64 * kv + len(ends) * state <= answer.hot.bytes
        assert not ends or ends[-1] == found


def layout_with(bytes_per_token: int, state_bytes: int) -> Layout:
    """One layer of keys, and one of state."""
    return Layout(
        (ArraySpec("0.keys", 1, bytes_per_token // 2, "float16"),), (StateSpec("1.cache.0", (state_bytes,), "uint8"),)
    )


def test_the_answer_is_frozen():
    answer = plan("Qwen2.5-0.5B-Instruct", contexts=[4096])
    with pytest.raises(FrozenInstanceError):
        answer.verdict = "fits"


def test_a_row_that_was_not_asked_for_is_made():
    answer = plan("Qwen2.5-0.5B-Instruct", contexts=[4096])
    assert answer.at(4096) is answer.contexts[0]
    assert answer.at(8192).memory.kv_bytes == 8192 * 12_288


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"contexts": [0]}, "context is 0; it must be a whole number from 1"),
        ({"contexts": [-1]}, "context is -1"),
        ({"contexts": [4096.5]}, "context is 4096.5"),
        ({"contexts": [10**12]}, "context is 1000000000000; it must be a whole number from 1 to 1,000,000,000"),
        ({"sequences": 0}, "sequences is 0"),
        ({"sequences": True}, "sequences is True"),
        ({"prefill_step_tokens": 0}, "prefill step is 0"),
        ({"shared_prefix_tokens": -1}, "shared prefix is -1"),
        ({"kv_bits": 5, "kv_group_size": 48}, "groups of 48"),
    ],
)
def test_a_number_that_cannot_be_is_refused(asked, words):
    with pytest.raises(UsageError, match=words):
        plan("Qwen2.5-0.5B-Instruct", **asked)


@pytest.mark.parametrize("name", ["gemma-3-12b", "gpt-oss-20b", "DeepSeek-V3"])
def test_kv_bits_are_refused_where_mlx_lm_cannot(name):
    with pytest.raises(UsageError, match="leave KV bits out"):
        plan(name, kv_bits=8)


def test_a_config_with_missing_keys_is_named():
    config = {key: value for key, value in tiny_llama().items() if key != "rms_norm_eps"}
    with pytest.raises(ModelError, match="lacks the key rms_norm_eps"):
        plan(config)


# JSON

SCHEMA = {
    "kv": ["bytes_per_token", "block_tokens", "bytes_per_block", "first_block_bytes", "window_tokens",
           "window_bytes_per_token", "fixed_bytes", "formula_bytes_per_token"],
    "weights": ["bytes", "params", "bits"],
    "machine": ["memory_bytes", "gpu_limit_bytes", "max_buffer_bytes", "macos", "chip", "source", "runtime_share"],
}  # fmt: skip
TOP = ["model", "versions", "kv", "weights", "machine", "contexts", "max_context_tokens", "max_sequences", "verdict",
       "advice"]  # fmt: skip
ROW = ["tokens", "sequences", "kv_bytes", "transient_bytes", "total_bytes", "fits", "binding", "ttft_cold_s",
       "ttft_hot_s", "ttft_ssd_s", "decode_tokens_per_s"]  # fmt: skip


def test_the_json_form_has_exactly_the_documented_keys():
    answer = plan("Qwen3-8B", weights=WeightSpec(4), contexts=[4096, 40_961], machine=described_machine())
    form = json.loads(json.dumps(json_form(answer)))
    assert list(form) == TOP
    for part, keys in SCHEMA.items():
        assert list(form[part]) == keys
    for row in form["contexts"]:
        assert list(row) == ROW
        for name in ROW[-4:]:
            assert list(row[name]) == ["low", "mid", "high"]
    assert form["versions"].keys() == {"mlxkv", "mlx", "mlx_lm"}
    assert form["verdict"] == "does not fit"
    assert form["advice"]


def test_estimates_are_null_where_rates_are_unknown():
    row = json_form(plan("SmolLM2-135M", contexts=[512], machine=find_machine(chip="CPU")))["contexts"][0]
    assert [row[name] for name in ROW[-4:]] == [None] * 4


def test_tiers_are_in_the_json_only_when_asked_about():
    form = json_form(plan("Qwen2.5-0.5B-Instruct", contexts=[4096], hot_bytes=GIB))
    assert form["tiers"] == {"hot": {"bytes": GIB, "tokens": GIB // 786_432 * 64}}


# explain


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "gemma-3-12b", "Qwen3.5-27B", "DeepSeek-V3", "gpt-oss-20b"])
def test_every_term_is_explained_with_its_source(name):
    deployment = planned(name).deployment
    explained = terms(deployment, 8192, 2)
    names = [term.name for term in explained]
    assert {"weights", "KV, growing", "allocation", "prefill transient", "runtime share", "total"} <= set(names)
    assert {"GPU limit", "largest buffer", "left for the system", "prefill, linear", "prefill, quadratic"} <= set(names)
    assert all(term.source or term.name == "total" for term in explained)
    assert ("KV, windows" in names) == bool(deployment.model.trace.window_tokens)
    assert ("state" in names) == bool(deployment.model.trace.fixed_bytes)


# advice


def advice(name, tokens, bits=4, **settings):
    weights = WeightSpec(bits) if bits else None
    answer = plan(name, weights=weights, contexts=[tokens], machine=described_machine(), **settings)
    assert answer.verdict == "does not fit"
    return answer.advice


@cache
def traced(name, bits, kv_bits=None):
    weights = WeightSpec(bits) if bits else None
    return trace_model(find_source(name), weights=weights, kv_bits=kv_bits, quick=True)


def fits_with(name, tokens, sentence, *, bits=4, sequences=1, hot_bytes=0):
    """Whether it fits once what a sentence says is changed."""
    machine, step, kv_bits = described_machine(), 2048, None
    words = sentence.split(":")[0].split()
    for option, value in pairwise(words):
        match option:
            case "--prefill-step":
                step = int(value)
            case "--kv-bits":
                kv_bits = int(value)
            case "--weights":
                bits = int(value)
            case "--sequences":
                sequences = int(value)
            case "--context":
                tokens = int(value)
            case "--ram":
                machine = described_machine(memory_bytes=int(value.removesuffix("GB")) * GIB)
            case "--hot":
                hot_bytes = int(value.removesuffix("MiB")) * MIB
            case "sysctl":
                machine = with_wired_limit(machine, int(value.removeprefix("iogpu.wired_limit_mb=")) * MIB)
    return Deployment(
        traced(name, bits, kv_bits), machine, prefill_step_tokens=step, hot_bytes=hot_bytes
    ).fits(tokens, sequences)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tokens", "settings", "first"),
    [
        ("Qwen3.5-9B", 200_000, {}, "--prefill-step"),
        ("Llama-3.1-8B", 100_000, {}, "sudo sysctl iogpu.wired_limit_mb="),
        ("Llama-3.1-8B", 32_768, {"sequences": 8}, "--sequences 2"),
        ("Qwen3-32B", 8192, {}, "--weights 3"),
        ("Llama-3.1-8B", 65_536, {"hot_bytes": 5 * GIB}, "--hot"),
        ("Qwen3.5-27B", 32_768, {}, "--prefill-step 512 and sudo sysctl"),
        ("Llama-3.1-8B", 131_072, {}, "--prefill-step 512 --kv-bits 4"),
        ("Qwen3.5-27B", 4096, {"bits": None}, "--weights 4"),
        ("Qwen2.5-72B-Instruct", 4096, {}, "--ram 64GB"),
    ],
)
def test_each_thing_that_is_advised_makes_it_fit(name, tokens, settings, first):
    sentences = advice(name, tokens, **settings)
    assert any(sentence.startswith(first) for sentence in sentences)
    for sentence in sentences:
        assert fits_with(name, tokens, sentence, **settings), sentence


def test_the_sysctl_line_comes_with_its_warning_and_leaves_the_system_its_share():
    sentence = next(s for s in advice("Llama-3.1-8B", 100_000) if "sysctl" in s)
    assert "Warning: only" in sentence
    limit = int(sentence.split("=")[1].split(":")[0]) * 2**20
    assert limit <= 24 * GIB - described_machine().system_bytes


def test_beyond_the_model_s_maximum_no_setting_is_advised():
    assert advice("Qwen3-8B", 100_000) == (
        "The model reads at most 40,960 tokens, whatever the memory; ask for that or take another model.",
    )


def test_what_no_mac_holds_is_said():
    assert advice("Kimi-K2", 4096)[-1].startswith("No Mac in the table runs it as it is, not even one of 512 GB")


def test_what_fits_needs_no_advice():
    assert planned("Llama-3.2-1B").at(4096).verdict == "fits"
    assert plan("Llama-3.2-1B", contexts=[4096], machine=described_machine()).advice == ()


# plot


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_picture_is_drawn(suffix, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"memory.{suffix}"
    plot(planned("Qwen3.5-27B"), file)
    head = file.read_bytes()
    assert b"<svg" in head if suffix == "svg" else head.startswith(b"\x89PNG")


def test_without_matplotlib_the_hint_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"--plot needs matplotlib; run `.+ -m pip install 'mlxkv\[plot\]'`"):
        plot(planned("Llama-3.2-1B"), tmp_path / "memory.svg")


# cost


def test_a_trace_of_671_billion_parameters_takes_little():
    code = """
import resource, sys, time
from mlxkv.budget import plan
started = time.monotonic()
answer = plan("DeepSeek-V3", contexts=[4096])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(answer.weights.params, time.monotonic() - started, peak)
print([name for name in ("mlx_lm", "transformers", "huggingface_hub", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    figures, imported = done.stdout.splitlines()
    params, seconds, peak = map(float, figures.split())
    assert params == 671_026_419_200
    assert seconds < 10
    assert peak < GIB
    assert imported == "[]"


def test_a_source_can_be_given_instead_of_a_name():
    source = find_source("Qwen2.5-0.5B-Instruct")
    assert plan(source, contexts=[4096]).model == "Qwen2.5-0.5B-Instruct"
