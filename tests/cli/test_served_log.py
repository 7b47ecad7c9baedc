"""A real server's log: its sums are those of the responses' usage and of /metrics, and why explains it from both."""

import json
import re
import signal
import subprocess
import sys

import httpx
import pytest
from talking import save_talking_model

from mlxkv_cli.main import run

RULES = "You are a careful guide to the old harbour. Answer in one sentence. " * 3


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Ten requests to `mlxkv serve`: what each answered, the metrics before and after, the log, and why of the last."""
    directory = tmp_path_factory.mktemp("served")
    model = save_talking_model(directory / "talking")
    log = directory / "blocks.jsonl"
    command = [sys.executable, "-m", "mlxkv_cli", "serve", str(model), "--port", "0", "--log", str(log), "--log-text"]
    command += ["--cache-dir", str(directory / "blocks"), "--hot", "64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            address = re.search(r"listening on (\S+)", process.stdout.readline())[1]
            with httpx.Client(base_url=address, timeout=60) as client:
                before = metrics(client)
                usages = [ask(client, *messages) for messages in conversations()]
                yield usages, before, metrics(client), log, address
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def conversations():
    system = {"role": "system", "content": RULES}
    for text in ("Which way?", "Which way?", "Which wax?", "How far is it?", "Which way?"):
        yield system, {"role": "user", "content": text}
    for clock in ("09:15", "09:16", "09:17"):
        yield {"role": "system", "content": f"It is {clock}. {RULES}"}, {"role": "user", "content": "Which way?"}
    yield ({"role": "user", "content": "Hi"},)
    yield {"role": "system", "content": f"It is 09:18. {RULES}"}, {"role": "user", "content": "Which way?"}


def ask(client, *messages):
    body = {"model": "default", "messages": list(messages), "max_tokens": 3, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def metrics(client):
    """Samples of /metrics by name and labels."""
    lines = client.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def summary(log, capsys):
    assert run(["log", "summary", str(log), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_summary_is_the_sum_of_the_usage_of_all_responses(served, capsys):
    usages, _, _, log, _ = served
    found = summary(log, capsys)
    assert found["requests"] == len(usages) == 10
    assert found["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert found["hit_tokens"] == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert found["output_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    assert found["hit_tokens"] > 0


def test_the_summary_is_the_change_of_the_metrics(served, capsys):
    _, before, after, log, _ = served
    found = summary(log, capsys)
    for source in ("hot", "cold", "computed"):
        name = f'mlxkv_prompt_tokens_total{{source="{source}"}}'
        assert found[f"{source}_tokens"] == after[name] - before[name], source
    assert found["output_tokens"] == after["mlxkv_output_tokens_total"] - before["mlxkv_output_tokens_total"]


def test_the_last_request_is_explained_alike_from_the_server_and_from_its_log(served, capsys):
    _, _, _, log, address = served
    last = summary_of_last(log, capsys)
    assert run(["why", str(log), last, "--json", "--text"]) == 0
    from_log = json.loads(capsys.readouterr().out)
    assert run(["why", "--url", address, last, "--json", "--text"]) == 0
    from_server = json.loads(capsys.readouterr().out)
    assert (from_log["cause"], from_log["role"], from_log["index"]) == ("date or counter", "system", 0)
    assert from_log["words"][0].endswith("It is 09:1")
    del from_log["nearest_time"], from_server["nearest_time"]
    assert from_server == from_log


def summary_of_last(log, capsys):
    assert run(["log", "requests", str(log), "--last", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["requests"][0]["request"]
