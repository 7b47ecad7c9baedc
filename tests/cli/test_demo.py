"""`mlxkv demo` with the real demo model: cold, hot, and from the SSD in a new process."""

import json
import os
import re
import subprocess
import sys

import pytest

from mlxkv.core.errors import ModelNotFoundError
from mlxkv.engine.demo import PROMPT_TOKENS, QUESTION, SLOW_PROMPT_TOKENS, demo_prompt
from mlxkv.models.gguf import find_demo_gguf
from mlxkv.models.loader import DEMO, LoadedModel, tokenizer_of
from mlxkv_cli.docs import JSON_FIELDS

TOKENS = 330
RUN_FIELDS = {"name", "hot_tokens", "cold_tokens", "computed_tokens", "ttft_s", "restored_bytes", "text"}
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4  # layers, keys and values, heads, head_dim, float32


@pytest.fixture(scope="module", autouse=True)
def _installed():
    try:
        find_demo_gguf()
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def demo(home, *options):
    """Run it as a user does, with a home of its own and whatever BLAS the machine has."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXKV_")}
    return subprocess.run(
        [sys.executable, "-m", "mlxkv_cli.main", "demo", *options],
        # One BLAS thread: on a machine that runs other tests too, more of them wait for each other.
        env={**kept, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def found(home):
    """What `mlxkv demo --json` printed, once for all tests here."""
    done = demo(home, "--tokens", str(TOKENS), "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def test_json_has_the_documented_fields(found):
    assert found.keys() == JSON_FIELDS["demo"].keys()
    assert [run["name"] for run in found["runs"]] == ["cold", "hot", "restart"]
    assert all(run.keys() == RUN_FIELDS for run in found["runs"])
    assert (found["block_bytes"], found["block_tokens"]) == (64 * TOKEN_BYTES, 64)
    assert TOKENS - 30 <= found["prompt_tokens"] <= TOKENS + 5


def test_the_three_outputs_are_equal(found):
    assert found["outputs_equal"] is True
    assert len({run["text"] for run in found["runs"]}) == 1
    assert found["runs"][0]["text"].strip()


def test_the_hot_run_reuses_all_but_one_token_and_the_restart_every_full_block(found):
    tokens = found["prompt_tokens"]
    blocks = 64 * ((tokens - 1) // 64)
    parts = [(run["hot_tokens"], run["cold_tokens"], run["computed_tokens"]) for run in found["runs"]]
    assert parts == [(0, 0, tokens), (tokens - 1, 0, 1), (0, blocks, tokens - blocks)]
    assert [run["restored_bytes"] for run in found["runs"]] == [0, (tokens - 1) * TOKEN_BYTES, blocks * TOKEN_BYTES]
    assert all(run["ttft_s"] > 0 for run in found["runs"])


def test_the_files_are_where_it_says_and_the_next_demo_deletes_them(found, home):
    def files():
        return {path.name for path in (home / ".cache" / "mlxkv" / "demo").rglob("*.safetensors")}

    before = files()
    assert found["cache_dir"] == str(home / ".cache" / "mlxkv" / "demo")
    assert len(before) >= found["prompt_tokens"] // 64
    done = demo(home, "--tokens", "150")
    assert done.returncode == 0, done.stderr
    assert not before & files()
    shown = done.stdout.splitlines()
    assert re.fullmatch(r"prompt of 1\d\d tokens, blocks of 64 tokens with 2.81 MiB each", shown[0])
    assert [line.split(":")[0] for line in shown[3:6]] == ["cold", "hot", "restart"]
    assert all(re.search(r"MiB, [\d,]+ MB/s$", line) for line in shown[4:6])
    assert "The three replies are equal: " in done.stdout
    assert found["cache_dir"] in shown[-1]


@pytest.mark.parametrize("wanted", [PROMPT_TOKENS, SLOW_PROMPT_TOKENS, 100])
def test_the_prompt_is_about_as_long_as_wanted_and_ends_in_the_question(wanted):
    tokenizer = tokenizer_of(DEMO)
    prompt = demo_prompt(LoadedModel(DEMO, None, tokenizer, {}, {}, None), wanted)
    assert wanted - 5 <= len(prompt) <= wanted + 5
    assert QUESTION in tokenizer.decode(prompt)
