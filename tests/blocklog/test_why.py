"""`why` names the first token that differs, where it is, and what likely did it."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from prompts import TEMPLATE, Asker, common, conversation, record, tool, with_tokens

from mlxkv.blocklog.outline import Outline
from mlxkv.blocklog.why import ADVICE, Gone, Record, explain, words_around

ASK = Asker()
RULES = "You are a careful guide to the old harbour. Answer in one sentence, name the street, and never guess. " * 2
ASKED, SAID, THEN = "Which way to the boats?" * 3, "Down the stairs and left at the chapel." * 2, "And back again?"
CHAT = conversation(RULES, ASKED, SAID, THEN)
TOOLS = [tool("find_street", "name", "town"), tool("find_boat", "name"), tool("tide", "day", "place")]
REORDERED = tool("find_street", "town", "name")


@dataclass
class Planted:
    """Two requests, and what has to be said of the second once the first is held."""

    cause: str
    role: str | None
    index: int | None
    before: dict[str, Any]
    now: dict[str, Any]
    detail: str = ""
    templates: tuple[str, str] = (TEMPLATE, TEMPLATE)


def system(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": text}, *CHAT[1:]]}


def chat(*messages: dict[str, str]) -> dict[str, Any]:
    return {"messages": list(messages)}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


THOUGHT = f"<think>{'Let me see what the map says. ' * 4}</think>{SAID}"
LONG = [message("system", RULES), *(message(("user", "assistant")[i % 2], f"{'abcdefgh'[i]} " * 70) for i in range(7))]

PLANTED = {
    "a date": Planted(
        "date or counter",
        "system",
        0,
        system(f"Today is 2026-11-30. {RULES}"),
        system(f"Today is 2026-12-01. {RULES}"),
        "a date",
    ),
    "a weekday and a month": Planted(
        "date or counter",
        "system",
        0,
        system(f"It is Monday, November 30. {RULES}"),
        system(f"It is Tuesday, December 1. {RULES}"),
        "a date",
    ),
    "a clock": Planted(
        "date or counter", "system", 0, system(f"{RULES} It is 09:15."), system(f"{RULES} It is 09:16."), "a time"
    ),
    "a counter": Planted(
        "date or counter", "system", 0, system(f"Request 41. {RULES}"), system(f"Request 42. {RULES}"), "a number"
    ),
    "an id in a header": Planted(
        "date or counter", "system", 0, system(f"cch=3f9a1; {RULES}"), system(f"cch=77b02; {RULES}"), "an id"
    ),
    "a date in the template": Planted(
        "template clock",
        "system",
        0,
        {"messages": CHAT, "clock": "Monday"},
        {"messages": CHAT, "clock": "Friday"},
    ),
    "tools in another order": Planted(
        "tools in another order",
        "tools",
        None,
        {"messages": CHAT, "tools": TOOLS},
        {"messages": CHAT, "tools": TOOLS[::-1]},
        "3 tools",
    ),
    "a schema's keys in another order": Planted(
        "tool keys in another order",
        "tools",
        None,
        {"messages": CHAT, "tools": TOOLS},
        {"messages": CHAT, "tools": [REORDERED, *TOOLS[1:]]},
    ),
    "a tool more": Planted(
        "other tools",
        "tools",
        None,
        {"messages": CHAT, "tools": TOOLS[:2]},
        {"messages": CHAT, "tools": TOOLS},
        "1 of 3",
    ),
    "thinking removed by the template": Planted(
        "thinking removed",
        "assistant",
        2,
        chat(*CHAT[:2], message("assistant", THOUGHT)),
        chat(*CHAT[:2], message("assistant", THOUGHT), CHAT[3]),
    ),
    "thinking removed from a reply": Planted(
        "thinking removed", "assistant", 2, {**chat(*CHAT[:2]), "reply": THOUGHT}, chat(*CHAT)
    ),
    "a reply that came back changed": Planted(
        "reply changed",
        "assistant",
        2,
        {**chat(*CHAT[:2]), "reply": SAID},
        chat(*CHAT[:2], message("assistant", SAID[:30] + " indeed"), CHAT[3]),
    ),
    "another template": Planted(
        "template changed",
        "system",
        0,
        chat(*CHAT),
        chat(*CHAT),
        templates=(TEMPLATE, TEMPLATE.replace("'<|' + m.role", "'# <|' + m.role")),
    ),
    "an option of the template": Planted(
        "template options",
        "assistant",
        2,
        {**chat(*CHAT[:2], message("assistant", THOUGHT), CHAT[3]), "keep_thinking": True},
        chat(*CHAT[:2], message("assistant", THOUGHT), CHAT[3]),
    ),
    "BOS twice": Planted(
        "BOS twice", "system", 0, {"messages": CHAT, "bos": 1}, {"messages": CHAT, "bos": 2}, "with 2 BOS"
    ),
    "another system message": Planted(
        "system message changed", "system", 0, system(RULES), system(RULES.replace("street", "square"))
    ),
    "no system message": Planted("system message changed", "user", 0, chat(*CHAT), chat(*CHAT[1:])),
    "old messages dropped": Planted(
        "history cut", "user", 1, chat(*LONG), chat(LONG[0], *LONG[3:], message("user", "more"))
    ),
    "a message put in between": Planted(
        "message inserted",
        "user",
        1,
        chat(*LONG),
        chat(LONG[0], message("user", "Wait."), message("assistant", "Yes."), *LONG[1:]),
    ),
    "an old message edited": Planted(
        "message changed", "user", 1, chat(*CHAT), chat(CHAT[0], message("user", "Which way home?"), *CHAT[2:])
    ),
    "the conversation goes on": Planted(
        "new text", "user", 3, {**chat(*CHAT[:2]), "reply": SAID + "</s>"}, chat(*CHAT)
    ),
    "another question": Planted(
        "new text", "user", 1, chat(*CHAT[:2]), chat(CHAT[0], message("user", "What is for lunch?"))
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_cause_is_named(name):
    planted = PLANTED[name]
    ask = [Asker(template) for template in planted.templates]
    before, now = ask[0](**planted.before), ask[1](**planted.now)
    found = explain(record(now, before), [record(before, name="before")])
    first = common(now.tokens, before.tokens)
    assert (found.cause, found.role, found.index) == (planted.cause, planted.role, planted.index)
    assert (found.token, found.exact) == (first, True)
    assert planted.detail in found.detail
    assert found.nearest == "before"
    assert found.advice == ADVICE[planted.cause]
    assert found.lost_tokens == now.outline.prompt_tokens - first


SAID_BY_THE_CACHE = {
    "shorter than a block": "short",
    "slower than computing": "slower",
    "no checkpoint": "no checkpoint",
    "other salt": "other salt",
    "other root (kv_bits, layout)": "other root",
    "evicted": "evicted",
    "damaged": "damaged",
    "unreadable": "unreadable",
    "withdrawn": "withdrawn",
    "its cache is of a class mlxkv does not know": "uncached",
}


@pytest.mark.parametrize("reason", SAID_BY_THE_CACHE)
def test_what_the_cache_knows_itself_is_the_cause(reason):
    asked = ASK(CHAT)
    found = explain(record(asked, name="now", reason=reason), [record(asked, name="before")])
    assert found.cause == SAID_BY_THE_CACHE[reason]


def test_another_root_names_the_fields_that_differ():
    found = explain(record(ASK(CHAT), reason="other root (kv_bits, layout)"), [])
    assert "kv_bits, layout" in found.detail


def test_another_root_because_of_the_template_is_a_template_change():
    before, now = Asker()(CHAT), Asker(TEMPLATE.replace("Tools:", "Your tools:"))(CHAT)
    found = explain(record(now, reason="other root (tokenizer)"), [record(before, name="before")])
    assert found.cause == "template changed"


def test_an_evicted_block_is_said_with_its_time_and_its_occasion():
    gone = [Gone(block="fb59e30f22aa2eee", event="evict", time="10:15:41", tier="hot", reason="budget", by="r7")]
    found = explain(record(ASK(CHAT), reason="evicted"), [], gone)
    assert found.cause == "evicted"
    for said in ("fb59e30f22aa", "memory", "10:15:41", "budget", "r7"):
        assert said in found.detail


def test_a_block_forgotten_long_ago_is_known_from_the_log():
    gone = [Gone(block="fb59e30f22aa2eee", event="evict", time=None, tier="cold", reason="budget")]
    assert explain(record(ASK(CHAT), reason="never seen"), [], gone).cause == "evicted"


def test_a_conversation_that_goes_on_behind_what_is_held_is_new_text():
    """The last token of a reply is never held: it was not run through the model."""
    before, now = ASK(CHAT[:2], reply=SAID), ASK(CHAT)
    held = len(before.tokens) - 1
    found = Record(**{**vars(record(now, reason="never seen")), "matched_tokens": held})
    assert explain(found, [record(before, name="before")]).cause == "new text"


def test_what_two_prompts_share_and_neither_tier_holds_is_called_so():
    before, now = ASK(CHAT), ASK([*CHAT, {"role": "assistant", "content": "Up."}, {"role": "user", "content": "Far?"}])
    found = Record(**{**vars(record(now, reason="never seen")), "matched_tokens": 64})
    said = explain(found, [record(before, name="before")])
    assert (said.cause, said.token) == ("not held", 64)


def test_a_prompt_reused_to_its_last_token_has_nothing_to_explain():
    asked = ASK(CHAT)
    found = explain(record(asked, asked), [record(asked, name="before")])
    assert (found.cause, found.lost_tokens) == ("nothing", 1)


def test_the_nearest_of_many_earlier_prompts_is_found_the_latest_of_equals():
    others = [ASK(conversation(RULES, f"Question {i}, quite another one {'x' * i}")) for i in range(5)]
    near = ASK([*CHAT[:3], {"role": "user", "content": "Thanks."}])
    now = ASK(CHAT)
    earlier = [record(o, name=f"o{i}") for i, o in enumerate(others)]
    earlier[2:2] = [record(near, name="near 1"), record(near, name="near 2")]
    assert explain(record(now, near), earlier).nearest == "near 2"


def test_without_tokens_a_difference_is_known_to_the_block_and_with_them_to_the_token():
    before, now = ASK(CHAT), ASK([CHAT[0], {"role": "user", "content": "Something else entirely, please." * 9}])
    first = common(before.tokens, now.tokens)
    unsaid = record(now, before, reason="evicted")
    unsaid = Record(**{**vars(unsaid), "matched_tokens": 0})
    held = record(before, name="before")
    found = explain(unsaid, [held])
    assert found.token <= first <= found.latest_token
    assert found.latest_token - found.token < 64
    assert not found.exact
    exact = explain(with_tokens(unsaid, now), [with_tokens(held, before)])
    assert (exact.token, exact.exact) == (first, True)


def test_outlines_made_with_other_keys_are_not_compared():
    before, now = Asker(key=b"one")(CHAT), Asker(key=b"two")([*CHAT[:3], {"role": "user", "content": "Hm?"}])
    found = explain(record(now, before), [record(before, name="before")])
    assert found.cause == "unknown"


def test_records_without_an_outline_say_what_the_cache_said():
    bare = Record(request="r1", prompt_tokens=500, matched_tokens=130, reason="diverged at token 130")
    found = explain(bare, [Record(request="r0", prompt_tokens=500)])
    assert (found.cause, found.token, found.nearest, found.role) == ("unknown", 130, None, None)
    assert "diverged at token 130" in found.detail


def test_the_words_around_the_difference_are_the_prompts_own():
    before, now = ASK(system("It is 09:15. " + RULES)["messages"]), ASK(system("It is 10:15. " + RULES)["messages"])
    said = words_around(record(now), record(before))
    assert said is not None
    assert said[0].endswith("It is ")
    assert (said[1][:6], said[2][:6]) == ("10:15.", "09:15.")
    assert words_around(record(now), Record(request="r0")) is None


def test_an_outline_survives_the_log():
    asked = ASK(CHAT, tools=TOOLS, reply=THOUGHT)
    assert Outline.from_fields(json.loads(json.dumps(asked.outline.to_fields()))) == asked.outline
