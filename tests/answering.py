"""A real server on a real socket, over engines of tiny models; and scripts for a model that says what it is told."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import mlx.core as mx
import openai
import uvicorn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from serving import SOON_S, running
from talking import END, MARKS, Script
from tiny import tiny_llama
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxkv.engine.engine import Engine
from mlxkv.models.loader import LoadedModel
from mlxkv.server.app import create_app
from mlxkv.server.http.run import bound, server_of
from mlxkv.server.monitoring.metrics import Metrics
from mlxkv.server.settings import Settings

SCRIPTED_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' + tools | tojson + '</s>' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '</s>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' + messages[-1].content[-1:] }}{% endif %}"
)
"""The prompt ends in the last character of the last message, which chooses the script."""


@dataclass(frozen=True)
class Served:
    """A running server. `settings.port` is the real one."""

    engine: Engine
    settings: Settings
    metrics: Metrics
    server: uvicorn.Server

    @property
    def port(self) -> int:
        return self.settings.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=SOON_S, **options)

    def anthropic(self, key: str = "none", **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=SOON_S, **options)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        """Send a JSON body, or bytes as they are; returns status, answer and headers."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, raw, {"content-type": "application/json", **(headers or {})})

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        return self.ask("GET", path, None, headers or {})

    def ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SOON_S)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            text, kind = answer.read(), answer.headers.get_content_type()
            found = json.loads(text, parse_constant=_no_json) if kind == "application/json" else text.decode()
            return answer.status, found, {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()

    def raw(self) -> socket.socket:
        """A connection that nothing has been said on."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=SOON_S)

    def settled(self) -> None:
        """Wait until nothing runs or waits."""
        wait_until(lambda: not (self.engine.status.running or self.engine.status.queued or self.engine._waiting))


def wait_until(condition: Callable[[], Any], timeout_s: float = SOON_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def served(
    make: Callable[[], LoadedModel], directory: Path, *, drain_s: float = 5.0, engine: Any = None, **settings: Any
) -> Iterator[Served]:
    """A server over a model; `engine` has options of `serving.running`, the rest are its settings."""
    metrics = Metrics()
    chosen = Settings(port=0, **settings)
    with (
        running(make, directory, listener=metrics.on_event, **(engine or {})) as started,
        bound(chosen) as listening,
    ):
        chosen = replace(chosen, port=listening.getsockname()[1])
        server = server_of(create_app(started, chosen, metrics), started, chosen, drain_s=drain_s)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="test-server", daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield Served(started, chosen, metrics, server)
        finally:
            server.should_exit = True
            thread.join(SOON_S)
            assert not thread.is_alive()


THINKING = ["<think>", "</think>"]  # tokens by which mlx-lm knows a model that reasons
FIRST_PIECE = 128 + len(THINKING)


def pieces_tokenizer(pieces: Sequence[str], *, thinks: bool) -> PreTrainedTokenizerFast:
    """One token for a mark, for each ASCII character, and, from `FIRST_PIECE` on, for each piece.

    Text is read character by character. Pieces are numbered in the vocabulary, so that two may have the same text.
    """
    spelled = [*MARKS, *map(chr, range(len(MARKS), 128)), *(THINKING if thinks else ["\ue002", "\ue003"])]
    spelled += [f"\ue000{i}\ue001{piece}" for i, piece in enumerate(pieces)]
    backend = Tokenizer(models.WordLevel({text: i for i, text in enumerate(spelled)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace(Regex("\ue000[0-9]+\ue001"), ""), decoders.Fuse()])
    backend.add_special_tokens(MARKS)
    if thinks:
        backend.add_tokens(THINKING)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=SCRIPTED_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def scripted(scripts: Mapping[str, Sequence[str]], *, thinks: bool = False, ends: bool = True) -> LoadedModel:
    """A model that answers a message by the script of its last character, a list of pieces with a token each."""
    tokenizer = pieces_tokenizer([piece for script in scripts.values() for piece in script], thinks=thinks)
    script = Script([END, END], len(tokenizer))
    token = FIRST_PIECE
    for key, pieces in scripts.items():
        said = [*range(token, token + len(pieces)), *([END] if ends else [])]
        token += len(pieces)
        for before, after in pairwise([tokenizer.convert_tokens_to_ids(key), *said]):
            script.following[before] = after
    mx.eval(script.following)
    wrapped = TokenizerWrapper(
        tokenizer,
        tool_parser=json_tools.parse_tool_call,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
    )
    config = {**tiny_llama(), "vocab_size": len(tokenizer)}
    return LoadedModel("scripted", script, wrapped, config, {"model": "scripted"}, 4096)


def events(text: str) -> list[Any]:
    """The JSON of a stream's `data:` lines; [DONE] as it is."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line, parse_constant=_no_json) for line in lines]


def _no_json(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
