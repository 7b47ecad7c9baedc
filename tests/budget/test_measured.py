"""The measured runtime share: used on the machine it was measured on, named, and left out when anything is wrong."""

import json
import os
from dataclasses import replace

import pytest

from mlxkv.budget import find_machine, plan
from mlxkv.budget.machines import GIB, RuntimeShare, this_cpu
from mlxkv.budget.measured import machine_key, measured_file, remember, with_measured
from mlxkv.budget.memory import RUNTIME_BYTES, Deployment
from mlxkv.budget.terms import terms
from mlxkv_cli.main import run

SHARE = RuntimeShare(bytes=300_000_000, model="tiny", hidden_size=512, step_tokens=256, date="2026-01-02")
MODEL = "Qwen2.5-0.5B-Instruct"  # hidden size 896


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))


def warned(caplog):
    return [record.getMessage() for record in caplog.records]


def test_what_is_remembered_is_found_on_this_machine():
    assert with_measured(this_cpu()).runtime is None
    remember(this_cpu(), SHARE)
    assert with_measured(this_cpu()).runtime == SHARE
    assert measured_file().stat().st_mode & 0o777 == 0o600
    assert [path.name for path in measured_file().parent.iterdir()] == ["runtime-share.json"]


def test_another_machine_is_not_given_it(caplog):
    remember(this_cpu(), SHARE)
    for machine in (find_machine(memory_bytes=24 * GIB), find_machine(chip="M4 Pro"), find_machine(macos="15")):
        assert with_measured(machine) is machine
    assert not warned(caplog)


def test_of_another_mlx_it_is_left_out_with_one_line(caplog):
    remember(this_cpu(), SHARE)
    text = measured_file().read_text()
    measured_file().write_text(text.replace("; mlx ", "; mlx 9"))
    assert with_measured(this_cpu()).runtime is None
    (line,) = warned(caplog)
    assert "is of another machine or MLX" in line
    assert "mlxkv doctor --prove" in line


def test_what_others_measured_stays_beside_it(caplog):
    remember(this_cpu(), SHARE)
    held = json.loads(measured_file().read_text())
    held["shares"]["another machine"] = held["shares"].pop(machine_key(this_cpu()))
    measured_file().write_text(json.dumps(held))
    remember(this_cpu(), replace(SHARE, bytes=7))
    assert set(json.loads(measured_file().read_text())["shares"]) == {"another machine", machine_key(this_cpu())}
    assert with_measured(this_cpu()).runtime.bytes == 7
    assert not warned(caplog)


def damaged(change):
    held = json.loads(measured_file().read_text())
    change(held["shares"][machine_key(this_cpu())])
    return json.dumps(held)


@pytest.mark.parametrize(
    "text",
    [
        lambda: "", lambda: "{", lambda: "[]", lambda: "null", lambda: "\x00" * 10, lambda: "[" * 100_000,
        lambda: '{"format": "another", "shares": {}}', lambda: '{"format": "mlxkv-runtime-share-1", "shares": []}',
        lambda: damaged(lambda share: share.update(bytes=-1)), lambda: damaged(lambda share: share.update(bytes="1")),
        lambda: damaged(lambda share: share.update(bytes=2**60)),
        lambda: damaged(lambda share: share.update(bytes=True)),
        lambda: damaged(lambda share: share.update(step_tokens=0)), lambda: damaged(lambda share: share.pop("date")),
        lambda: damaged(lambda share: share.update(more=1)), lambda: damaged(lambda share: share.update(model=None)),
        lambda: damaged(lambda share: share.clear()),
    ],
)  # fmt: skip
def test_a_damaged_file_is_left_out_with_one_line_and_measured_anew(text, caplog):
    remember(this_cpu(), SHARE)
    measured_file().write_text(text())
    assert with_measured(this_cpu()).runtime is None
    assert len(warned(caplog)) == 1
    remember(this_cpu(), SHARE)
    assert with_measured(this_cpu()).runtime == SHARE


@pytest.mark.parametrize("kind", ["link", "directory", "writable", "pipe"])
def test_a_file_that_is_not_ours_alone_is_left_out_with_one_line(kind, caplog, tmp_path):
    remember(this_cpu(), SHARE)
    path = measured_file()
    if kind == "writable":
        path.chmod(0o666)
    elif kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        path.mkdir() if kind == "directory" else os.mkfifo(path, 0o600)
    assert with_measured(this_cpu()).runtime is None
    assert len(warned(caplog)) == 1


def test_the_bill_has_the_measured_share_in_place_of_the_constant():
    remember(this_cpu(), SHARE)
    answer = plan(MODEL, machine=with_measured(this_cpu()), contexts=[4096], prefill_step_tokens=256)
    assert answer.contexts[0].memory.runtime_bytes == 300_000_000 * 896 // 512
    (term,) = [term for term in terms(answer.deployment, 4096, 1) if term.name == "runtime share"]
    assert term.source == "measured on this machine on 2026-01-02 by `mlxkv doctor --prove`"
    mac = replace(find_machine(chip="M4 Pro"), runtime=SHARE)
    traced = answer.deployment.model
    assert Deployment(traced, mac).memory(4096).runtime_bytes == 300_000_000 * 896 * 2048 // (512 * 256)
    assert Deployment(traced, replace(mac, runtime=None)).memory(4096).runtime_bytes == RUNTIME_BYTES


def test_the_share_grows_with_a_wider_model_and_a_longer_step_and_never_shrinks():
    assert SHARE.of(512, 256) == SHARE.bytes
    assert SHARE.of(1024, 512) == 4 * SHARE.bytes
    assert SHARE.of(64, 64) == SHARE.bytes
    assert replace(SHARE, hidden_size=0).of(4096, 2048) == SHARE.bytes


def test_budget_says_measured_on_this_machine_and_not_of_another(capsys):
    remember(this_cpu(), SHARE)
    assert run(["budget", MODEL, "--chip", "CPU", "--context", "4k", "--explain"]) == 0
    shown = capsys.readouterr()
    assert "runtime share (measured on this machine)" in " ".join(shown.out.split())
    assert "measured on this machine on 2026-01-02" in shown.out
    assert shown.err == ""
    assert run(["budget", MODEL, "--chip", "CPU", "--context", "4k", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["runtime_share"] == "measured"
    assert run(["budget", MODEL, "--ram", "24GB", "--context", "4k", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["runtime_share"] == "estimated"


def test_budget_goes_on_with_one_line_where_the_file_is_damaged(capsys):
    remember(this_cpu(), SHARE)
    measured_file().write_text("{")
    assert run(["budget", MODEL, "--chip", "CPU", "--context", "4k"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert "is damaged); run `mlxkv doctor --prove`" in shown.err
    assert "measured on this machine" not in shown.out
