"""Lint finds the planted breaker of each recorded conversation, and nothing in clean ones."""

import json

import pytest
from prompts import TEMPLATE, Asker, common, tool

from mlxkv.blocklog.lint import lint, read_bodies, to_openai
from mlxkv.core.errors import UsageError

RULES = "You are a careful guide to the old harbour. Answer in one sentence and name the street. " * 3
TURNS = [
    "Which way to the boats?",
    "Down the stairs.",
    "And back?",
    "Up the stairs.",
    "How long?",
    "Ten minutes.",
    "Thanks.",
]
TOOLS = [tool("find_street", "name", "town"), tool("tide", "day", "place")]


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def turns(system=lambda _: RULES, history=lambda _, said: said, tools=lambda _: TOOLS, answer=str):
    """Four requests of one conversation, each with the whole history so far."""
    bodies = []
    for i in range(4):
        said = [
            say("user", text) if at % 2 == 0 else say("assistant", answer(text))
            for at, text in enumerate(TURNS[: 2 * i + 1])
        ]
        bodies.append({"messages": [say("system", system(i)), *history(i, said)], "tools": tools(i)})
    return bodies


THOUGHT = "<think>" + "Where do the boats lie? " * 8 + "</think>"

BROKEN = {
    "a clock in the system message": ("date or counter", turns(system=lambda i: f"It is 09:1{i}. {RULES}")),
    "a counter in the system message": ("date or counter", turns(system=lambda i: f"Request {i}. {RULES}")),
    "an id of the session": ("date or counter", turns(system=lambda i: f"session=a{i}b7{i}f {RULES}")),
    "tools in another order": ("tools in another order", turns(tools=lambda i: TOOLS[:: 1 if i % 2 else -1])),
    "a tool more each time": ("other tools", turns(tools=lambda i: [*TOOLS, *(tool(f"t{n}", "x") for n in range(i))])),
    "keys of a schema in another order": (
        "tool keys in another order",
        turns(tools=lambda i: [TOOLS[0] if i % 2 else tool("find_street", "town", "name"), TOOLS[1]]),
    ),
    "thinking removed from history": ("thinking removed", turns(answer=lambda text: THOUGHT + text)),
    "old messages dropped": ("history cut", turns(history=lambda _, said: said[-3:])),
    "a system message that grows": ("system message changed", turns(system=lambda i: RULES + "Be brief. " * i)),
    "a message rewritten": (
        "message changed",
        turns(history=lambda i, said: [say("user", "(summary) " + "so far " * i), *said[1:]] if i else said),
    ),
}  # fmt: skip


def report_of(bodies, template=TEMPLATE, **options):
    lines = [json.dumps(body) for body in bodies]
    return lint(read_bodies(iter(lines)), Asker(template).tokenizer, **options)


@pytest.mark.parametrize("name", BROKEN)
def test_the_planted_breaker_is_found(name):
    cause, bodies = BROKEN[name]
    report = report_of(bodies)
    assert {turn.cause for turn in report.broken} == {cause}
    assert all(turn.advice for turn in report.broken)


CLEAN = {
    "conversations that have nothing in common": [
        {"messages": [say("system", text * 9), say("user", text)]} for text in ("Be exact. ", "Sing. ", "Rhyme. ")
    ],
    "a conversation that only grows": turns(),
    "two conversations with one system message": [
        *turns(),
        {**turns()[0], "messages": [say("system", RULES), say("user", "What is for lunch?")]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_in_a_clean_conversation(name):
    report = report_of(CLEAN[name])
    assert report.broken == ()
    assert report.reusable_share > 0.8 or "nothing in common" in name


def test_reusable_tokens_are_the_longest_prefix_with_any_earlier_request():
    ask, bodies = Asker(), turns(system=lambda i: f"It is 09:1{i % 2}. {RULES}")
    tokens = [ask(body["messages"], tools=body["tools"]).tokens for body in bodies]
    report = report_of(bodies)
    for i, turn in enumerate(report.turns):
        shared = max((common(tokens[i], before) for before in tokens[:i]), default=0)
        assert turn.reusable_tokens == min(shared, len(tokens[i]) - 1)
        assert turn.prompt_tokens == len(tokens[i])
    assert [turn.nearest_line for turn in report.turns] == [None, 1, 1, 2]
    assert report.reusable_share == sum(turn.reusable_tokens for turn in report.turns[1:]) / sum(map(len, tokens[1:]))


def test_in_whole_blocks_every_count_is_a_multiple_of_64():
    report, by_token = report_of(turns(), block_tokens=True), report_of(turns())
    assert all(turn.reusable_tokens % 64 == 0 for turn in report.turns)
    assert 0 < report.reusable_tokens < by_token.reusable_tokens


def test_the_words_where_a_prefix_breaks_are_those_of_both_prompts():
    turn = report_of(BROKEN["a counter in the system message"][1]).turns[1]
    before, now, then = turn.words
    assert before.endswith("Request ")
    assert (now[0], then[0]) == ("1", "0")


def test_anthropic_bodies_are_read_as_the_same_prompts():
    schema = TOOLS[0]["function"]["parameters"]
    body = {
        "system": [{"type": "text", "text": "Be exact."}],
        "tools": [{"name": "find_street", "description": "find_street does it", "input_schema": schema}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "t1", "name": "find_street", "input": {"name": "a"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Here."}]},
        ],
    }
    messages, tools, _ = to_openai(body)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["content"] == "<think>hm</think>Let me look."
    assert messages[2]["tool_calls"][0]["function"] == {"name": "find_street", "arguments": {"name": "a"}}
    assert messages[3] == {"role": "tool", "tool_call_id": "t1", "content": "Here."}
    assert tools == TOOLS[:1]


def test_an_openai_body_goes_through_as_it_is():
    body = {"messages": [say("user", "Hi"), say("assistant", None, tool_calls=[{"id": "c"}])], "tools": TOOLS}
    messages, tools, options = to_openai({**body, "chat_template_kwargs": {"enable_thinking": False}})
    assert messages == [say("user", "Hi"), say("assistant", "", tool_calls=[{"id": "c"}])]
    assert (tools, options) == (TOOLS, {"enable_thinking": False})


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"messages": []}', '{"messages": "hi"}'])
def test_a_line_that_is_no_request_body_is_named(line):
    with pytest.raises(UsageError, match="line 2"):
        list(read_bodies(iter(["", line])))


def test_a_batch_file_of_openai_is_read_too():
    body = {"messages": [say("user", "Hi")]}
    assert list(read_bodies(iter([json.dumps({"custom_id": "1", "body": body})]))) == [(1, body)]


def test_messages_the_template_refuses_are_named_by_their_line():
    with pytest.raises(UsageError, match="line 1: "):
        report_of([{"messages": [say("user", "no")]}], "{{ raise_exception('never') }}")


SAID = {"role": "user", "content": "Which way?"}


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ({"messages": [SAID, 2]}, "a message that is no object"),
        ({"messages": [say("user", 5)]}, "content is no text"),
        ({"messages": [say("assistant", "", tool_calls=5)]}, "tool calls"),
        ({"messages": [say("assistant", "", tool_calls=[5])]}, "tool calls"),
        ({"messages": [say("assistant", [{"type": "tool_use", "id": "1"}])]}, "a tool use without a name"),
        ({"messages": [SAID], "tools": 5}, "tools that are no list"),
        ({"messages": [SAID], "tools": [5]}, "tools that are no list"),
        ({"messages": [SAID], "tools": [{"function": 5}]}, "function is no object"),
        ({"messages": [SAID], "tools": [{"input_schema": {}}]}, "a tool without a name"),
        ({"messages": [SAID], "chat_template_kwargs": "no"}, "chat_template_kwargs"),
    ],
)
def test_a_body_of_neither_api_is_one_sentence_with_its_line(body, wrong):
    with pytest.raises(UsageError, match=f"line 2 has .*{wrong}"):
        report_of([{"messages": [SAID]}, body])


def test_a_mark_of_byte_order_before_the_first_body_is_no_error():
    assert [number for number, _ in read_bodies(iter(["\ufeff" + json.dumps({"messages": [SAID]})]))] == [1]
