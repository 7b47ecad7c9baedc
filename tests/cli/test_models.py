"""`mlxkv models`: the catalog at a glance."""

import json
import subprocess
import sys

from mlxkv.sizing import catalog
from mlxkv_cli.main import run


def test_every_model_of_the_catalog_is_listed_with_kib_a_token_and_a_block(capsys):
    assert run(["models"]) == 0
    out, err = capsys.readouterr()
    rows = {line.split()[0]: line.split() for line in out.splitlines()[1:]}
    assert list(rows) == list(catalog.names())
    assert rows["Qwen2.5-0.5B-Instruct"][1:3] == ["12", "768"]
    assert rows["SmolLM2-135M"][1:3] == ["22.50", "1,440"]
    assert rows["Llama-3-8B"][-1] == "?"
    assert max(map(len, out.splitlines())) <= 80
    assert "mlxkv budget MODEL" in err


def test_the_json_has_bytes(capsys):
    assert run(["models", "--json"]) == 0
    models = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    qwen = models["Qwen2.5-0.5B-Instruct"]
    assert (qwen["bytes_per_token"], qwen["bytes_per_block"], qwen["context_tokens"]) == (12_288, 786_432, 32_768)
    assert models["gpt-oss-20b"]["window_tokens"] == 128


def test_it_does_not_wait_for_mlx_lm():
    code = "import sys; from mlxkv_cli.main import run; run(['models']); print('mlx_lm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_under_another_mlx_lm_the_figures_are_traced(monkeypatch):
    from mlxkv.budget import catalog as figures

    monkeypatch.setattr(figures, "version", lambda _: "9.9")
    monkeypatch.setattr(figures.catalog, "names", lambda: ("Qwen2.5-0.5B-Instruct",))
    (row,) = figures.catalog_figures()
    assert (row.bytes_per_token, row.bytes_per_block) == (12_288, 786_432)
