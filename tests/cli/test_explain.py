"""`mlxkv explain` as a user meets it."""

import io
import json
import re

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from talking import save_talking_model
from tiny import tiny_mamba2

from mlxkv.explain.heads import HeadWeights
from mlxkv_cli.explain_page import heads_page
from mlxkv_cli.main import run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_talking_model(tmp_path_factory.mktemp("models") / "talking"))


def page(capsys, *arguments, code=0):
    assert run(["explain", *arguments]) == code
    return capsys.readouterr().out


def answer(capsys, *arguments):
    return json.loads(page(capsys, *arguments, "--json"))


def widest(text):
    return max(cell_len(line.rstrip()) for line in text.splitlines())


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("number", ["1", "2", "3", "4"])
def test_every_lab_fits_the_terminal(number, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = page(capsys, "lab", number)
    assert widest(shown) <= columns
    assert "What it does not show" in shown
    assert "\x1b" not in shown


def test_a_lab_prints_the_documents_digits(capsys):
    shown = page(capsys, "lab", "4")
    for digits in ("-1.3670", "4.2336", "0.9025", "1.31085939", "-0.05573854"):
        assert digits in shown
    assert answer(capsys, "lab", "1")["grids"][0]["title"] == "weights: row attends to column"


def test_a_lab_that_is_not_there_is_wrong_usage(capsys):
    assert run(["explain", "lab", "5"]) == 2
    assert "choose one of 1, 2, 3, 4" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("name", ["Qwen2.5-0.5B-Instruct", "gemma-3-27b", "Qwen3-Next-80B-A3B", "DeepSeek-V3"])
def test_shapes_fit_the_terminal(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    bill = page(capsys, "shapes", name).partition("Prefill of the context")[2]
    assert widest(bill) <= columns
    assert "131,072" in bill


def test_shapes_say_what_grows_and_how(capsys):
    shown = page(capsys, "shapes", "Qwen2.5-0.5B-Instruct", "--tokens", "2k")
    assert "1 x 14 x 2,048 x 2,048" in shown
    assert "with n x n" in shown
    assert "QK^T and AV grow 4.00 times" in shown
    assert "16,384 tokens is the first where attention is more than half of a prefill" in " ".join(shown.split())
    assert "24 layers x 2 KV heads x (64 + 64) x 2 B = 12,288 B a token" in shown
    found = answer(capsys, "shapes", "Qwen2.5-0.5B-Instruct")
    assert (found["tokens"], found["bytes_per_token"], len(found["bills"])) == (1024, 12_288, 8)


def test_shapes_of_a_model_without_attention(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_mamba2()))
    shown = page(capsys, "shapes", str(tmp_path))
    assert "This model has no attention: everything grows with n." in shown
    assert "scores" not in shown


@pytest.mark.parametrize("columns", [60, 80])
def test_attention_draws_a_map_that_fits(columns, model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = page(capsys, "attention", model, "A cat it is.", "--from", "it")
    assert widest(shown) <= columns
    assert 'What "it" attends to, over all 16 heads' in shown
    assert '"it" cannot see what follows it (is .)' in " ".join(shown.split())
    assert "A weight is no reason" in shown


def test_a_longer_text_is_drawn_in_shades_and_a_long_one_is_not(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shades = page(capsys, "attention", model, "abcdefghij" * 4)
    assert widest(shades) <= 60
    assert "--html" not in shades
    long = " ".join(page(capsys, "attention", model, "ab" * 40).split())
    assert "80 tokens are too wide for this terminal; --html FILE shows the map." in long


def test_what_is_not_in_the_list_of_words_is_said(model, capsys):
    shown = page(capsys, "attention", model, "a b c d e f g h i j k l m", "--from", "m")
    list_of, _, said = shown.partition("strongest head")[2].partition("3 more")
    listed = sum(float(share) for share in re.findall(r"^\w +([\d.]+)%", list_of, re.MULTILINE))
    further = float(re.search(r" words have ([\d.]+)%", said)[1])
    blank = float(re.search(r"The other ([\d.]+)% are on blanks", said)[1])
    assert blank > 0
    assert listed + further + blank == pytest.approx(100, abs=0.7)
    assert "1 token," in page(capsys, "attention", model, "a")


def test_numbers_of_a_map_never_run_together():
    weights = np.eye(12, dtype=np.float32)[None, None]
    names = tuple("abcdefghijkl")
    found = HeadWeights("m", "".join(names), names, names, tuple(range(12)), weights)
    for width in (40, 50, 60):
        out = io.StringIO()
        Console(file=out, width=width).print(heads_page(found, None, None, None, width))
        assert widest(out.getvalue()) <= width
        assert "0100" not in out.getvalue()


def test_the_answer_as_json_has_the_weights(model, capsys):
    found = answer(capsys, "attention", model, "A cat.", "--layer", "2", "--head", "1", "--from", "cat")
    assert (found["layers"], found["heads"], found["layer"], found["head"]) == (4, 4, 2, 1)
    assert len(found["weights"]) == len(found["pieces"]) == 6
    assert sum(found["weights"][3]) == pytest.approx(1, abs=1e-5)
    assert found["ranking"]["word"] == "cat"


def test_a_page_is_written(model, capsys, tmp_path):
    file = tmp_path / "attention.html"
    page(capsys, "attention", model, "A cat.", "--html", str(file))
    assert file.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layer", "9"], "there is no layer 9; this model has layers 0 to 3"),
        (["--from", "dog"], "the text has no word 'dog'"),
        (["--html", "/nowhere/at/all.html"], "there is no directory /nowhere/at"),
        (["--html", "/"], "/ is a directory"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments, said, model, capsys):
    assert run(["explain", "attention", model, "A cat.", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_control_characters_do_not_reach_the_terminal(model, capsys):
    assert "\x1b" not in page(capsys, "attention", model, "a\x1b[2J b", "--from", "b")
