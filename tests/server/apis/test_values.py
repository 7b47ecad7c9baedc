"""Values that cannot be are 400 and name their field, in each API's shape; odd ones that can be are taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from answering import Served, events, served
from serving import tiny_model

from mlxkv.engine.scheduler import Limits

CHAT, TEXT, MESSAGE, COUNT = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"
CONTEXT = 512
USER = [{"role": "user", "content": "hello"}]
RAW = '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, %s}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ("alias", "path/to/llama")
    with served(
        lambda: replace(tiny_model(), context_tokens=CONTEXT), tmp_path_factory.mktemp("values"), names=names
    ) as found:
        yield found


def refused(server: Served, path: str, body: Any, field: str | None) -> str:
    """The message of a 400, whose shape is checked; the next request is answered."""
    status, answer, _ = server.post(path, body)
    assert status == 400, answer
    if path.startswith(MESSAGE):
        assert answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error"
    else:
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        assert answer["error"]["param"] == field
    message = str(answer["error"]["message"])
    assert field is None or field.rpartition(".")[2] in message or field == "messages"
    return message


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": USER, "max_tokens": 1, **more}


WRONG: list[tuple[str, Any]] = [
    *[("max_tokens", value) for value in (0, -1, "5", True, 2.5)],
    *[("max_completion_tokens", value) for value in (0, -1, "5", True, 2.5)],
    *[("temperature", value) for value in (-1, "nan", 101, True, [])],
    *[("top_p", value) for value in (0, -1, 2, "1")],
    *[("top_k", value) for value in (-5, 10**9, 1.5, True)],
    *[("min_p", value) for value in (2, -0.1)],
    *[("presence_penalty", value) for value in (10, -10)],
    *[("frequency_penalty", value) for value in (10, -10)],
    *[("repetition_penalty", value) for value in (0, -10, 11)],
    *[("seed", value) for value in (-1, 2**64, 1.5, True, "1")],
    *[("n", value) for value in (0, -1, True, 17, 1.5, "2")],
    *[("top_logprobs", value) for value in (-1, 25, True, 3)],
    *[("logprobs", value) for value in (1, "yes")],
    ("stop.0", [1]),
    *[("stop", value) for value in ("", [""], ["x"] * 17, "x" * 1025)],
    *[("stream", value) for value in ("true", 1)],
    *[("logit_bias", value) for value in ({"999": 1}, {"-1": 1}, {"a": 1}, {"²": 1}, {"1": 101}, {"1": -101})],
    *[("tool_choice", value) for value in ("required", {"type": "function", "function": {"name": "f"}})],
    *[("chat_template_kwargs", value) for value in ({"tools": []}, {"tokenize": False}, {"chat_template": "x"})],
    *[("chat_template_kwargs", value) for value in ({"messages": []}, {"return_dict": True}, "x")],
    *[("model", value) for value in (1, [])],
    ("tools.0.function.name", [{"type": "function", "function": {}}]),
    ("response_format.type", {"type": "xml"}),
    ("response_format.json_schema", {"type": "json_schema"}),
    ("stream_options.include_usage", {"include_usage": 1}),
    ("cache.store", {"store": "no"}),
    ("cache.salt", {"salt": "x" * 257}),
    ("cache.pin_s", {"pin_s": -1}),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_value_names_its_field(server: Served, case: int) -> None:
    field, value = WRONG[case]
    for stream in (False, True):
        body = {"stream": stream, **chat()}
        if field == "max_completion_tokens":
            del body["max_tokens"]
        refused(server, CHAT, {**body, field.partition(".")[0]: value}, field)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "seed", "max_tokens"])
def test_numbers_that_are_none_are_refused_in_strict_json(server: Served, field: str, number: str) -> None:
    refused(server, CHAT, (RAW % f'"{field}": {number}').replace('"max_tokens": 1, "max', '"max').encode(), field)
    if field in ("temperature", "top_p", "top_k"):
        refused(server, MESSAGE, (RAW % f'"{field}": {number}').encode(), field)


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": None},
        {"temperature": 0},
        {"temperature": 0.5, "top_p": 1, "top_k": 1},
        {"top_k": 128, "temperature": 1},
        {"min_p": 1, "temperature": 1},
        {"seed": 0, "temperature": 1},
        {"seed": 2**64 - 1, "temperature": 1},
        {"n": None, "stop": None, "seed": None, "tools": None, "response_format": None, "cache": None, "model": None},
        {"stop": []},
        {"user": "nobody", "metadata": {"a": 1}, "service_tier": "auto", "unheard_of": [1]},
        {"logit_bias": {"7": -100}},
        {"tools": []},
        {"chat_template_kwargs": {"enable_thinking": False, "anything": [1]}},
    ],
)
def test_values_at_their_limits_and_unknown_fields_are_taken(server: Served, more: dict[str, Any]) -> None:
    status, answer, _ = server.post(CHAT, {**chat(max_tokens=2), **({"max_tokens": 2} | more)})
    assert status == 200, answer


def test_the_length_of_a_reply_is_what_was_asked_for(server: Served) -> None:
    def told(**more: Any) -> tuple[int, str]:
        status, answer, _ = server.post(CHAT, {"messages": USER, **more})
        assert status == 200, answer
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    assert told(max_tokens=1) == (1, "length")
    assert told(max_tokens=9, max_completion_tokens=3) == (3, "length")
    prompt = server.post(CHAT, chat())[1]["usage"]["prompt_tokens"]
    assert told(max_tokens=10**12) == (CONTEXT - prompt, "length"), "what is left of the context"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *[(path, body) for path in (CHAT, TEXT, MESSAGE, COUNT) for body in (b"", b"{}", b"[]", b"null", b"1", b'"a"')],
        (CHAT, {"messages": []}),
        (MESSAGE, {"messages": [], "max_tokens": 1}),
        (COUNT, {"messages": []}),
        (TEXT, {"prompt": ""}),
        (TEXT, {"prompt": []}),
        (TEXT, {"prompt": [[]]}),
        (TEXT, {"prompt": [""]}),
        (TEXT, {"prompt": ["a", ""]}),
        (TEXT, {"prompt": None}),
    ],
)
def test_nothing_to_say_is_refused_and_the_next_request_answered(server: Served, path: str, body: Any) -> None:
    status, answer, _ = server.post(path, body)
    assert status == 400
    assert answer["error"]["message"]
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("content", ["", "   ", None, []])
def test_an_empty_message_still_has_its_template(server: Served, content: Any) -> None:
    status, answer, _ = server.post(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1})
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 3 + len(content or "")


def test_parts_of_text_are_the_plain_text_and_share_its_cache(server: Served) -> None:
    text = "part one, part two " * 8
    whole = server.post(CHAT, chat(messages=[{"role": "user", "content": text}]))[1]["usage"]
    parts = [{"type": "text", "text": text[:50]}, {"type": "text", "text": text[50:]}]
    found = server.post(CHAT, chat(messages=[{"role": "user", "content": parts}]))[1]["usage"]
    assert found["prompt_tokens"] == whole["prompt_tokens"]
    assert found["prompt_tokens_details"]["cached_tokens"] == whole["prompt_tokens"] - 1


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.1.content.0.type"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "x"}]}, "messages.1.content.1.type"),
        ({"role": "robot", "content": "a"}, "messages.1.role"),
        ({"content": "a"}, "messages.1.role"),
        ({"role": "user", "content": 1}, "messages.1.content"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}, "messages.1.tool_calls.0.function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages.1.tool_calls",
        ),
        ("hello", "messages.1"),
    ],
)
def test_a_message_that_cannot_be_names_its_index(server: Served, message: Any, field: str) -> None:
    refused(server, CHAT, chat(messages=[*USER, message]), field)


def test_a_refusing_template_is_the_callers_error_and_in_its_own_words(server: Served) -> None:
    assert "tildes are not allowed" in refused(
        server, CHAT, chat(messages=[{"role": "user", "content": "~"}]), "messages"
    )


def test_a_turn_with_only_a_call_is_kept(server: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "3"}]},
        {"role": "system", "content": "in the middle"},
    ]
    status, answer, _ = server.post(CHAT, chat(messages=messages))
    assert status == 200, answer
    # A turn is two marks and its text; the tokenizer spells `<|tool|>` out.
    assert answer["usage"]["prompt_tokens"] == server.post(CHAT, chat())[1]["usage"]["prompt_tokens"] + 27


@pytest.mark.parametrize("size", [0, 2000, 60_000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_refused_before_it_is_computed(
    server: Served, size: int, stream: bool
) -> None:
    computed = server.metrics.tokens.computed
    text = "y" * (CONTEXT + size)
    for path, body in (
        (CHAT, chat(messages=[{"role": "user", "content": text}])),
        (TEXT, {"prompt": text}),
        (TEXT, {"prompt": [5] * len(text)}),
        (MESSAGE, chat(messages=[{"role": "user", "content": text}])),
    ):
        status, answer, _ = server.post(path, {**body, "stream": stream})
        assert status == 400
        assert "context is 512" in answer["error"]["message"]
        if path != MESSAGE:
            assert answer["error"]["code"] == "context_length_exceeded"
    assert server.metrics.tokens.computed == computed


def test_the_limit_that_is_shown_is_the_one_that_holds(server: Served) -> None:
    most = server.get("/v1/models")[1]["data"][0]["context_length"]
    status, answer, _ = server.post(TEXT, {"prompt": [5] * (most - 1), "max_tokens": 50})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    assert server.post(TEXT, {"prompt": [5] * most})[0] == 400


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(tmp_path: Any) -> None:
    with served(tiny_model, tmp_path, engine={"limits": Limits(memory_bytes=2**20)}) as server:
        for path in (CHAT, MESSAGE):
            status, answer, _ = server.post(path, chat(max_tokens=4000))
            assert status == 400
            assert "may hold 1.00 MiB" in answer["error"]["message"]


@pytest.mark.parametrize("name", ["llama", "alias", "path/to/llama", "path/to/llama/", "LLAMA", "", None])
def test_every_spelling_of_the_model_is_one_cache(server: Served, name: str | None) -> None:
    server.post(CHAT, chat(messages=[{"role": "user", "content": "names" * 20}]))
    status, answer, _ = server.post(CHAT, chat(model=name, messages=[{"role": "user", "content": "names" * 20}]))
    assert status == 200
    assert answer["model"] == "llama"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize("name", ["gpt-4", "../../etc", "llama2", "lla", "/", "path"])
def test_another_model_is_404_and_nothing_is_looked_up(server: Served, name: str) -> None:
    for path in (CHAT, MESSAGE):
        status, answer, _ = server.post(path, chat(model=name))
        assert status == 404
        assert "llama" in answer["error"]["message"]
    assert server.post(CHAT, chat())[0] == 200


def test_a_wrong_number_in_a_query_is_400_in_the_same_shape(server: Served) -> None:
    status, answer, _ = server.get("/v1/cache/blocks?limit=many")
    assert status == 400
    assert answer["error"]["param"] == "limit"
    assert server.get("/v1/cache/blocks?limit=-5")[1]["blocks"] == []
    assert server.get("/nowhere")[0] == 404
    assert server.ask("DELETE", "/v1/models", None, {})[0] == 405


def test_salts_do_not_share_and_the_same_salt_does(server: Served) -> None:
    def cached(**cache: Any) -> int:
        body = chat(messages=[{"role": "user", "content": "salted" * 30}], cache=cache)
        return int(server.post(CHAT, body)[1]["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(salt="ab"), cached(salt="ab"), cached(salt="a"), cached(salt="abc")] == [0, 182, 0, 0]


def test_an_error_after_the_headers_is_an_event(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("private detail")

    monkeypatch.setattr("mlxkv.prompt_cache.block_cache.CachedSequence.first_token", fail)
    for path, shape in ((CHAT, "server_error"), (MESSAGE, "api_error")):
        status, text, _ = server.post(path, chat(stream=True))
        assert status == 200
        found = events(text)[-1]
        assert found["error"]["type"] == shape
        assert "private detail" not in text
        status, answer, _ = server.post(path, chat())
        assert (status, answer["error"]["type"]) == (500, shape)
    monkeypatch.undo()
    assert server.post(CHAT, chat())[0] == 200
