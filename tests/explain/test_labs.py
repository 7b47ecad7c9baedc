"""The labs print the numbers of the documents they come from, to the printed digit."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from mlxkv.core.errors import UsageError
from mlxkv.explain.labs import LABS, lab

PRINTED = json.loads((Path(__file__).parents[1] / "data" / "labs.json").read_text(encoding="utf-8"))


def grid(number, title):
    return next(grid for grid in lab(number).grids if grid.title.startswith(title))


def rounded(values, digits):
    return np.round(np.array(values), digits).tolist()


def test_lab_1_prints_the_document():
    printed = PRINTED["lab1"]
    weights, outputs = grid(1, "weights"), grid(1, "outputs")
    assert list(weights.rows) == printed["tokens"]
    assert rounded(weights.values, 2) == list(printed["weights_2dp"].values())
    assert rounded(outputs.values, 2) == list(printed["outputs_2dp"].values())


@pytest.mark.parametrize("head", [0, 1])
def test_lab_2_prints_whom_each_word_attends_to(head):
    shown = grid(2, f"head {head}: whom")
    expected = PRINTED["lab2"]["top_attention_2dp"][f"head{head}"]
    assert list(shown.rows) == [f"{word} → {top}" for word, (top, _) in expected.items()]
    assert rounded(shown.values, 2) == [[weight] for _, weight in expected.values()]


def test_lab_2_prints_the_first_three_components():
    expected = PRINTED["lab2"]["first_three_components_2dp"]
    assert rounded(grid(2, "output").values, 2) == list(expected.values())


def test_lab_3_prints_output_weights_and_mask():
    printed = PRINTED["lab3"]
    assert rounded(grid(3, "output").values, 6) == printed["output_6dp"]
    assert rounded(grid(3, "weights, no mask").values, 6) == printed["weights_6dp"]
    assert rounded(grid(3, "causal mask").values, 0) == printed["causal_mask_1_is_hidden"]
    assert "output shape (5, 8)" in lab(3).recipe


def test_lab_4_prints_scores_weights_and_context():
    printed = PRINTED["lab4"]
    assert list(grid(4, "scores").columns) == printed["tokens"]
    assert rounded(grid(4, "scores").values, 4) == [printed["scores_4dp"]]
    assert rounded(grid(4, "weights").values, 4) == [printed["weights_4dp"]]
    assert rounded(grid(4, "context").values, 8) == [printed["context_8dp"]]


@pytest.mark.parametrize("number", LABS)
def test_every_row_of_weights_sums_to_one(number):
    for shown in lab(number).grids:
        if shown.heat:
            assert np.allclose(np.sum(shown.values, axis=1), 1, atol=1e-12)


@pytest.mark.parametrize("number", LABS)
def test_every_lab_says_what_it_shows_and_what_it_does_not(number):
    found = lab(number)
    assert found.number == number
    assert len(found.shows) >= 2
    assert len(found.hides) >= 2


def test_permuting_the_words_permutes_the_outputs_and_nothing_else():
    said = lab(1).shows[2]
    assert float(re.search(r"largest difference (\S+):", said)[1]) < 1e-12
    assert '"A hits B" equals "B hits A"' in said


def test_lab_2_says_that_positions_are_added_and_projections_random():
    said = " ".join(lab(2).hides)
    assert "additive" in said
    assert "RoPE" in said
    assert "not that they do" in said
    assert np.abs(np.array(grid(2, "output").values)).max() < 2.5


def test_behind_the_mask_nothing_is_seen_ahead():
    assert np.array_equal(np.triu(np.array(grid(3, "weights behind").values), 1), np.zeros((5, 5)))


def test_the_labs_leave_the_global_random_state_alone():
    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1), np.random.seed(1)
    for number in LABS:
        lab(number)
    assert (random.random(), np.random.rand()) == expected


def test_there_is_no_fifth_lab():
    with pytest.raises(UsageError, match="choose one of 1, 2, 3, 4"):
        lab(5)
