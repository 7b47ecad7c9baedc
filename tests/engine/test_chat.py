"""`Chat`: turns that find each other's blocks at once, whole characters, and refusals that change nothing."""

import math

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from talking import Script, plain_tokenizer, talking_model

from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.errors import ModelError, ModelNotFoundError, UsageError
from mlxkv.core.units import MIB
from mlxkv.engine.chat import Chat, Sampling
from mlxkv.models.chat import render
from mlxkv.models.loader import DEMO, LoadedModel, tokenizer_of
from mlxkv.prompt_cache import block_cache
from mlxkv.prompt_cache.block_cache import BlockCache

LONG = "The quick brown fox jumps over the lazy dog, again and again, until the evening comes."
# Ids of SmolLM2's tokenizer; each alone decodes to U+FFFD.
GRIN, KANJI, CARON = [10813, 242, 218], [177, 137, 112], [143, 233]


@pytest.fixture
def talk(tmp_path, monkeypatch):
    """Opens chats. Behind every test: nothing is pinned, and every invariant holds."""
    monkeypatch.setattr(block_cache, "MEASURED_TOKENS", math.inf)  # a tiny model computes faster than it restores
    caches = []

    def opener(model, *, hot_bytes=64 * MIB, system=None):
        config = CacheConfig(directory=tmp_path / "blocks", hot_bytes=hot_bytes, cold_bytes=64 * MIB, floor_bytes=0)
        cache = BlockCache(model.module, model.fields, BlockStore(config), name=model.name)
        caches.append(cache)
        return Chat(model, cache, system=system)

    yield opener
    for cache in caches:
        cache.check_integrity()
        assert cache.store.pins() == 0
        cache.close()


@pytest.fixture(scope="module")
def model():
    return talking_model()


@pytest.fixture(scope="module")
def demo_tokenizer():
    try:
        return tokenizer_of(DEMO)
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def say(chat, text, **sampling):
    return "".join(chat.reply(text, Sampling(**{"max_tokens": 24, **sampling})))


def scripted(tokenizer, said, prompt):
    """A model that answers `prompt` with the tokens `said`, and then ends."""
    module = Script([*said, *tokenizer.eos_token_ids], len(tokenizer))
    module.start_after(render(tokenizer, [{"role": "user", "content": prompt}])[-1])
    return LoadedModel("script", module, tokenizer, {}, {"model": "script"}, None)


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_reply_is_the_text_of_the_greedy_tokens_and_joins_the_conversation(talk, model):
    chat = talk(model, system="Be brief.")
    said = say(chat, LONG)
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant"]
    assert chat.messages[1]["content"] == LONG
    assert chat.messages[2]["content"] == said
    assert chat.event.output_tokens == len(model.tokenizer.encode(said, add_special_tokens=False))


@pytest.mark.parametrize("hot_bytes", [64 * MIB, 0])
def test_turn_2_sent_at_once_finds_turn_1(talk, model, hot_bytes):
    chat = talk(model, hot_bytes=hot_bytes)
    first = render(model.tokenizer, [{"role": "user", "content": LONG}])
    said = say(chat, LONG, max_tokens=40)
    known = first + model.tokenizer.encode(said, add_special_tokens=False)[:-1]  # the last token was never fed
    say(chat, "And then?")
    second = render(model.tokenizer, chat.messages[:-1])
    shared = common(known, second)
    assert shared > len(first)
    reused = chat.event.hot_tokens + chat.event.cold_tokens
    assert reused == (shared if hot_bytes else shared // 64 * 64)
    assert chat.event.prompt_tokens == len(second)


def test_the_same_question_at_once_in_another_chat_hits_all_but_one_token(talk, model):
    chat = talk(model)
    again = Chat(model, chat._cache)
    assert say(chat, LONG) == say(again, LONG)
    assert again.event.hot_tokens == again.event.prompt_tokens - 1


def test_a_seed_repeats_a_sampled_reply(talk, model):
    said = [say(talk(model), LONG, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def test_leaving_the_loop_keeps_what_was_said(talk, model):
    chat = talk(model)
    pieces = []
    for piece in chat.reply(LONG, Sampling(max_tokens=60)):
        pieces.append(piece)
        if len(pieces) == 5:
            break
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert chat.event.output_tokens < 60
    say(chat, "Go on.")
    assert chat.event.hot_tokens >= 64


def test_a_stop_before_the_first_token_keeps_the_work_and_the_conversation(talk, model):
    chat = talk(model)

    def stop(done, _total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(chat.reply(LONG, Sampling(), on_progress=stop))
    assert [message["content"] for message in chat.messages] == [LONG, ""]
    assert chat.event.ttft_s is None
    again = Chat(model, chat._cache)
    say(again, LONG)
    assert again.event.hot_tokens >= 64


def test_too_long_a_conversation_is_refused_with_both_numbers_before_anything_is_computed(talk):
    chat = talk(talking_model(context_tokens=100))
    say(chat, "Hi.", max_tokens=4)
    before, event = [dict(message) for message in chat.messages], chat.event
    held = len(chat._cache.store.hot)
    with pytest.raises(UsageError, match=r"the conversation has \d+ tokens and the model's context is 100;") as refused:
        say(chat, LONG * 2)
    assert str(
        len(render(TokenizerWrapper(plain_tokenizer()), [*before, {"role": "user", "content": LONG * 2}]))
    ) in str(refused)
    assert chat.messages == before
    assert chat.event is event
    assert len(chat._cache.store.hot) == held
    assert say(chat, "Hi.", max_tokens=4)


def test_a_reply_ends_where_the_context_does(talk):
    chat = talk(talking_model(context_tokens=50))
    say(chat, "Hi, how are you?", max_tokens=1000)
    assert chat.event.prompt_tokens + chat.event.output_tokens == 50


def test_what_the_template_refuses_changes_nothing(talk, model):
    chat = talk(model)
    with pytest.raises(UsageError, match="tildes are not allowed"):
        say(chat, "~")
    assert chat.messages == []
    assert chat.event is None


def test_a_model_without_a_template_is_an_error_and_changes_nothing(talk, model):
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = None
    chat = talk(LoadedModel("base", model.module, TokenizerWrapper(tokenizer), {}, model.fields, None))
    with pytest.raises(ModelError, match="no chat template; choose an instruct or chat version"):
        say(chat, "Hi.")
    assert chat.messages == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_p": 0.0}, "top-p is 0.0"),
        ({"top_p": 1.01}, "top-p is 1.01"),
        ({"top_p": math.nan}, "top-p is nan"),
        ({"max_tokens": 0}, "max tokens is 0"),
        ({"max_tokens": -1}, "max tokens is -1"),
    ],
)
def test_sampling_that_cannot_be_is_wrong_usage(wrong, said):
    with pytest.raises(UsageError, match=said):
        Sampling(**wrong)


def test_characters_made_of_several_tokens_come_whole(talk, demo_tokenizer):
    said = [*GRIN, *KANJI, *CARON]
    chat = talk(scripted(demo_tokenizer, said, "Hi."))
    pieces = list(chat.reply("Hi.", Sampling(max_tokens=20)))
    assert "".join(pieces) == demo_tokenizer.decode(said)
    assert len(pieces) == 3
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("cut", [1, 2, 4, 5, 7])
def test_a_character_cut_by_max_tokens_ends_as_it_does_without_a_stream(talk, demo_tokenizer, cut):
    said = [*GRIN, *KANJI, *CARON]
    chat = talk(scripted(demo_tokenizer, said, "Hi."))
    pieces = list(chat.reply("Hi.", Sampling(max_tokens=cut)))
    assert "".join(pieces) == demo_tokenizer.decode(said[:cut])
    assert all("\ufffd" not in piece for piece in pieces[:-1])


def test_two_streams_of_one_tokenizer_do_not_mix(talk, demo_tokenizer):
    one = talk(scripted(demo_tokenizer, [*GRIN, *CARON], "Hi."))
    two = talk(scripted(demo_tokenizer, [*KANJI, *GRIN], "Hi."))
    streams = [chat.reply("Hi.", Sampling(max_tokens=20)) for chat in (one, two)]
    said = ["", ""]
    for pair in zip(*streams, strict=True):
        said = [text + piece for text, piece in zip(said, pair, strict=True)]
    assert said == [demo_tokenizer.decode([*GRIN, *CARON]), demo_tokenizer.decode([*KANJI, *GRIN])]


def test_the_end_mark_is_not_said(talk, model):
    chat = talk(scripted(model.tokenizer, model.tokenizer.encode("Hi", add_special_tokens=False), "Hi."))
    assert say(chat, "Hi.") == "Hi"
    assert chat.event.output_tokens == 3
