"""Weights of a model's heads: those that the layer's own queries and keys give, and what is made of them."""

import base64
import json
import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from kinds import CONFIGS, build
from mlx_lm.models import llama
from talking import talking_model
from tiny import build_tiny, tiny_gemma3, tiny_llama

from mlxkv.core.errors import ModelError, UsageError
from mlxkv.explain.heads import HeadWeights, head_weights, rank
from mlxkv.explain.page import attention_page
from mlxkv.models.loader import LoadedModel

TEXT = "A cat it is."


@pytest.fixture(scope="module")
def talking():
    return talking_model()


@pytest.fixture(scope="module")
def found(talking):
    return head_weights(talking, TEXT)


def layer_weights(model, tokens, number):
    """The weights of a llama layer, from its own projections, in NumPy."""
    h = model.model.embed_tokens(mx.array(tokens)[None])
    for layer in model.model.layers[:number]:
        h = layer(h, "causal")
    layer = model.model.layers[number].self_attn
    x = model.model.layers[number].input_layernorm(h)
    q, k = (part(x).reshape(1, len(tokens), -1, 16).transpose(0, 2, 1, 3) for part in (layer.q_proj, layer.k_proj))
    q, k = np.array(layer.rope(q))[0], np.repeat(np.array(layer.rope(k))[0], 2, axis=0)
    scores = np.einsum("hld,hsd->hls", q, k) / 4 + np.triu(np.full((len(tokens),) * 2, -np.inf), 1)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def test_they_are_the_softmax_of_the_layers_own_queries_and_keys(talking, found):
    tokens = talking.tokenizer.encode(TEXT)
    assert found.weights.shape == (4, 4, len(tokens), len(tokens))
    for number in (0, 3):
        assert np.abs(found.weights[number] - layer_weights(talking.module, tokens, number)).max() < 1e-5


def test_every_row_sums_to_one_and_sees_nothing_ahead(found):
    assert np.allclose(found.weights.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(found.weights, 1).any()


def test_the_model_attends_as_before_afterwards(talking):
    before = llama.scaled_dot_product_attention
    logits = talking.module(mx.array([[7, 8, 9]]))
    head_weights(talking, TEXT)
    assert llama.scaled_dot_product_attention is before
    assert mx.array_equal(talking.module(mx.array([[7, 8, 9]])), logits)


def test_a_row_does_not_depend_on_what_follows(talking, found):
    other = head_weights(talking, TEXT[:-3] + "was")
    seen = len(TEXT) - 3
    assert np.abs(found.weights[:, :, :seen, :seen] - other.weights[:, :, :seen, :seen]).max() < 1e-6


def test_pieces_make_up_the_text_and_belong_to_words(found):
    assert "".join(found.pieces) == TEXT
    assert found.words == ("A", "cat", "it", "is", ".")
    assert [found.words[i] for i in found.word_of if i >= 0] == ["A", *["cat"] * 3, *["it"] * 2, *["is"] * 2, "."]


class ByteTokenizer:
    """A byte a token, as byte-level BPE has where nothing merges; but "?!" and "中国" are one."""

    MERGED = (b"?!", "中国".encode())

    def encode(self, text):
        pieces = re.findall(b"|".join(re.escape(piece) for piece in self.MERGED) + b"|.", text.encode(), re.DOTALL)
        return [self.MERGED.index(piece) if piece in self.MERGED else piece[0] for piece in pieces]

    def decode(self, tokens):
        return b"".join(self.MERGED[token] if token < len(self.MERGED) else bytes([token]) for token in tokens).decode(
            errors="replace"
        )


@pytest.fixture(scope="module")
def bytewise():
    config = {**tiny_llama(), "vocab_size": 256}
    return LoadedModel("bytes", build_tiny(config), ByteTokenizer(), config, {}, None)


def test_a_character_of_several_tokens_keeps_its_letter(bytewise):
    found = head_weights(bytewise, "猫 é")
    assert found.pieces == ("", "", "猫", " ", "", "é")
    assert found.words == ("猫", "é")
    assert found.word_of == (0, 0, 0, -1, 1, 1)
    assert rank(found, "é").token == 5


def test_chinese_characters_are_words(bytewise):
    found = head_weights(bytewise, "猫追鼠, it's中国人")
    assert found.words == ("猫", "追", "鼠", ",", "it's", "中国", "人")
    assert rank(found, "追").token == 5
    assert sum(word.mean for word in rank(found, "鼠").words) == pytest.approx(1, abs=1e-5)


def test_marks_in_one_token_are_one_word(bytewise):
    found = head_weights(bytewise, "a?! b!")
    assert found.words == ("a", "?!", "b", "!")
    assert (rank(found, "?!").token, rank(found, "!").token) == (1, 4)
    with pytest.raises(UsageError, match=r"no word '\?'; its words are a \?! b !"):
        rank(found, "?")


def test_one_head_a_layer_or_all_can_be_chosen(found):
    assert np.array_equal(found.of(2, 1), found.weights[2, 1])
    assert np.allclose(found.of(2, None), found.weights[2].mean(axis=0))
    assert np.allclose(found.of(None, 1), found.weights[:, 1].mean(axis=0))
    assert np.allclose(found.of(None, None), found.weights.mean(axis=(0, 1)))
    for layer, head, said in ((4, None, "no layer 4"), (None, -1, "no head -1")):
        with pytest.raises(UsageError, match=said):
            found.of(layer, head)


def made(rows):
    """Two layers of two heads over "The cat sat it", four tokens."""
    weights = np.zeros((2, 2, 4, 4), np.float32)
    weights[..., 0] = 1
    weights[:, :, 3, :] = np.array(rows, np.float32).reshape(2, 2, 4)
    words = ("The", "cat", "sat", "it")
    return HeadWeights("m", "The cat sat it", ("The", " cat", " sat", " it"), words, (0, 1, 2, 3), weights)


def test_words_are_ranked_by_their_mean_over_all_heads():
    ranking = rank(made([[0.7, 0.1, 0.1, 0.1], [0.1, 0.8, 0.1, 0], [0.6, 0.2, 0.1, 0.1], [0.5, 0.2, 0.2, 0.1]]), "IT")
    assert (ranking.word, ranking.token, ranking.heads, ranking.after) == ("it", 3, 4, ())
    assert [word.word for word in ranking.words] == ["The", "cat", "sat", "it"]
    cat = ranking.words[1]
    assert (cat.layer, cat.head, cat.top_heads) == (0, 1, 1)
    assert (cat.mean, cat.most) == (pytest.approx(0.325), pytest.approx(0.8))
    assert ranking.words[0].top_heads == 3
    assert sum(word.mean for word in ranking.words) == pytest.approx(1)


def test_a_word_of_several_tokens_has_the_sum_of_their_weights(found):
    ranking = rank(found, "it")
    last = max(i for i, word in enumerate(found.word_of) if word == ranking.place)
    expected = found.weights[:, :, last, 2:5].sum(axis=-1).mean()
    assert next(word.mean for word in ranking.words if word.word == "cat") == pytest.approx(expected)
    assert ranking.after == ("is", ".")


def test_the_last_of_several_occurrences_counts(talking):
    twice = head_weights(talking, "it is it so")
    ranking = rank(twice, "it")
    assert (ranking.place, ranking.token, ranking.after) == (2, 7, ("so",))


def test_what_cannot_be_shown_is_said(talking, found):
    with pytest.raises(UsageError, match="no word 'dog'; its words are A cat it is"):
        rank(found, "dog")
    with pytest.raises(UsageError, match="no text"):
        head_weights(talking, "  ")
    with pytest.raises(UsageError, match="not UTF-8"):
        head_weights(talking, "a\udcff")
    with pytest.raises(UsageError, match="129 tokens"):
        head_weights(talking, "a" * 129)


def test_an_architecture_that_hides_its_weights_is_named(talking):
    module = build(CONFIGS["gemma2"])
    hidden = LoadedModel("hidden", module, talking.tokenizer, tiny_llama(), {}, None)
    with pytest.raises(ModelError, match=r"hidden \(gemma2\)"):
        head_weights(hidden, "abc")


def test_windows_are_shown_as_they_are(talking):
    model = LoadedModel("windows", build_tiny(tiny_gemma3()), talking.tokenizer, tiny_gemma3(), {}, None)
    weights = head_weights(model, "a" * 60).weights
    assert not np.tril(weights[0], -32).any()
    assert np.tril(weights[1], -32).any()


def test_the_page_holds_everything_and_asks_for_nothing(found):
    page = attention_page(found, layer=1, head=2, token=5)
    assert "http" not in page.replace("http-equiv", "")
    assert "@@" not in page
    assert f">{round(100 * float(found.weights[1, 2, 4, 0]))}</td>" in page


def test_the_page_holds_weights_to_a_tenth_of_a_percent():
    weights = made([[0.998, 0.001, 0.0006, 0.0004]] * 4)
    page = attention_page(weights, layer=None, head=None, token=3)
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    whole = int(re.search(r"return sum / (\d+)", page)[1])
    held = np.frombuffer(base64.b64decode(data["weights"]), "<u2").reshape(2, 2, 4, 4) / whole
    assert np.abs(held - weights.weights).max() < 1e-5


def test_text_cannot_become_part_of_the_page(talking):
    hostile = head_weights(talking, "</script><script>alert(1)</script> @@model &amp;")
    hostile = replace(hostile, pieces=("</script><script>alert(1)</script>", *hostile.pieces[1:]))
    page = attention_page(hostile, layer=None, head=None, token=0)
    assert "<script>alert" not in page
    assert page.count("</script>") == 2
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page
    assert "@@model &amp;amp;" in page
