"""An outline says where each part of a prompt ends and lets two prompts be compared, without a word of either."""

import json
from itertools import pairwise

import pytest
from driving import some_tokens
from hypothesis import given
from hypothesis import strategies as st
from prompts import KEY, TEMPLATE, Asker, common, conversation, tool

from mlxkv.blocklog.outline import BLOCK_DIGITS, MASKED_CHARACTERS, common_blocks, load_key, shared_tokens
from mlxkv.cache.names import BLOCK_TOKENS
from mlxkv.models.gguf import find_demo_gguf
from mlxkv.models.loader import tokenizer_of
from mlxkv.models.pieces import token_pieces

ASK = Asker()
CHAT = conversation("Be exact.", "Where is the key?", "On the hook.", "Which hook?")


def text_of_parts(asked):
    """The text of each part, cut where the outline says."""
    cuts = [0, *(part.end for part in asked.outline.parts)]
    return [ASK.outliner.text(asked.tokens[a:b]) for a, b in pairwise(cuts)]


def test_each_part_ends_with_its_message():
    asked = ASK(CHAT, reply="By the door.")
    assert [(part.role, part.index) for part in asked.outline.parts] == [
        ("system", 0), ("user", 1), ("assistant", 2), ("user", 3), ("end", None), ("reply", None)
    ]  # fmt: skip
    assert text_of_parts(asked) == [
        "<|system|>Be exact.</s>", "<|user|>Where is the key?</s>", "<|assistant|>On the hook.</s>",
        "<|user|>Which hook?</s>", "<|assistant|>", "By the door.",
    ]  # fmt: skip


@pytest.mark.parametrize("short", ["s", "a", "user", "system", "|", "</s"])
def test_a_message_is_found_even_where_its_text_is_part_of_a_mark(short):
    asked = ASK(conversation("Be exact.", short, short, "and?"))
    assert text_of_parts(asked)[1:3] == [f"<|user|>{short}</s>", f"<|assistant|>{short}</s>"]


def test_tools_are_a_part_of_their_own_and_short_messages_are_not_sought_in_them():
    asked = ASK(conversation("Be exact.", "name", "it"), tools=[tool("find", "name"), tool("tide", "day")])
    parts = asked.outline.parts
    assert [part.role for part in parts] == ["tools", "system", "user", "assistant", "end"]
    assert text_of_parts(asked)[0].endswith("}</s>")
    assert text_of_parts(asked)[2] == "<|user|>name</s>"
    assert len(asked.outline.tools) == 2


def test_text_parts_of_a_message_are_its_text():
    listed = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]
    tokens = ASK([{"role": "user", "content": "one two"}]).tokens
    outline = ASK.outliner.outline(tokens, listed)
    assert [(part.role, part.index) for part in outline.parts] == [("user", 0), ("end", None)]


def test_a_call_without_text_is_a_part_too():
    call = {"type": "function", "function": {"name": "tide", "arguments": '{"day": 1}'}}
    messages = [
        *CHAT[:2],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "low"},
    ]
    asked = ASK(messages)
    assert [(part.role, part.index) for part in asked.outline.parts][2:4] == [("assistant", 2), ("tool", 3)]
    assert text_of_parts(asked)[2] == '<|assistant|><call>tide {"day": 1}</s>'


def test_a_prompt_without_messages_is_one_part():
    outline = ASK.outliner.outline(some_tokens(200, seed=1))
    assert [(part.role, part.end) for part in outline.parts] == [("prompt", 200)]


def test_the_masked_digest_is_equal_when_only_dates_times_numbers_and_ids_differ():
    def masked(text):
        return ASK([{"role": "system", "content": text}]).outline.parts[0]

    base = masked("On 2026-11-30 at 09:15 order 42 of x7f3 came")
    for text, kinds in {
        "On 2026-12-01 at 09:15 order 42 of x7f3 came": {"date"},
        "On 2026-11-30 at 23:59 order 42 of x7f3 came": {"time"},
        "On 2026-11-30 at 09:15 order 43 of x7f3 came": {"number"},
        "On 2026-11-30 at 09:15 order 42 of b00c came": {"id"},
        "On 2025-01-01 at 00:00 order 1 of a1 came": {"date", "time", "number", "id"},
    }.items():
        other = masked(text)
        assert other.masked == base.masked, text
        assert {kind for kind in base.volatile if base.volatile[kind] != other.volatile[kind]} == kinds
    for text in ("On 2026-11-30 at 09:15 order 42 of x7f3 went", "On 2026-11-30  at 09:15 order 42 of x7f3 came"):
        assert masked(text).masked != base.masked


def test_a_very_long_message_is_compared_whole_only():
    part = ASK([{"role": "user", "content": "7 " * MASKED_CHARACTERS}]).outline.parts[0]
    assert (part.masked, dict(part.volatile)) == ("", {})


def test_an_outline_holds_no_word_and_no_token_of_the_prompt():
    secret = "marigold"
    asked = ASK(conversation(f"The password is {secret}.", secret, secret), tools=[tool(secret, secret)])
    written = json.dumps(asked.outline.to_fields())
    assert secret not in written
    assert str(asked.tokens[:4])[1:-1] not in written


def test_another_key_gives_other_digests_throughout():
    one, two = (Asker(key=key)(conversation("Be exact. " * 20, "Hm?")).outline for key in (b"one", b"two"))
    assert one.key != two.key
    assert {part.digest for part in one.parts}.isdisjoint(part.digest for part in two.parts)
    assert one.blocks[:BLOCK_DIGITS] != two.blocks[:BLOCK_DIGITS]
    assert common_blocks(one, two) == 0


@pytest.mark.parametrize("where", [0, 1, 63, 64, 65, 127, 128, 300, 319])
def test_blocks_and_parts_hold_the_first_difference_between_them(where):
    a = some_tokens(320, seed=3)
    b = [*a[:where], (a[where] + 1) % 128, *a[where + 1 :]]
    one, two = ASK.outliner.outline(a), ASK.outliner.outline(b)
    assert common_blocks(one, two) == where // BLOCK_TOKENS
    least, most = shared_tokens(one, two)
    assert least <= common(a, b) <= most
    assert most - least < BLOCK_TOKENS


def test_equal_parts_narrow_a_difference_within_a_block():
    one, two = ASK(CHAT), ASK([*CHAT[:3], {"role": "user", "content": "What?"}])
    assert shared_tokens(one.outline, two.outline)[0] == one.outline.parts[2].end


def test_the_count_of_bos_marks_is_that_of_the_leading_ones():
    assert [ASK(CHAT, bos=count).outline.bos_tokens for count in (0, 1, 2)] == [0, 1, 2]


def test_a_template_and_its_options_show_in_the_outline():
    plain, other = ASK(CHAT).outline, Asker(TEMPLATE + " ", key=KEY)(CHAT).outline
    assert plain.template != other.template
    assert (
        plain.options != ASK(CHAT, keep_thinking=True).outline.options == ASK(CHAT, keep_thinking=True).outline.options
    )


def test_the_key_is_kept_readable_by_its_owner_only(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxkv.blocklog.outline.default_cache_dir", lambda: tmp_path / "mlxkv" / "blocks")
    key = load_key()
    assert load_key() == key
    assert len(key) == 16
    assert (tmp_path / "mlxkv" / "outline.key").stat().st_mode & 0o777 == 0o600


def test_where_the_key_cannot_be_kept_each_process_has_its_own(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("mlxkv.blocklog.outline.default_cache_dir", lambda: tmp_path / "file" / "blocks")
    assert load_key() != load_key()


@pytest.fixture(scope="module")
def demo():
    find_demo_gguf()
    return tokenizer_of("smollm2-135m")


def test_the_pieces_of_a_real_vocabulary_are_what_it_decodes(demo):
    pieces = token_pieces(demo)
    for text in ("Plain words, 12 numbers.", "čeština 東京 👩‍💻", "\n\n\ttabs"):
        ids = demo.encode(text, add_special_tokens=False)
        assert b"".join(pieces[i] for i in ids).decode() == text
    assert pieces[demo.eos_token_id] == b"\xff<|im_end|>\xff"


WORDS = st.text("ab 1\n", max_size=90)
TALKS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), WORDS), min_size=1, max_size=5)


@given(TALKS, TALKS, st.integers(0, 5))
def test_the_range_of_shared_tokens_holds_the_count_whatever_two_conversations_are(one, two, alike):
    first, second = ([{"role": r, "content": c} for r, c in talk] for talk in (one, [*one[:alike], *two]))
    a, b = ASK(first), ASK(second, reply="ab")
    least, most = shared_tokens(a.outline, b.outline)
    assert least <= common(a.tokens, b.tokens) <= most
    assert [part.end for part in a.outline.parts] == sorted({part.end for part in a.outline.parts})
    assert a.outline.parts[-1].end == len(a.tokens)
