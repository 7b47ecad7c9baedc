"""Real runs: the log of a scripted session says what the session's own responses said, and why explains it."""

import json
from collections import Counter

import pytest
from talking import talking_model

from mlxkv.blocklog.blocks import BlockTable
from mlxkv.blocklog.history import find_request, read_history
from mlxkv.blocklog.outline import Outliner
from mlxkv.blocklog.readers import LogReader
from mlxkv.blocklog.summary import summarize
from mlxkv.blocklog.why import explain
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.errors import UsageError
from mlxkv.core.units import MIB
from mlxkv.engine.generate import generate
from mlxkv.models.chat import render
from mlxkv.prompt_cache import block_cache
from mlxkv.prompt_cache.block_cache import BlockCache

RULES = "You are a careful guide to the old harbour. Answer in one sentence. " * 4
KEY = b"a key of the tests"


class Session:
    """Asks a tiny model through a block cache with a log; keeps the event of each reply."""

    def __init__(self, directory, *, hot_bytes=64 * MIB, cold=True):
        self.log = directory / "blocks.jsonl"
        self.model = talking_model()
        self.outliner = Outliner(self.model.tokenizer, key=KEY)
        self.config = CacheConfig(
            directory=directory / "blocks" if cold else None, hot_bytes=hot_bytes, floor_bytes=0, log=self.log
        )
        self.events = []
        self.cache = self._open()

    def _open(self):
        return BlockCache(self.model.module, self.model.fields, BlockStore(self.config), name="talking")

    def ask(self, *messages, salt="", tokens=3):
        prompt = render(self.model.tokenizer, messages)
        run = generate(
            self.model.module, self.cache, prompt, max_tokens=tokens, sampler=lambda p: p.argmax(-1), salt=salt
        )
        outline = self.outliner.outline(prompt, messages)
        run.sequence.describe = lambda reply: self.outliner.with_reply(outline, reply).to_fields()
        list(run)
        self.events.append(run.event)
        return run.event

    def restart(self):
        self.cache.close()
        self.cache = self._open()

    def close(self):
        self.cache.close()
        return self.log


def system(text=RULES):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    """Ten requests whose reuse is known by construction, over a restart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_cache, "MEASURED_TOKENS", 10**9)  # no clock decides what is restored
        yield play(Session(tmp_path_factory.mktemp("ten")))


def play(session):
    session.ask(system(), user("Which way?"))  # 1: nothing is held
    session.ask(system(), user("Which way?"))  # 2: all but the last token
    session.ask(system(), user("Which wax?"))  # 3: parts within the question
    session.ask(system("On 2026-11-30. " + RULES), user("Which way?"))  # 4: parts in the system message
    session.ask(system("On 2026-12-01. " + RULES), user("Which way?"))  # 5: only the date is another
    session.ask(user("Hi"))  # 6: shorter than a block
    session.cache.store.flush()
    session.restart()
    session.ask(system(), user("Which way?"))  # 7: whole blocks from the SSD
    session.ask(system(), user("Which way?"))  # 8: from memory again
    session.ask(system(), user("Which way?"), salt="other")  # 9: another salt shares nothing
    session.ask(user("Quite another thing. " * 10))  # 10: never seen
    session.close()
    return session


def test_the_session_reused_what_its_construction_says(ten):
    events = ten.events
    prompt = events[0].prompt_tokens
    question = (
        len("<|user|>") - len("<|user|>") + 2 + len(RULES) + 1
    )  # marks are one token each: system, text, end, user
    assert (events[0].hot_tokens, events[0].cold_tokens) == (0, 0)
    assert events[1].hot_tokens == prompt - 1
    assert events[2].hot_tokens == question + len("Which wa")
    assert events[3].hot_tokens == 1
    assert events[4].hot_tokens == 1 + len("On 2026-1")
    assert (events[5].hot_tokens, events[5].reason) == (0, "shorter than a block")
    assert (events[6].hot_tokens, events[6].cold_tokens) == (0, prompt // 64 * 64)
    assert events[7].hot_tokens == prompt - 1
    assert (events[8].matched_tokens, events[8].reason) == (0, "other salt")
    assert (events[9].matched_tokens, events[9].reason) == (0, "diverged at token 0")


def test_the_summary_of_the_log_is_the_sum_of_the_responses(ten):
    reader = LogReader()
    found = summarize(reader, reader.files([ten.log]))
    for field in ("prompt_tokens", "hot_tokens", "cold_tokens", "tail_tokens", "computed_tokens", "output_tokens"):
        assert getattr(found, field) == sum(getattr(event, field) for event in ten.events), field
    assert found.requests == 10
    assert found.models == Counter({"talking": 10})
    assert (reader.unknown_lines, reader.torn_lines) == (0, 0)
    lines = [json.loads(line) for line in ten.log.read_text(encoding="utf-8").splitlines()]
    assert reader.lines == len(lines)
    assert found.written_blocks == sum(line["event"] == "offload" for line in lines)
    assert found.committed_blocks == sum(line["event"] == "commit" and line["tokens"] == 64 for line in lines)


def test_why_explains_each_request_of_the_session(ten):
    causes = {}
    for number, event in enumerate(ten.events, 1):
        history = read_history([str(ten.log)], event.request)
        causes[number] = explain(history.record, history.earlier, history.gone)
    assert causes[2].cause == "nothing"
    assert causes[8].cause == "nothing"
    assert (causes[3].cause, causes[3].index, causes[3].role) == ("new text", 1, "user")
    assert causes[3].token == ten.events[2].matched_tokens
    assert (causes[4].cause, causes[4].index, causes[4].token) == ("system message changed", 0, 1)
    assert (causes[5].cause, causes[5].nearest) == ("date or counter", ten.events[3].request)
    assert "a date" in causes[5].detail
    assert causes[9].cause == "other salt"
    assert causes[1].cause == causes[10].cause == "new text"
    assert causes[6].cause == "short"


def test_a_request_is_found_by_the_beginning_of_its_id_only_when_it_is_the_only_one(ten):
    name = ten.events[4].request
    assert find_request([str(ten.log)], name[:8]).request == name
    with pytest.raises(UsageError, match="no request zzz"):
        find_request([str(ten.log)], "zzz")
    with pytest.raises(UsageError, match="several begin with"):
        find_request([str(ten.log)], "")


def test_stdin_cannot_be_explained():
    with pytest.raises(UsageError, match="as a file"):
        read_history(["-"], "r1")


def test_an_evicted_chain_is_explained_by_what_was_evicted_and_for_whom(tmp_path):
    session = Session(tmp_path, hot_bytes=12 * 64 * 4 * 2 * 2 * 16 * 4, cold=False)  # 12 blocks of the tiny model
    first = (system(), user("Which way?"))
    session.ask(*first)
    others = [session.ask(user(f"{word} " * 90)) for word in ("boats", "tides")]
    again = session.ask(*first)
    log = session.close()
    assert again.reason == "evicted"
    history = read_history([str(log)], again.request)
    found = explain(history.record, history.earlier, history.gone)
    assert found.cause == "evicted"
    assert any(other.request in found.detail for other in others)
    assert "(budget)" in found.detail
    evicted = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert found.detail.split()[1] in {each["block"][:12] for each in evicted if each["event"] == "evict"}


def test_the_blocks_of_the_session_are_those_it_committed(ten):
    table = BlockTable()
    for event in LogReader().files([ten.log]):
        table.add(event)
    lines = [json.loads(line) for line in ten.log.read_text(encoding="utf-8").splitlines()]
    commits = {line["block"] for line in lines if line["event"] == "commit"}
    assert {row.block for row in table.chosen()} == commits
    written = Counter()
    for line in lines:
        if line["event"] == "offload":
            written[line["block"]] += line["bytes"]
    assert {row.block: row.written_bytes for row in table.chosen() if row.written_bytes} == dict(written)
    first = next(line for line in lines if line["event"] == "commit")
    chain = [row for row in table.chosen(chain=first["block"], sort="chain") if row.tokens == 64]
    assert [row.index for row in chain][:2] == [0, 1]
    assert [row.hits for row in chain[:4]] == [4, 4, 4, 4]  # by requests 2, 3, 7 and 8; 2 and 8 committed nothing
    assert [row.hits for row in table.chosen(sort="hits", top=3)] == sorted(
        (r.hits for r in table.chosen()), reverse=True
    )[:3]
