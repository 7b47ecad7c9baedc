"""OpenAI's own Python client against a real server: chats, streams, tools, reasoning, formats, log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from answering import Served, events, scripted, served
from serving import tiny_model

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
]
CALL = '{"name": "add", "arguments": {"a": 1, "b": "</tool"}}'
SCRIPTS = {
    "A": ["alpha", " be", "ta ga", "mma", " delta"],
    "B": ["alpha", " be", "ta de", "lta"],
    "C": ["Well: ", "<tool", "_call>", CALL[:20], CALL[20:], "</tool", "_call><tool_call>", CALL, "</tool_call>"],
    "D": ["<tool_call>", "nonsense", "</tool_c", "all>", " after"],
    "E": ["snake[", "0] < b", " <tool", " a"],
    "F": ["<tool_call>", '{"name": "add", "arguments": {"x": NaN}}', "</tool_call>"],
    "G": ["<tool_call>", '{"name": "add", "arguments": "[1]"}', "</tool_call>"],
    "H": ["<tool_call>", CALL, "</tool_call>", " then prose"],
    "I": ["<tool_call>", "[" * 50_000, "</tool_call>"],
    "J": ["<tool_call>", '{"name": "add", "arguments": {"x": "\\ud800"}}', "</tool_call>"],
    "K": ["<tool_call>", '{"name": "ad'],
    "L": ["a", "b", "c", "d"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(lambda: scripted(SCRIPTS), tmp_path_factory.mktemp("scripted")) as found:
        yield found


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random llama: its replies mean nothing, its log-probabilities are real."""
    with served(tiny_model, tmp_path_factory.mktemp("random")) as found:
        yield found


def say(server: Served, text: str, **more: Any) -> Any:
    return server.openai().chat.completions.create(
        model=more.pop("model", "scripted"), messages=[{"role": "user", "content": text}], **more
    )


def streamed(server: Served, text: str, **more: Any) -> dict[str, Any]:
    """A streamed answer put together: texts, calls by index, finish reason, usage, every delta."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "reason": None, "usage": None, "deltas": []}
    for chunk in say(server, text, stream=True, **more):
        if chunk.usage is not None:
            assert chunk.choices == []
            found["usage"] = chunk.usage
            continue
        assert found["usage"] is None, "usage comes last"
        choice = chunk.choices[0]
        found["deltas"].append(choice.delta)
        found["content"] += choice.delta.content or ""
        found["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content") or ""
        for call in choice.delta.tool_calls or []:
            one = found["calls"].setdefault(call.index, {"id": call.id, "name": "", "arguments": ""})
            assert call.id in (None, one["id"])
            one["name"] += call.function.name or ""
            one["arguments"] += call.function.arguments or ""
        found["reason"] = choice.finish_reason or found["reason"]
    return found


def both(server: Served, text: str, **more: Any) -> tuple[str | None, list[tuple[str, str]], str, int]:
    """Text, calls, finish reason and reply tokens, which are the same streamed and not."""
    whole = say(server, text, **more)
    choice = whole.choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    parts = streamed(server, text, stream_options={"include_usage": True}, **more)
    assert parts["content"] == (choice.message.content or "")
    assert [(call["name"], call["arguments"]) for call in parts["calls"].values()] == calls
    assert list(parts["calls"]) == list(range(len(calls)))
    assert len({call["id"] for call in parts["calls"].values()}) == len(calls)
    assert parts["reason"] == choice.finish_reason
    assert parts["usage"].completion_tokens == whole.usage.completion_tokens
    assert parts["usage"].prompt_tokens == whole.usage.prompt_tokens
    return choice.message.content, calls, choice.finish_reason, whole.usage.completion_tokens


def test_a_chat_is_answered_streamed_and_not(server: Served) -> None:
    assert both(server, "A") == ("alpha beta gamma delta", [], "stop", 6), "five pieces and the end"


@pytest.mark.parametrize(
    ("script", "stop", "text", "tokens"),
    [
        ("A", ["beta gamma"], "alpha ", 4),
        ("B", ["beta gamma"], "alpha beta delta", 5),
        ("A", ["g", "beta gamma delta etc"], "alpha beta ", 3),
        ("A", ["ta", "be", "alpha beta gam"], "alpha ", 2),
        ("A", "delta", "alpha beta gamma ", 5),
        ("A", ["nothing of it"], "alpha beta gamma delta", 6),
    ],
)
def test_a_stop_text_over_several_tokens_ends_the_reply_before_it(
    server: Served, script: str, stop: Any, text: str, tokens: int
) -> None:
    assert both(server, script, stop=stop) == (text, [], "stop", tokens), "the first to be complete wins"


def test_calls_in_split_markers_come_apart_with_an_id_each(server: Served) -> None:
    text, calls, reason, _ = both(server, "C", tools=TOOLS)
    assert text == "Well: "
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("add", {"a": 1, "b": "</tool"})] * 2
    assert reason == "tool_calls"
    _, calls, reason, _ = both(server, "C", tools=TOOLS, parallel_tool_calls=False)
    assert (len(calls), reason) == (1, "tool_calls")
    assert both(server, "H", tools=TOOLS)[:3] == (" then prose", calls, "tool_calls")


@pytest.mark.parametrize("script", ["D", "F", "G", "I", "J", "K"])
def test_a_call_that_cannot_be_parsed_stays_text(server: Served, script: str) -> None:
    written = "".join(SCRIPTS[script])
    assert both(server, script, tools=TOOLS)[:3] == (written, [], "stop")


def test_ordinary_brackets_are_not_taken_for_markers(server: Served) -> None:
    assert both(server, "E", tools=TOOLS)[:3] == ("snake[0] < b <tool a", [], "stop")


def test_without_tools_a_marker_is_text(server: Served) -> None:
    assert both(server, "H")[0] == f"<tool_call>{CALL}</tool_call> then prose"
    assert both(server, "H", tools=TOOLS, tool_choice="none")[0] == f"<tool_call>{CALL}</tool_call> then prose"


def test_reasoning_comes_in_a_field_of_its_own(tmp_path: Any) -> None:
    scripts = {"R": ["<think>", "hm", "m</thi", "nk>", "so"], "S": ["<think>cut", " off"], "T": ["a</think>", "b"]}
    with served(lambda: scripted(scripts, thinks=True), tmp_path) as server:
        whole = say(server, "R").choices[0].message
        assert (whole.content, whole.model_extra["reasoning_content"]) == ("so", "hmm")
        parts = streamed(server, "R")
        assert (parts["content"], parts["reasoning"]) == ("so", "hmm")
        cut = say(server, "S", max_tokens=2).choices[0]
        assert (cut.message.content, cut.message.model_extra["reasoning_content"]) == ("", "cut off")
        assert cut.finish_reason == "length"
        stopped = streamed(server, "R", stop=["hm"])
        assert (stopped["content"], stopped["reasoning"]) == ("so", "hmm"), "a stop text ends the answer, not a thought"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_as_many_as_tokens(random: Served, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "llama", "max_tokens": 7, "logprobs": True, "top_logprobs": 3}
    plain = say(random, "hello", **asked).choices[0]
    if stream:
        entries = [
            entry
            for chunk in say(random, "hello", stream=True, **asked)
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content
        ]
    else:
        entries = plain.logprobs.content
    assert len(entries) == 7
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == plain.message.content
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert [entry.top_logprobs[0].logprob for entry in entries] == [entry.logprob for entry in entries], "greedy"
    assert [entry.logprob for entry in entries] == [entry.logprob for entry in plain.logprobs.content]


def test_completions_have_log_probabilities_in_their_older_form(random: Served) -> None:
    client = random.openai()
    asked: Any = {"model": "llama", "prompt": "hello", "max_tokens": 5, "logprobs": 2}
    whole = client.completions.create(**asked).choices[0]
    assert len(whole.logprobs.tokens) == len(whole.logprobs.token_logprobs) == len(whole.logprobs.top_logprobs) == 5
    assert "".join(whole.logprobs.tokens) == whole.text
    parts = [chunk.choices[0] for chunk in client.completions.create(stream=True, **asked)]
    assert "".join(part.text for part in parts) == whole.text
    told = [value for part in parts if part.logprobs for value in part.logprobs.token_logprobs]
    assert told == whole.logprobs.token_logprobs
    offsets = [value for part in parts if part.logprobs for value in part.logprobs.text_offset]
    assert offsets == whole.logprobs.text_offset, "a place in the whole text, streamed too"


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_count_their_prompt_once(random: Served, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "llama", "n": 3, "max_tokens": 6, "temperature": 1.0, "seed": 7}
    one = say(random, "hi there", **{**asked, "n": 1})
    if stream:
        texts: dict[int, str] = {}
        reasons = {}
        usage: Any = None
        for chunk in say(random, "hi there", stream=True, stream_options={"include_usage": True}, **asked):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    else:
        whole = say(random, "hi there", **asked)
        texts = {choice.index: choice.message.content for choice in whole.choices}
        reasons = {choice.index: choice.finish_reason for choice in whole.choices}
        usage = whole.usage
    assert sorted(texts) == [0, 1, 2]
    assert set(reasons.values()) == {"length"}
    assert texts[0] == one.choices[0].message.content, "the first has the seed itself"
    assert len(set(texts.values())) == 3
    assert (usage.prompt_tokens, usage.completion_tokens) == (one.usage.prompt_tokens, 18)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_seed_repeats_and_its_absence_does_not(random: Served) -> None:
    def text(**more: Any) -> str:
        answer = say(random, "seeded", model="llama", temperature=0.8, max_tokens=12, **more)
        return str(answer.choices[0].message.content)

    assert len({text(seed=42) for _ in range(3)}) == 1
    assert text(seed=0) == text(seed=0)
    assert text(seed=0) != text(seed=42)
    assert text() != text()
    greedy = say(random, "seeded", model="llama", n=2, max_tokens=5).choices
    assert greedy[0].message.content == greedy[1].message.content


def test_usage_counts_what_was_really_reused_the_same_streamed_and_not(random: Served) -> None:
    text = "u" * 130
    alone: Any = {"model": "llama", "max_tokens": 1, "extra_body": {"cache": {"salt": "usage"}}}
    seen = set()
    for stream in (False, True, False, True):
        for wanted in (True, False, None):
            if stream:
                options = {} if wanted is None else {"stream_options": {"include_usage": wanted}}
                chunks = list(say(random, text, stream=True, **alone, **options))
                usage = [chunk.usage for chunk in chunks if chunk.usage is not None]
                assert len(usage) == (1 if wanted else 0)
                assert all(chunk.choices for chunk in chunks if chunk.usage is None)
                if not usage:
                    continue
                told = usage[0]
            else:
                told = say(random, text, **alone).usage
            assert told.total_tokens == told.prompt_tokens + told.completion_tokens
            seen.add((told.prompt_tokens, told.completion_tokens, told.prompt_tokens_details.cached_tokens))
    prompt = len(text) + 3
    assert seen == {(prompt, 1, 0), (prompt, 1, prompt - 1)}, "0 on the miss, then all but one"


def test_a_stream_ends_in_done_and_its_usage_comes_before(random: Served) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True}
    status, text, headers = random.post("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    found = events(text)
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"] == []
    assert found[-2]["usage"]["completion_tokens"] == 2
    assert found[-3]["choices"][0]["finish_reason"] == "length"
    assert len({found[0]["id"], *(one["id"] for one in found[:-1])}) == 1


def test_the_client_raises_the_error_of_its_kind(random: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        say(random, "x", model="llama", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="this server has llama") as missing:
        say(random, "x", model="gpt-4")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        say(random, "x" * 5000, model="llama", stream=True)
    assert long.value.code == "context_length_exceeded"


def test_models_lists_the_one_that_is_served(random: Served) -> None:
    client = random.openai()
    assert [model.id for model in client.models.list()] == ["llama"]
    assert client.models.retrieve("llama").id == "llama"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc")


@pytest.mark.parametrize("prompt", [[104, 101, 108], ["one", "two"], [[104, 105], [106]]])
def test_a_prompt_may_be_ids_or_several(random: Served, prompt: Any) -> None:
    """A list as a prompt ends mlx_lm.server's only generation thread."""
    count = 1 if isinstance(prompt[0], int) else len(prompt)
    for _ in range(2):  # and so does the exact resend of one
        found = random.openai().completions.create(model="llama", prompt=prompt, max_tokens=3)
        assert [choice.index for choice in found.choices] == list(range(count))
        assert found.usage is not None
        assert found.usage.completion_tokens == 3 * count


def test_an_exact_resend_and_an_extension_of_it_are_ordinary(random: Served) -> None:
    ids = [100 + i % 20 for i in range(128)]
    client = random.openai()
    first, again = (client.completions.create(model="llama", prompt=ids, max_tokens=1) for _ in range(2))
    longer = client.completions.create(model="llama", prompt=[*ids, 65, 66, 67], max_tokens=1)
    assert first.choices[0].text == again.choices[0].text
    told = [one.usage.prompt_tokens_details.cached_tokens for one in (first, again, longer)]  # type: ignore[union-attr]
    assert told == [0, 127, 128]
