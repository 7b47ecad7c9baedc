"""Anthropic's own Python client against a real server: messages, event streams, tools, thinking, usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from answering import Served, events, scripted, served
from serving import tiny_model

CALL = '{"name": "add", "arguments": {"a": 1}}'
SCRIPTS = {
    "A": ["alpha", " be", "ta"],
    "C": ["Well: ", "<tool", "_call>", CALL[:20], CALL[20:], "</tool", "_call><tool_call>", CALL, "</tool_call>"],
    "F": ["<tool_call>", '{"name": "add", "arguments": {"x": Infinity}}', "</tool_call>"],
    "G": ["<tool_call>", '{"name": "add", "arguments": "abc"}', "</tool_call>"],
    "R": ["<think>", "hm", "m</thi", "nk>", "so"],
}
TOOLS: list[Any] = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(lambda: scripted(SCRIPTS, thinks=True), tmp_path_factory.mktemp("scripted")) as found:
        yield found


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tiny_model, tmp_path_factory.mktemp("random")) as found:
        yield found


def say(server: Served, text: str, **more: Any) -> Any:
    return server.anthropic().messages.create(
        model=server.engine.model.name,
        max_tokens=more.pop("max_tokens", 50),
        messages=[{"role": "user", "content": text}],
        **more,
    )


def both(server: Served, text: str, **more: Any) -> tuple[list[dict[str, Any]], str | None, str | None]:
    """Content, stop reason and stop text; the same through the client's own way of putting a stream together."""
    whole = say(server, text, **more)
    with server.anthropic().messages.stream(
        model=server.engine.model.name, max_tokens=50, messages=[{"role": "user", "content": text}], **more
    ) as stream:
        streamed = stream.get_final_message()
    contents = []
    for message in (whole, streamed):
        kept = [block.model_dump(exclude_none=True, exclude={"id", "parsed_output"}) for block in message.content]
        contents.append(kept)
        assert all(block.id.startswith("toolu_") for block in message.content if block.type == "tool_use")
    assert contents[0] == contents[1]
    assert (whole.stop_reason, whole.stop_sequence) == (streamed.stop_reason, streamed.stop_sequence)
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    return contents[0], whole.stop_reason, whole.stop_sequence


def test_a_message_is_answered_streamed_and_not(server: Served) -> None:
    assert both(server, "A") == ([{"type": "text", "text": "alpha beta"}], "end_turn", None)
    assert say(server, "A", max_tokens=1).stop_reason == "max_tokens"


def test_the_stop_text_that_ended_a_message_is_told(server: Served) -> None:
    text = [{"type": "text", "text": "alpha "}]
    assert both(server, "A", stop_sequences=["beta"]) == (text, "stop_sequence", "beta")
    assert both(server, "A", stop_sequences=["x", "be", "beta"])[1:] == ("stop_sequence", "be")


def test_calls_are_blocks_with_an_id_each(server: Served) -> None:
    content, reason, _ = both(server, "C", tools=TOOLS)
    call = {"type": "tool_use", "name": "add", "input": {"a": 1}}
    assert (content, reason) == ([{"type": "text", "text": "Well: "}, call, call], "tool_use")
    one = both(server, "C", tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})[0]
    assert one == content[:2]


@pytest.mark.parametrize("script", ["F", "G"])
def test_a_call_that_cannot_be_parsed_stays_text(server: Served, script: str) -> None:
    text = "".join(SCRIPTS[script])
    assert both(server, script, tools=TOOLS) == ([{"type": "text", "text": text}], "end_turn", None)


def test_thinking_is_a_block_of_its_own(server: Served) -> None:
    content, reason, _ = both(server, "R")
    assert content == [
        {"type": "thinking", "thinking": "hmm", "signature": ""},
        {"type": "text", "text": "so"},
    ]
    assert reason == "end_turn"


def test_events_come_in_the_order_of_the_api(server: Served) -> None:
    body = {"max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": "C"}], "tools": TOOLS}
    status, text, _ = server.post("/v1/messages", body)
    assert status == 200
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    found = events(text)
    assert names == [event["type"] for event in found]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    assert [event["index"] for event in found if event["type"] == "content_block_start"] == [0, 1, 2]


def test_the_parts_of_usage_are_disjoint_and_the_same_streamed_and_not(random: Served) -> None:
    text = "w" * 130
    prompt = len(text) + 3
    plain: dict[str, Any] = {}
    cached: dict[str, Any] = {"system": [{"type": "text", "text": "s" * 9, "cache_control": {"type": "ephemeral"}}]}
    for options, size in ((plain, prompt), (cached, prompt + 11)):
        seen = []
        for stream in (False, True, False):
            if stream:
                body = {"max_tokens": 1, "stream": True, "messages": [{"role": "user", "content": text}], **options}
                found = events(random.post("/v1/messages", body)[1])
                first, last = found[0]["message"]["usage"], found[-2]["usage"]
                assert {**first, "output_tokens": 1} == last
                told = last
            else:
                told = say(random, text, max_tokens=1, **options).usage.model_dump()
            parts = [told[name] for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")]
            assert sum(parts) == size
            seen.append(parts)
        assert seen[0] == [size - 128, 0, 128]
        assert seen[1] == seen[2] == [1, size - 1, 0]
    openai = random.openai().chat.completions.create(
        model="llama", messages=[{"role": "user", "content": text}], max_tokens=1
    )
    assert openai.usage is not None
    assert openai.usage.prompt_tokens == prompt
    assert openai.usage.prompt_tokens_details is not None
    assert openai.usage.prompt_tokens_details.cached_tokens == prompt - 1, "both APIs share what they say"


def test_a_request_that_stores_nothing_creates_nothing(random: Served) -> None:
    usage = say(random, "q" * 100, max_tokens=1, extra_body={"cache": {"salt": "q", "store": False}}).usage
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens, usage.input_tokens) == (0, 0, 103)
    usage = say(random, "q" * 100, max_tokens=1, extra_body={"cache": {"salt": "q"}}).usage
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens, usage.input_tokens) == (64, 0, 39)


def test_tokens_are_counted_as_they_will_be(server: Served) -> None:
    client = server.anthropic()
    messages: list[Any] = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "2A"}]},
    ]
    more: Any = {"model": "scripted", "messages": messages, "tools": TOOLS, "system": "be kind"}
    counted = client.messages.count_tokens(**more).input_tokens
    usage = client.messages.create(max_tokens=1, **more).usage
    told = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted == told > 40


def test_the_client_raises_the_error_of_its_kind(random: Served) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature") as bad:
        say(random, "x", extra_body={"temperature": -1})
    assert bad.value.body["type"] == "error"  # type: ignore[index, call-overload]
    with pytest.raises(anthropic.NotFoundError):
        random.anthropic().messages.create(model="claude", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(anthropic.BadRequestError, match="context is 4,096"):
        say(random, "x" * 5000)
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        say(random, "x", stop_sequences=[""])
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        say(random, "x", stop_sequences=["x"] * 17)
