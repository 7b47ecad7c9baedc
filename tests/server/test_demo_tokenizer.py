"""What needs a real byte-level tokenizer: characters of several tokens, and JSON by construction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from answering import Served, events, served
from serving import tiny_model
from tiny import build_tiny, tiny_llama

from mlxkv.core.errors import ModelNotFoundError
from mlxkv.models.gguf import find_demo_gguf
from mlxkv.models.loader import DEMO, LoadedModel, tokenizer_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PERIOD = 8
SAID = {
    "😀": [10813, 242, 218],
    "漢": [177, 137, 112],
    "ď": [143, 233],
    "👩‍💻": [10813, 235, 119, 321, 231, 10813, 236, 136],
}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    try:
        find_demo_gguf()
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@lru_cache(maxsize=1)
def demo_tokenizer() -> Any:
    return tokenizer_of(DEMO)


class Echo(nn.Module):
    """Says the last `PERIOD` tokens again and again; it reads them from its cache."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = mx.arange(vocabulary)
        self.layers = [None]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        states = (inputs[:, None, :, None] * mx.ones(4)).astype(mx.float32)
        seen, _ = cache[0].update_and_fetch(states, -states)
        following = seen[:, 0, max(seen.shape[2] - PERIOD, 0), 0]
        return (self.vocabulary == following[:, None, None]).astype(mx.float32)


def demo_model(module: nn.Module | None = None) -> LoadedModel:
    """The demo model's tokenizer over a module; without one, over a random llama."""
    tokenizer = demo_tokenizer()
    config = {**tiny_llama(), "vocab_size": len(tokenizer)}
    name = "llama" if module is None else "echo"
    return LoadedModel(name, module or build_tiny(config), tokenizer, config, {"model": name}, 512)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(lambda: demo_model(Echo(len(demo_tokenizer()))), tmp_path_factory.mktemp("echo")) as found:
        yield found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(demo_model, tmp_path_factory.mktemp("llama")) as found:
        yield found


def prompt_of(character: str) -> list[int]:
    """`PERIOD` ids that end in the character's."""
    letters = [demo_tokenizer().encode(letter)[-1] for letter in "abcdefgh"]
    return letters[len(SAID[character]) :] + SAID[character]


def stream(server: Served, prompt: list[int], max_tokens: int) -> tuple[list[str], str]:
    """The deltas of a streamed completion, and its finish reason."""
    asked = {"prompt": prompt, "max_tokens": max_tokens, "stream": True}
    found = events(server.post(TEXT, asked)[1])[:-1]
    assert [one["choices"][0]["finish_reason"] for one in found[:-1]] == [None] * (len(found) - 1)
    return [one["choices"][0]["text"] for one in found], found[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("character", list(SAID), ids=["face", "chinese", "caron", "joined"])
def test_a_character_of_several_tokens_is_never_shown_in_parts(echo: Served, character: str) -> None:
    prompt = prompt_of(character)
    assert demo_tokenizer().decode(prompt).endswith(character)
    whole = demo_tokenizer().decode(prompt)
    for count in (*range(1, PERIOD + 1), 2 * PERIOD - 1):
        deltas, reason = stream(echo, prompt, count)
        plain = echo.post(TEXT, {"prompt": prompt, "max_tokens": count})[1]["choices"][0]
        assert "".join(deltas) == plain["text"], count
        assert reason == plain["finish_reason"] == "length"
        assert "\ufffd" not in plain["text"]
        assert (whole * 2).startswith(plain["text"])
        assert len(plain["text"]) >= len(whole * (count // PERIOD))


def test_characters_of_requests_that_run_together_do_not_mix(echo: Served) -> None:
    prompts = [prompt_of(character) for character in SAID]
    alone = [stream(echo, prompt, 60) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda prompt: stream(echo, prompt, 60), prompts)) == alone


@pytest.mark.parametrize("streamed", [False, True])
def test_the_bytes_of_log_probabilities_join_to_the_text(llama: Served, streamed: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "temperature": 1.0, "seed": 3}
    answer = llama.post(CHAT, {**asked, "logprobs": True, "stream": streamed})[1]
    choices = [one["choices"][0] for one in events(answer)[:-1]] if streamed else answer["choices"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert len(entries) == 40
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    said = "".join(choice["delta" if streamed else "message"].get("content") or "" for choice in choices)
    assert said.replace("\ufffd", "") == joined.decode(errors="ignore")
    assert len(said) > 40


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # a random model would write nothing else
}


def formatted(server: Served, wanted: dict[str, Any], **more: Any) -> tuple[int, Any]:
    messages = [{"role": "user", "content": "say it"}]
    asked = {"messages": messages, "max_tokens": 120, "response_format": wanted, "temperature": 1.0, "seed": 5, **more}
    return server.post(CHAT, asked)[:2]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_reply_follows_its_schema_streamed_and_not(llama: Served, seed: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    status, answer = formatted(llama, wanted, seed=seed)
    assert status == 200
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    found = json.loads(choice["message"]["content"])
    assert found.keys() == {"ok", "kind"}
    assert found["ok"] in (True, False)
    assert found["kind"] in ("a", "b")
    parts = events(formatted(llama, wanted, seed=seed, stream=True)[1])[:-1]
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in parts) == choice["message"]["content"]


def test_a_json_object_begins_as_one_and_a_neighbour_is_not_masked(llama: Served) -> None:
    plain = {"messages": [{"role": "user", "content": "say it"}], "max_tokens": 30}
    alone = llama.post(CHAT, plain)[1]["choices"][0]["message"]["content"]
    with ThreadPoolExecutor(2) as pool:
        masked = pool.submit(formatted, llama, {"type": "json_object"})
        beside = pool.submit(llama.post, CHAT, plain)
        status, answer = masked.result()
        assert beside.result()[1]["choices"][0]["message"]["content"] == alone
    assert status == 200
    choice = answer["choices"][0]
    assert choice["message"]["content"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_tokens_that_the_schema_forbids_have_a_finite_log_probability(llama: Served) -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    status, answer = formatted(llama, wanted, logprobs=True, top_logprobs=20)
    assert status == 200
    values = [top["logprob"] for one in answer["choices"][0]["logprobs"]["content"] for top in one["top_logprobs"]]
    assert min(values) == -9999.0, "20 tokens are more than the schema allows somewhere"
    assert max(values) <= 0


@pytest.mark.parametrize(
    "schema",
    [
        b'{"type": "nonsense"}',
        b'{"$ref": "http://example.org/x"}',
        b'{"type": "string", "pattern": "("}',
        b'{"type": "number", "minimum": NaN}',
        b'{"type": "object", "properties": 5}',
        b'{"allOf": [{"type": "string"}, {"type": "number"}]}',
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(llama: Served, schema: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "response_format": '
    body += b'{"type": "json_schema", "json_schema": {"schema": %s}}}' % schema
    status, answer, _ = llama.post(CHAT, body)
    assert status == 400, answer
    assert answer["error"]["param"] == "response_format"
    assert llama.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})[0] == 200


def test_a_tokenizer_that_cannot_be_read_is_the_answer_not_a_crash(tmp_path: Path) -> None:
    with served(tiny_model, tmp_path) as server:
        status, answer = formatted(server, {"type": "json_object"})
        assert status == 400
        assert "tokenizer" in answer["error"]["message"]
