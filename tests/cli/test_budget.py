"""`mlxkv budget` as a user meets it: the page, the JSON, the exit codes, and every way to ask for what cannot be."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest
from tiny import tiny_llama

from mlxkv.core.units import GIB
from mlxkv_cli.main import run

QWEN = "Qwen2.5-0.5B-Instruct"
off_a_mac = pytest.mark.skipif(mx.metal.is_available(), reason="a Mac answers for itself")


def answer(capsys, *arguments, code=0):
    assert run(["budget", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def page(capsys, *arguments, code=0):
    assert run(["budget", *arguments]) == code
    return capsys.readouterr().out


# the answer


def test_the_page_says_what_a_token_and_a_block_cost(capsys):
    shown = page(capsys, QWEN, "--ram", "24GB")
    assert "12 KiB a token, 768 KiB (786,432 B) a block of 64 tokens" in shown
    assert "Longest context that fits: 32,768 tokens" in shown
    assert "0.05" in shown
    assert "0.38" in shown


PAGES = [
    [QWEN],
    ["Qwen3.5-27B", "--weights", "4", "--hot", "1GiB", "--cold", "20GiB", "--explain"],
    ["Kimi-K2", "--context", "4k,128k", "--sequences", "16", "--shared-prefix", "30k", "--explain"],
    ["gemma-3-27b", "--weights", "4", "--ram", "512GB", "--context", "100000"],
    ["compare", QWEN, "DeepSeek-R1-Distill-Llama-8B", "gpt-oss-20b", "--weights", "4"],
]


@pytest.mark.parametrize("arguments", PAGES)
def test_no_digit_is_left_out_on_a_narrow_terminal(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    assert "\N{HORIZONTAL ELLIPSIS}" not in page(capsys, *arguments, "--chip", "M4 Pro")


@pytest.mark.parametrize("arguments", PAGES)
def test_the_page_fits_80_columns_without_colour(arguments, capsys):
    shown = page(capsys, *arguments, "--chip", "M4 Pro")
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert "\x1b" not in shown


@off_a_mac
def test_off_a_mac_the_machine_is_one_of_24_gb(capsys):
    machine = answer(capsys, QWEN)["machine"]
    assert (machine["memory_bytes"], machine["gpu_limit_bytes"]) == (24 * GIB, 19_069_665_280)
    assert answer(capsys, QWEN, "--macos", "15")["machine"]["gpu_limit_bytes"] == 16 * GIB


@pytest.mark.parametrize("size", ["24GB", "24GiB", "24 gb", "25769803776B"])
def test_24_gb_of_memory_are_24_gib(size, capsys):
    assert answer(capsys, QWEN, "--ram", size)["machine"]["memory_bytes"] == 24 * GIB


@pytest.mark.parametrize("limit", ["20480", "20GB", "20GiB"])
def test_a_wired_limit_is_a_size_or_mib(limit, capsys):
    found = answer(capsys, QWEN, "--ram", "24GB", "--wired-limit", limit)["machine"]
    assert found["gpu_limit_bytes"] == 20 * GIB


def test_contexts_are_those_asked_for(capsys):
    found = answer(capsys, QWEN, "--context", "4k,1000,32k", "--sequences", "2")
    assert [row["tokens"] for row in found["contexts"]] == [1000, 4096, 32_768]
    assert {row["sequences"] for row in found["contexts"]} == {2}


def test_a_shared_prefix_is_kept_once(capsys):
    row = answer(capsys, QWEN, "--context", "4k", "--sequences", "8", "--shared-prefix", "3k")["contexts"][0]
    assert row["kv_bytes"] == 12_288 * (3072 + 8 * 1024)


def test_weights_group_and_kv_bits_are_taken(capsys):
    found = answer(capsys, "Llama-3.1-8B", "--weights", "4", "--group", "32", "--kv-bits", "8", "--context", "4k")
    assert found["weights"] == {"bytes": 5_019_279_360, "params": 8_030_261_248, "bits": 4}
    assert found["kv"]["bytes_per_token"] == 69_632
    assert found["kv"]["formula_bytes_per_token"] == 131_072


def test_a_smaller_prefill_step_has_a_smaller_transient(capsys):
    asked = ["Qwen3.5-9B", "--context", "32k", "--prefill-step"]
    large, small = (answer(capsys, *asked, step)["contexts"][0]["transient_bytes"] for step in ("2048", "512"))
    assert large == 4 * small == 2**31


def test_tiers_are_told_in_tokens(capsys):
    shown = page(capsys, QWEN, "--hot", "1GiB", "--cold", "20GiB")
    assert "hot tier  1.00 GiB hold 87,360 tokens of prefixes (1,365 blocks)" in shown
    assert "cold tier 20.00 GiB hold" in shown


def test_the_formula_is_shown_beside_the_trace_where_they_differ(capsys):
    shown = " ".join(page(capsys, "Qwen3.5-27B", "--weights", "4").split())
    assert "oMLX's line would say 16.00 MB for this model: it counts all 64 layers, 16 hold KV." in shown
    assert "oMLX" not in page(capsys, "Qwen3-8B", "--weights", "4", "--ram", "512GB")


def test_explain_prints_every_term_with_its_source(capsys):
    shown = " ".join(page(capsys, "Qwen3.5-9B", "--weights", "4", "--context", "32k", "--explain").split())
    assert "32,768 B x 32,768 tokens" in shown
    assert "16 heads x 2,048 queries x 32,768 keys x 2 B" in shown
    assert "1,500,000,000 B, a constant" in shown
    assert "mlx-lm#1480" in shown


def test_the_limit_that_binds_and_the_fix_are_named(capsys):
    shown = page(capsys, "Qwen3.5-9B", "--weights", "4", "--context", "200k", "--ram", "24GB")
    assert "204,800 tokens: does not fit; the GPU limit binds." in shown
    assert "--prefill-step" in shown


def test_the_cpu_of_this_computer_is_a_machine_too(capsys):
    found = answer(capsys, "SmolLM2-135M", "--weights", "32", "--chip", "cpu", "--context", "2k")
    assert found["machine"]["chip"] == "CPU"
    assert found["machine"]["max_buffer_bytes"] is None
    assert found["contexts"][0]["total_bytes"] == pytest.approx(877_577_524, rel=0.05)  # measured, mx.get_peak_memory()


# exit codes


def test_what_is_required_and_fits_is_exit_code_0(capsys):
    assert answer(capsys, QWEN, "--require", "32k")["contexts"][0]["tokens"] == 32_768


def test_what_is_required_and_does_not_fit_is_exit_code_1_and_still_answered(capsys):
    found = answer(capsys, "Llama-3.1-8B", "--weights", "4", "--ram", "24GB", "--require", "128k", code=1)
    assert found["verdict"] == "does not fit"
    longest = str(found["max_context_tokens"])
    answer(capsys, "Llama-3.1-8B", "--weights", "4", "--ram", "24GB", "--require", longest)
    answer(capsys, "Llama-3.1-8B", "--weights", "4", "--ram", "24GB", "--require", str(int(longest) + 1), code=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Qwen2.5-0.5B-Instrukt"], "did you mean"),
        (["Qwen2.5-0.5B-Instrukt"], QWEN),
        ([QWEN, "--context", "-4096"], "'-4096' is not a number of tokens"),
        ([QWEN, "--context", "0"], "'0' is not a number of tokens"),
        ([QWEN, "--context", "4.5k"], "'4.5k' is not a number of tokens"),
        ([QWEN, "--context", "4k,,8k"], "'' is not a number of tokens"),
        ([QWEN, "--context", "many"], "'many' is not a number of tokens"),
        ([QWEN, "--context", "999999999999"], "context is 999999999999; it must be a whole number from 1 to"),
        ([QWEN, "--require", "0"], "'0' is not a number of tokens"),
        ([QWEN, "--sequences", "0"], "--sequences"),
        ([QWEN, "--sequences", "1.5"], "--sequences"),
        ([QWEN, "--sequences", "100000"], "sequences is 100000"),
        ([QWEN, "--prefill-step", "0"], "--prefill-step"),
        ([QWEN, "--chip", "M9 Ultra"], "no chip 'M9 Ultra' in the tables; did you mean"),
        ([QWEN, "--ram", "0"], "a Mac with 0 B of memory does not exist"),
        ([QWEN, "--ram", "0GB"], "a Mac with 0 B of memory does not exist"),
        ([QWEN, "--ram", "24"], "'24' has no unit"),
        ([QWEN, "--ram", "-8GB"], "is not a size"),
        ([QWEN, "--ram", "lots"], "'lots' is not a size"),
        ([QWEN, "--macos", "20"], "there is no macOS '20'"),
        ([QWEN, "--ram", "24GB", "--wired-limit", "30GB"], "more than the machine's 24.00 GiB"),
        ([QWEN, "--weights", "7"], "weights of 7 bits do not exist"),
        ([QWEN, "--weights", "4", "--group", "48"], "groups of 48 weights"),
        ([QWEN, "--kv-bits", "7"], "KV of 7 bits"),
        (["gemma-3-12b", "--kv-bits", "8"], "mlx-lm cannot quantise this model's KV"),
        ([QWEN, "--plot", "memory.gif"], "a plot is an .svg or .png file"),
        ([QWEN, "--plot", "/no/such/place/memory.svg"], "there is no directory /no/such/place"),
        ([QWEN, "Qwen3-8B"], "mlxkv budget compare Qwen2.5-0.5B-Instruct Qwen3-8B"),
        (["compare", QWEN], "`compare` takes two models or more"),
        (["compare", QWEN, "Qwen3-8B", "--explain"], "about one model"),
        (["./no-such-directory"], "there is no file or directory"),
        (["/no/such/config.json"], "there is no file or directory"),
        ([], "MODEL"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_asked_is_a_sentence_and_exit_code_2(arguments, said, capsys):
    assert run(["budget", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("mlxkv: ")
    assert err.count("\n") == 1


def test_an_unknown_model_gets_three_suggestions(capsys):
    assert run(["budget", "Lama-3.1-8B"]) == 2
    said = capsys.readouterr().err
    assert len(said.split("did you mean ")[1].split("?")[0].split(", ")) == 3
    assert "Llama-3.1-8B" in said


def with_config(directory, config):
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(directory)


def test_null_kv_heads_are_the_attention_heads(tmp_path, capsys):
    found = answer(capsys, with_config(tmp_path, tiny_llama() | {"num_key_value_heads": None}))
    assert found["kv"]["bytes_per_token"] == 4 * 4 * 16 * 2 * 2


def test_a_nested_text_config_is_read(tmp_path, capsys):
    found = answer(capsys, with_config(tmp_path, {"model_type": "llama", "text_config": tiny_llama()}))
    assert found["kv"]["bytes_per_token"] == 4 * 2 * 16 * 2 * 2


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (tiny_llama() | {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        (tiny_llama() | {"num_key_value_heads": "8"}, "num_key_value_heads is '8'"),
        ({"model_type": "llama", "text_config": {"num_key_value_heads": "x"}}, "num_key_value_heads is 'x'"),
        ({key: value for key, value in tiny_llama().items() if key != "vocab_size"}, "lacks the key vocab_size"),
        (tiny_llama() | {"model_type": "lama"}, "did you mean llama"),
        ({}, "has no model_type key"),
        ("[1]", "holds a JSON list"),
        ('{"model_type": "llama",}', "is not JSON"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_config_that_cannot_be_used_is_a_sentence_that_names_the_key(config, said, tmp_path, capsys):
    assert run(["budget", with_config(tmp_path, config)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_a_directory_without_a_config_is_a_sentence(tmp_path, capsys):
    assert run(["budget", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("give a model directory that holds a config.json.\n")


# side by side


def test_models_are_put_side_by_side(capsys):
    shown = page(capsys, "compare", "Llama-3.1-8B", "Qwen3-8B", "--weights", "4", "--context", "32k", "--ram", "24GB")
    assert "Llama-3.1-8B" in shown
    assert "Qwen3-8B" in shown
    found = answer(capsys, "compare", "Llama-3.1-8B", "Qwen3-8B", "--weights", "4", "--context", "32k")
    assert [plan["model"] for plan in found["models"]] == ["Llama-3.1-8B", "Qwen3-8B"]
    assert [plan["contexts"][0]["kv_bytes"] for plan in found["models"]] == [131_072 * 32_768, 147_456 * 32_768]


def test_a_directory_may_be_called_compare(tmp_path, capsys, monkeypatch):
    (tmp_path / "compare").mkdir()
    monkeypatch.chdir(tmp_path)
    with_config(tmp_path / "compare", tiny_llama())
    assert answer(capsys, "./compare")["model"] == "compare"


# picture


def test_the_picture_is_written_and_named(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert run(["budget", QWEN, "--plot", str(tmp_path / "memory.svg")]) == 0
    out, err = capsys.readouterr()
    assert "12 KiB a token" in out
    assert f"wrote {tmp_path / 'memory.svg'}" in err
    assert (tmp_path / "memory.svg").read_text().count("<svg") == 1


# cost

PROCESS = """
import sys, time
from mlxkv_cli.main import run
assert run(["budget", "Qwen2.5-0.5B-Instruct", "--json"]) == 0
heavy = ("mlx_lm", "transformers", "huggingface_hub", "numpy", "matplotlib")
print(time.process_time(), *(name for name in heavy if name in sys.modules), file=sys.stderr)
"""


def test_a_catalog_model_is_answered_within_2_seconds_without_mlx_lm():
    """From the start of the process, which waits for nothing; its own seconds, as other tests may run beside it."""
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True)
    seconds, *imported = done.stderr.split()
    assert float(seconds) < 2
    assert imported == []
    assert json.loads(done.stdout)["kv"]["bytes_per_block"] == 786_432
