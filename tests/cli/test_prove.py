"""`mlxkv doctor --prove` from the outside: its answer, its report, its exit code, and what it leaves behind."""

import io
import json
import os
import platform
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from saved import save_model
from tiny import tiny_llama

from mlxkv.budget.measured import measured_file
from mlxkv.prove import prove as order
from mlxkv.prove import runs
from mlxkv.prove.check import Check
from mlxkv.prove.prove import Group, attempt
from mlxkv.prove.report import markdown, without_names
from mlxkv_cli.docs import JSON_FIELDS
from mlxkv_cli.main import run
from mlxkv_cli.prove_page import prove_page

USER, HOST = "zaphodb", "betelgeuse-seven"
CHECKS = [
    "products", "quantised products", "attention",
    "rename", "publish", "sync", "lock", "place",
    "whole files", "flipped bits", "cut files", "swapped files",
    "published = fresh", "hot = fresh", "cold = fresh", "new process = fresh",
    "memory", "runtime share", "first token", "decode", "restore rate",
]  # fmt: skip


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    """One run of everything with a tiny model, in the home of somebody whose name is known."""
    home = tmp_path_factory.mktemp("homes") / USER
    model = save_model(home / "models" / f"{USER}-tiny", tiny_llama())
    root = home / ".cache" / "mlxkv" / "blocks"
    root.mkdir(parents=True)
    (root / "block").write_text("mine")
    report, out = home / "proof.md", io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
        patch.setenv("USER", USER)
        patch.setenv("LOGNAME", USER)
        patch.setattr(platform, "node", lambda: f"{HOST}.local")
        patch.setattr(sys, "stdout", out)
        patch.setattr(runs, "MOST_BLOCKS", 4)
        code = run(["doctor", "--prove", str(model), "--json", "--report", str(report), "--cache-dir", str(root)])
        share = json.loads(measured_file().read_text())
    return {
        "code": code,
        "seen": json.loads(out.getvalue()),
        "report": report.read_text(),
        "root": root,
        "share": share,
    }


def test_everything_holds_on_this_machine_and_the_exit_code_says_so(proof):
    wrong = [check for check in proof["seen"]["checks"] if check["verdict"] == "fail"]
    assert wrong == []
    assert proof["code"] == 0
    assert [check["name"] for check in proof["seen"]["checks"]] == CHECKS


def test_json_has_the_documented_fields(proof):
    assert set(proof["seen"]) - {"versions", "machine"} <= set(JSON_FIELDS["doctor"])
    for check in proof["seen"]["checks"]:
        assert set(check) == {"name", "verdict", "said", "figures", "advice"}
        assert check["figures"]


def test_neither_the_report_nor_the_answer_says_whose_machine_it_was(proof):
    for text in (proof["report"], json.dumps(proof["seen"]["checks"])):
        assert USER not in text
        assert HOST not in text
        assert str(proof["root"].parents[3]) not in text
        assert str(proof["root"]) not in text


def test_the_report_has_a_table_a_group_and_every_check(proof):
    report = proof["report"]
    assert [line[4:] for line in report.splitlines() if line.startswith("### ")][:6] == [
        "numbers", "file system", "damage", "restored = fresh", "memory", "speed",
    ]  # fmt: skip
    assert all(f"| {name} | " in report for name in CHECKS)
    assert "state_equal True" in report


def test_nothing_stays_but_the_share_and_the_users_blocks_are_as_they_were(proof):
    root = proof["root"]
    assert [path.name for path in root.iterdir()] == ["block"]
    assert (root / "block").read_text() == "mine"
    assert not list(root.parent.glob(".mlxkv-prove*"))
    (share,) = proof["share"]["shares"].values()
    assert share["hidden_size"] == 64


def test_a_check_that_fails_is_exit_code_1_with_what_to_do(monkeypatch, tmp_path, capsys):
    failed = Check("lock", "fail", "a lock did not exclude", {}, "Choose another disk.")
    monkeypatch.setattr(order, "prove", lambda *_, **__: iter([Group("file system", (failed,))]))
    assert run(["doctor", "--prove", "--cache-dir", str(tmp_path / "blocks")]) == 1
    shown = capsys.readouterr().out
    assert "FAIL" in shown
    assert "lock: Choose another disk." in shown
    assert "1 of 1 checks FAILED" in shown


def test_a_check_that_breaks_has_failed_and_says_so_without_a_path():
    def broken():
        raise OSError(28, "No space left on device", "/home/zaphodb/blocks")

    (found,) = attempt("damage", broken)
    assert (found.verdict, found.said) == ("fail", "it broke: No space left on device")
    assert found.advice


@pytest.mark.parametrize("columns", [80, 50])
def test_the_page_is_readable_in_a_narrow_terminal(proof, columns):
    checks = tuple(Check(**check) for check in proof["seen"]["checks"])
    failed = Check("lock", "fail", "a lock held here did not keep another process out", {}, "Choose another disk.")
    facts = {"model": "tiny", "machine": str(proof["seen"]["machine"]), "device": "CPU"}
    console = Console(width=columns, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(prove_page((Group("all", (*checks, failed)),), facts, 12.0))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert sum(line.startswith(tuple(CHECKS)) for line in lines) >= len(CHECKS) + 1
    assert any("FAIL" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prove", "no-such-model"], "no model 'no-such-model' here"),
        (["some-model"], "mlxkv doctor --prove some-model"),
        (["--report", "proof.md"], "with --prove only"),
        (["--prove", "--report", "/no/such/directory/proof.md"], "make it first"),
    ],
)
def test_wrong_usage_and_a_missing_model_are_one_sentence(arguments, said, tmp_path, capsys):
    assert run(["doctor", *arguments, "--cache-dir", str(tmp_path / "blocks")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    model = save_model(tmp_path / "model", tiny_llama())
    command = [sys.executable, "-m", "mlxkv_cli.main", "doctor", "--prove", str(model)]
    home = tmp_path / "home"
    environment = {
        **os.environ,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home),
        "MLXKV_CACHE_DIR": str(home / "blocks"),
    }
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 120
        while not list(home.glob(".mlxkv-prove-*/*")) and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert not list(home.glob(".mlxkv-prove-*"))
    assert not list(home.glob("blocks*"))


def test_doctor_alone_mentions_it_once(capsys, tmp_path):
    run(["doctor", "--cache-dir", str(tmp_path)])
    assert capsys.readouterr().out.count("--prove") == 1


def test_names_go_from_a_report_and_words_that_hold_them_stay(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("USER", "ann")
    monkeypatch.setattr(platform, "node", lambda: "anns-mac.local")
    text = "in /home/ann/blocks, of ann on anns-mac.local and ANNS-MAC, cannot, annual"
    assert without_names(text) == "in ~/blocks, of (user) on (host) and (host), cannot, annual"


def test_a_bar_in_what_was_seen_does_not_break_the_table():
    group = Group("all", (Check("place", "ok", "a|b\nc"),))
    assert "| place | ok | a\\|b c |" in markdown([group], {})
