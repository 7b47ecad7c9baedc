"""What a server gives its clients: seconds to first token cold, hot and from the SSD, decode, four clients at once.

Any OpenAI-compatible server can be asked; what only mlxkv tells (restored bytes) is left out elsewhere. Prompts are
random words of a seed of their own, so that nothing of them is held.
"""

from __future__ import annotations

import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from mlxkv.core.errors import MlxkvError, UsageError

CLIENTS = 4
REPLY_TOKENS, DECODE_TOKENS, CLIENT_TOKENS = 8, 64, 32
SHARED_SHARE = 0.75
START_S, STOP_S, ANSWER_S = 600.0, 60.0, 600.0
WORDS_PER_TOKEN = 0.95
_LISTENING = re.compile(r"listening on (http://\S+)")
_WORDS = (
    "river", "lamp", "stone", "winter", "garden", "letter", "copper", "bridge", "silent", "market", "yellow", "engine",
    "harbor", "paper", "mountain", "clock", "window", "forest", "orange", "station", "mirror", "basket", "thunder",
    "village", "pencil", "island", "butter", "castle", "feather", "ladder",
)  # fmt: skip

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """One streamed answer."""

    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int


@dataclass(frozen=True)
class Figure:
    """A measured thing: its samples in `unit`, and what else there is to say."""

    name: str
    unit: str
    samples: tuple[float, ...]
    detail: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def p90(self) -> float:
        """The value that nine tenths stay under; the largest of fewer than ten."""
        ordered = sorted(self.samples)
        return ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]


class Client:
    """A server's OpenAI API."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=ANSWER_S)

    def ask(self, messages: Sequence[dict[str, str]], max_tokens: int) -> Answer:
        """One streamed chat at temperature 0.

        Raises:
            UsageError: the server refuses it or does not answer.
        """
        body = {
            "messages": list(messages), "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        began, first, usage = time.perf_counter(), None, None
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise UsageError(f"{self.url} answers {answer.status_code}: {answer.read().decode()[:300]}")
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise UsageError(f"{self.url} failed: {event['error']}")
                    usage = event.get("usage") or usage
                    if first is None and any(_says(choice) for choice in event.get("choices", [])):
                        first = time.perf_counter()
        except httpx.HTTPError as error:
            raise UsageError(f"no answer from {self.url} ({error}); is the server there?") from error
        ended = time.perf_counter()
        if usage is None:
            raise UsageError(f"{self.url} gave no usage; it has to stream and to know stream_options.")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            (ended if first is None else first) - began,  # a reply without text ends with its first token
            ended - began,
            usage["prompt_tokens"],
            details.get("cached_tokens"),
            usage["completion_tokens"],
        )

    def last_restore(self) -> tuple[int, float] | None:
        """Bytes and seconds of the newest request's restore, where the server is mlxkv."""
        try:
            answer = self._http.get("/v1/cache/requests")
            newest = answer.json()["requests"][0] if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError, KeyError, IndexError):
            return None
        return (newest["restored_bytes"], newest["restore_s"]) if newest and newest["restored_bytes"] else None

    def close(self) -> None:
        self._http.close()


def measure(
    client: Client,
    *,
    tokens: int,
    rounds: int,
    seed: int,
    restart: Callable[[], Client] | None,
    on_progress: Progress = lambda _: None,
) -> list[Figure]:
    """Every figure.

    Args:
        tokens: of the long prompts, about.
        restart: stops the server, starts it again on the same cache and gives a client; None leaves the SSD out.
    """
    prompts = [conversation(f"{seed}-{i}", tokens) for i in range(rounds)]
    client.ask(conversation(f"{seed}-warm-up", 8), 2)
    on_progress("cold")
    cold = [client.ask(prompt, REPLY_TOKENS) for prompt in prompts]
    on_progress("hot")
    hot, hot_rates = _again(client, prompts)
    on_progress("decode")
    decoded = [client.ask(conversation(f"{seed}-decode-{i}", 64), DECODE_TOKENS) for i in range(rounds)]
    on_progress(f"{CLIENTS} clients")
    unseen, seen = _clients(client, tokens, rounds, seed)
    figures = [
        _ttft("first token, cold", cold),
        _ttft("first token, hot", hot),
        Figure("decode, one client", "tokens/s", tuple(map(_decode_rate, decoded)), f"{DECODE_TOKENS} tokens"),
        Figure(f"{CLIENTS} clients, prompt unseen", "s", unseen, "wall time of all"),
        Figure(f"{CLIENTS} clients, prompt seen", "s", seen, "wall time of all"),
    ]
    if hot_rates:
        figures.append(Figure("restore, hot", "MB/s", hot_rates))
    if restart is not None:
        on_progress("after a restart")
        client = restart()
        client.ask(conversation(f"{seed}-warm-up", 8), 2)
        ssd, ssd_rates = _again(client, prompts)
        figures.insert(2, _ttft("first token, from the SSD", ssd))
        if ssd_rates:
            figures.append(Figure("restore, SSD", "MB/s", ssd_rates))
    return figures


def conversation(seed: str, tokens: int, question: str = "What comes next?") -> list[dict[str, str]]:
    """A system prompt of about `tokens` tokens and a question; the same for the same seed."""
    source = random.Random(seed)
    words = " ".join(source.choice(_WORDS) for _ in range(max(int(tokens * WORDS_PER_TOKEN), 1)))
    return [{"role": "system", "content": words}, {"role": "user", "content": question}]


@contextmanager
def own_server(model: str, cache_dir: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """`mlxkv serve` in a process of its own; yields its address.

    Raises:
        MlxkvError: it did not start; with what it said.
    """
    command = [
        sys.executable,
        "-m",
        "mlxkv_cli",
        "serve",
        model,
        "--port",
        "0",
        "--cache-dir",
        str(cache_dir),
        *options,
    ]
    log = cache_dir / "serve.log"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        found = next((match for line in process.stdout if (match := _LISTENING.search(line))), None)
        if found is None:
            raise MlxkvError(f"the server did not start: {log.read_text(errors='replace').strip()[-500:]}")
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _again(client: Client, prompts: Sequence[list[dict[str, str]]]) -> tuple[list[Answer], tuple[float, ...]]:
    answers, rates = [], []
    for prompt in prompts:
        answers.append(client.ask(prompt, REPLY_TOKENS))
        restored = client.last_restore()
        if restored is not None and restored[1] > 0:
            rates.append(restored[0] / restored[1] / 1e6)
    return answers, tuple(rates)


def _clients(client: Client, tokens: int, rounds: int, seed: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Wall seconds of all clients at once over one system prompt: first when nobody has seen it, then again."""
    walls: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds):
        for turn, wall in enumerate(walls):
            asked = [
                conversation(f"{seed}-shared-{i}", int(SHARED_SHARE * tokens), f"Tell agent {n} about part {turn}.")
                for n in range(CLIENTS)
            ]
            with ThreadPoolExecutor(CLIENTS) as pool:
                began = time.perf_counter()
                list(pool.map(lambda one: client.ask(one, CLIENT_TOKENS), asked))
                wall.append(time.perf_counter() - began)
    return tuple(walls[0]), tuple(walls[1])


def _ttft(name: str, answers: Sequence[Answer]) -> Figure:
    prompts = statistics.median(answer.prompt_tokens for answer in answers)
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    held = f", {statistics.median(cached):,.0f} held" if cached else ""
    return Figure(name, "s", tuple(answer.ttft_s for answer in answers), f"prompt {prompts:,.0f} tokens{held}")


def _decode_rate(answer: Answer) -> float:
    return (answer.output_tokens - 1) / max(answer.total_s - answer.ttft_s, 1e-9)


def _says(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return any(delta.get(field) for field in ("content", "reasoning_content", "reasoning", "tool_calls"))
