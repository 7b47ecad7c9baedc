"""`mlxkv lint`: exit code 1 under the least share, and no weights are read."""

import json

import pytest
from talking import plain_tokenizer

from mlxkv_cli.docs import JSON_FIELDS
from mlxkv_cli.main import run

RULES = "You are a careful guide to the old harbour. Answer in one sentence. " * 3


def body(system, *turns):
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": [{"role": "system", "content": system}, *said]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a tokenizer and a config, and no weights."""
    directory = tmp_path_factory.mktemp("model")
    plain_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    return str(directory)


@pytest.fixture
def chats(tmp_path):
    def write(*bodies):
        path = tmp_path / f"chats{len(bodies)}.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in bodies), encoding="utf-8")
        return str(path)

    return write


GROWING = [body(RULES, *["Which way?", "Left.", "And back?", "Right.", "Thanks."][:count]) for count in (1, 3, 5)]
CLOCKS = [body(f"It is 09:1{i}. {RULES}", "Which way?") for i in range(3)]


def test_a_clean_conversation_passes_and_a_clock_does_not(model, chats, capsys):
    assert run(["lint", chats(*GROWING), "--model", model, "--min", "0.8"]) == 0
    assert "0 prefixes broke" in capsys.readouterr().out
    assert run(["lint", chats(*CLOCKS), "--model", model, "--min", "0.8"]) == 1
    out, err = capsys.readouterr()
    assert "date or counter" in out
    assert "--min asks for 80.0%" in err


def test_json_has_the_documented_fields_and_words_only_when_asked(model, chats, capsys):
    path = chats(*CLOCKS)
    assert run(["lint", path, "--model", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {*JSON_FIELDS["lint"], "reusable_tokens", "broken"}
    assert [turn["broken"] for turn in found["turns"]] == [False, True, True]
    assert "words" not in found["turns"][1]
    assert run(["lint", path, "--model", model, "--json", "--text"]) == 0
    assert json.loads(capsys.readouterr().out)["turns"][1]["words"][1].startswith("1. You")


def test_what_cannot_be_read_is_an_error_with_a_next_step(model, chats, capsys, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe{")
    for path, said in (
        (chats({"messages": []}), "line 1"), (chats(), "no request bodies"), (str(tmp_path / "none"), "no file"),
        (str(tmp_path / "binary"), "not UTF-8"),
    ):  # fmt: skip
        assert run(["lint", path, "--model", model]) == 2
        assert said in capsys.readouterr().err
