"""`mlxkv chat`: replies on stdout, what was reused on stderr, and a conversation that survives Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import fields

import pytest
from failing import OUT_OF_MEMORY, Device
from talking import save_talking_model

from mlxkv.cache.block_log import RequestEvent
from mlxkv.core.errors import ModelNotFoundError
from mlxkv.models.gguf import find_demo_gguf
from mlxkv_cli.docs import JSON_FIELDS
from mlxkv_cli.main import run
from mlxkv_cli.output import Output

QUESTION = "Which way to the old harbour, and how long is the walk from the station at this time of day?"
MLXKV = [sys.executable, "-m", "mlxkv_cli.main"]
LINE = re.compile(r"prompt [\d,]+ = hot (\d+) \+ cold (\d+) \+ computed (\d+)[^\n]*; first token [^\n]+\n")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_talking_model(tmp_path_factory.mktemp("models") / "talking"))


@pytest.fixture
def options(tmp_path):
    return ["--cache-dir", str(tmp_path / "blocks"), "--max-tokens", "12"]


@pytest.fixture
def ask(capsys, model, options):
    """Asks one thing with --json, in a process that has nothing in memory of the time before."""

    def asker(text, *more):
        code = run(["chat", model, "--prompt", text, "--json", *options, *more])
        out, err = capsys.readouterr()
        assert code == 0, err
        assert out.count("\n") == 1
        return json.loads(out)

    return asker


def test_json_is_the_text_and_the_fields_of_the_request_event(ask, model):
    found = ask(QUESTION)
    assert found.keys() == JSON_FIELDS["chat"].keys()
    assert found["text"]
    assert found["request"].keys() == {field.name for field in fields(RequestEvent)} - {
        "outline",
        "text",
    }  # without a log
    assert found["request"]["event"] == "request"
    assert found["request"]["model"] == os.path.basename(model)
    assert found["request"]["reason"] == "never seen"
    assert (found["request"]["hot_tokens"], found["request"]["cold_tokens"]) == (0, 0)


def test_the_log_has_an_outline_of_each_prompt_and_its_text_only_when_asked(ask, tmp_path):
    written = []
    for options in ([], ["--log-text"]):
        ask(QUESTION, "--system", "Be brief.", "--log", str(tmp_path / f"log{len(options)}"), *options)
        lines = (tmp_path / f"log{len(options)}").read_text(encoding="utf-8").splitlines()
        written.append([line for line in map(json.loads, lines) if line["event"] == "request"])
    assert [[part["role"] for part in line["outline"]["parts"]] for line in written[0]] == [
        ["system", "user", "end", "reply"]
    ]
    assert written[0][0]["outline"]["parts"][-1]["end"] == (
        written[0][0]["prompt_tokens"] + written[0][0]["output_tokens"]
    )
    assert "text" not in written[0][0]
    assert QUESTION in written[1][0]["text"]


def test_the_next_process_finds_the_prompt_on_the_ssd(ask):
    first, second = ask(QUESTION), ask(QUESTION)
    tokens = first["request"]["prompt_tokens"]
    assert second["request"]["cold_tokens"] == (tokens - 1) // 64 * 64 > 0
    assert second["request"]["computed_tokens"] == tokens - second["request"]["cold_tokens"]
    assert first["text"] == second["text"]


def test_for_a_person_the_reply_is_on_stdout_and_the_rest_on_stderr(ask, capsys, model, options):
    text = ask(QUESTION)["text"]
    assert run(["chat", model, "--prompt", QUESTION, *options]) == 0
    out, err = capsys.readouterr()
    assert out == text + "\n"
    assert err.startswith(f"mlxkv: loading {model} ...\n")
    assert LINE.search(err)
    assert err.count("\n") == 2


def test_a_system_message_comes_before_the_prompt(ask):
    plain, told = ask("Hi."), ask("Hi.", "--system", "Be brief.")
    assert told["request"]["prompt_tokens"] == plain["request"]["prompt_tokens"] + len("Be brief.") + 2


def test_a_seed_repeats_a_sampled_reply(ask):
    said = [ask(QUESTION, "--temp", "1.5", "--top-p", "0.95", "--seed", seed)["text"] for seed in ("1", "1", "2")]
    assert said[0] == said[1] != said[2]


def test_no_cold_writes_no_file(ask, tmp_path):
    ask(QUESTION, "--no-cold")
    assert list(tmp_path.iterdir()) == []


def test_the_log_has_the_request_and_never_its_text(ask, tmp_path):
    found = ask(QUESTION, "--log", str(tmp_path / "log.jsonl"))
    log = (tmp_path / "log.jsonl").read_text()
    events = [json.loads(line) for line in log.splitlines()]
    assert {"open", "commit", "offload", "request", "close"} <= {event["event"] for event in events}
    (request,) = [event for event in events if event["event"] == "request"]
    assert found["request"].items() <= request.items()
    assert "harbour" not in log


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/at/all", "--prompt", "Hi."], "no model 'nowhere/at/all' here"),
        (["MODEL", "--prompt", " "], "--prompt is empty"),
        (["MODEL", "--json"], "--json needs --prompt"),
        (["MODEL", "--prompt", "Hi.", "--max-tokens", "0"], "max tokens is 0"),
        (["MODEL", "--prompt", "Hi.", "--max-tokens", "-1"], "max tokens is -1"),
        (["MODEL", "--prompt", "Hi.", "--temp", "nan"], "temperature is nan"),
        (["MODEL", "--prompt", "Hi.", "--top-p", "2"], "top-p is 2.0"),
        (["MODEL", "--prompt", "Hi.", "--hot", "8"], "write 8GiB"),
        (["MODEL", "--prompt", "~"], "tildes are not allowed"),
        ([], "Missing argument"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(capsys, model, options, arguments, said):
    assert run(["chat", *options, *(model if argument == "MODEL" else argument for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (sentence,) = [line for line in err.splitlines() if not line.startswith("mlxkv: loading ")]
    assert sentence.startswith("mlxkv: ")
    assert said in sentence


def test_a_prompt_longer_than_the_context_is_wrong_usage_with_both_numbers(capsys, options, tmp_path):
    model = save_talking_model(tmp_path / "small", max_position_embeddings=50)
    assert run(["chat", str(model), "--prompt", QUESTION, *options]) == 2
    assert f"the conversation has {len(QUESTION) + 3} tokens and the model's context is 50;" in capsys.readouterr().err


def test_a_directory_that_is_incomplete_is_an_error_that_names_what_lacks(capsys, tmp_path, options):
    (tmp_path / "empty").mkdir()
    assert run(["chat", str(tmp_path / "empty"), "--prompt", "Hi.", *options]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_cache_directory_that_cannot_be_used_is_a_warning_and_the_reply_comes(capsys, model, tmp_path):
    (tmp_path / "file").write_text("")
    code = run(["chat", model, "--prompt", "Hi.", "--max-tokens", "4", "--cache-dir", str(tmp_path / "file")])
    out, err = capsys.readouterr()
    assert code == 0
    assert out.strip()
    assert err.count("mlxkv: warning: cold tier: cannot use ") == 1
    assert "going on in memory" in err


def test_a_device_that_fails_is_one_sentence_and_the_next_question_is_answered(
    capsys, model, options, tmp_path, monkeypatch
):
    device = Device(monkeypatch)
    device.arm(threading.get_ident(), 8, said=OUT_OF_MEMORY)
    assert run(["chat", model, "--prompt", QUESTION, *options]) == 1
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("mlxkv: the GPU ran out of memory (")
    assert sentence.endswith("give the hot tier less (hot= in Python, --hot), or shorten the prompt.")

    asked = iter([QUESTION, QUESTION])
    monkeypatch.setattr("builtins.input", lambda _: next(asked, None) or _end_of_input())
    monkeypatch.setattr(Output, "interactive", True)
    device.arm(threading.get_ident(), 8, said=OUT_OF_MEMORY)
    assert run(["chat", model, "--cache-dir", str(tmp_path / "other"), "--max-tokens", "12"]) == 0
    err = capsys.readouterr().err
    assert err.count("the GPU ran out of memory") == 1
    assert len(LINE.findall(err)) == 1, "the second question has its reply"


def _end_of_input():
    raise EOFError


def environment(tmp_path, **changes):
    """A home of its own, and whatever BLAS the machine has: a real model is slow without."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXKV_")}
    return {**kept, "XDG_CACHE_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), **changes}


def test_a_conversation_from_a_pipe_reuses_every_turn_before(model, tmp_path):
    done = subprocess.run(
        [*MLXKV, "chat", model, "--max-tokens", "20"],
        input=f"{QUESTION}\n\nAnd back?\n",
        env=environment(tmp_path, MLXKV_CACHE_DIR=str(tmp_path / "blocks"), MLXKV_HOT="64MiB"),
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = (tuple(map(int, match.groups())) for match in LINE.finditer(done.stderr))
    assert first[:2] == (0, 0)
    assert sum(second[:2]) >= first[2]  # the first prompt at least, whichever tier it is in by now
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "blocks").rglob("*.safetensors"))


def test_ctrl_c_stops_a_reply_and_keeps_the_conversation(model, tmp_path):
    with subprocess.Popen(
        [*MLXKV, "chat", model, "--max-tokens", "1500"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
    ) as process:
        process.stdin.write(f"{QUESTION}\n".encode())
        process.stdin.flush()
        process.stdout.read(20)  # the reply has begun, and would take a second or more
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(b"And back?\n")
    err = err.decode()
    assert process.returncode == 0, err
    assert err.count("[stopped]") == 1
    first, second = (tuple(map(int, match.groups())) for match in LINE.finditer(err.split("[stopped]")[1]))
    assert sum(second[:2]) >= first[2]
    assert "Traceback" not in err


def test_the_demo_model_knows_the_capital_of_france(tmp_path):
    try:
        find_demo_gguf()
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    question = "What is the capital of France? Answer briefly."
    done = subprocess.run(
        [*MLXKV, "chat", "smollm2-135m", "--prompt", question, "--max-tokens", "8", "--json"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["text"] == "The capital of France is Paris."
    assert found["request"]["model"] == "smollm2-135m"
    assert list((tmp_path / "home" / "mlxkv" / "blocks").rglob("*.safetensors")) == []  # shorter than a block
