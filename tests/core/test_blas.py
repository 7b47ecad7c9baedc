"""No BLAS is trusted unseen: what is loaded has multiplied rightly in a child, on this CPU, in this very file.

The libraries that crash, lie and hang are real ones, compiled here; the older CPUs are emulated by qemu-user.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mlxkv.core import blas, trial
from mlxkv.core.blas import choose_blas, load_fast_blas, try_blas
from mlxkv.core.errors import UnusableMlxError

if sys.platform != "linux":
    pytest.skip("macOS brings Accelerate", allow_module_level=True)

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
EMULATOR = shutil.which("qemu-x86_64") if platform.machine() == "x86_64" else None
GEMM = """
void cblas_sgemm(int o, int ta, int tb, int m, int n, int k, float x, const float* a, int la,
                 const float* b, int lb, float y, float* c, int lc) {{ {body} }}
"""
BODIES = {
    "crashes": "__builtin_trap();",
    "lies": "for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) c[i * lc + j] = 1;",
    "hangs": "for (volatile int i = 1; i; ) ;",
    "kills": '__asm__("ud2");' if platform.machine() == "x86_64" else "__builtin_trap();",
    "transposes wrongly": """
        for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) {
            float s = 0; for (int p = 0; p < k; p++) s += a[i * la + p] * b[p * lb + j]; c[i * lc + j] = s; }""",
    "is right": """
        for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) {
            float s = 0;
            for (int p = 0; p < k; p++)
                s += (ta == 111 ? a[i * la + p] : a[p * la + i]) * (tb == 111 ? b[p * lb + j] : b[j * lb + p]);
            c[i * lc + j] = s; }""",
}


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.delenv("MLXKV_BLAS", raising=False)
    monkeypatch.setattr(blas, "_NVIDIA", ())


def library(directory: Path, does: str) -> str:
    """A library whose `cblas_sgemm` does that."""
    if COMPILER is None:
        pytest.skip("no C compiler on this machine")
    source, path = directory / "blas.c", directory / f"lib{does.replace(' ', '-')}.so"
    source.write_text(GEMM.format(body=BODIES[does]))
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", str(path), str(source)], check=True)
    return str(path)


def run(code: str, *, under: list[str] | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new Python process, maybe under an emulator."""
    return subprocess.run(
        [*(under or []), sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


PRODUCT = """
    import mlxkv
    from mlxkv.core.blas import load_fast_blas
    report = load_fast_blas()
    import mlx.core as mx
    import numpy as np
    mx.set_default_device(mx.cpu)
    a = np.arange(300 * 200, dtype=np.float32).reshape(300, 200) % 7 - 3
    assert np.array_equal(np.array(mx.array(a) @ mx.array(a).T), a.astype(int) @ a.T.astype(int))
    print(report.name, report.path, *(trial.verdict for trial in report.tried), sep="|")
"""


def test_the_module_does_not_import_mlx_or_numpy() -> None:
    done = run("import sys, mlxkv; print('mlx.core' in sys.modules, 'numpy' in sys.modules)", MLXKV_BLAS="")
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_the_library_is_looked_for_once() -> None:
    assert load_fast_blas() is load_fast_blas()


@pytest.mark.parametrize(
    ("does", "verdict"),
    [
        ("crashes", "died by SIG"),
        ("kills", "died by SIG"),
        ("lies", "computes wrong numbers"),
        ("transposes wrongly", "computes wrong numbers"),
        ("is right", "passed"),
    ],
)
def test_a_library_is_judged_by_what_it_computes(does: str, verdict: str, tmp_path: Path) -> None:
    assert try_blas(library(tmp_path, does), "here").verdict.startswith(verdict)


def test_a_library_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_S", 0.5)
    assert try_blas(library(tmp_path, "hangs"), "here").verdict == "hung"


def test_a_library_that_another_one_needs_is_tried_again_once_it_may_be_there(tmp_path: Path) -> None:
    broken = tmp_path / "libopenblas.so.0"
    broken.write_bytes(b"not a library")
    assert try_blas(str(broken), "here").verdict.startswith("cannot be used")
    assert not trial._load()


def test_a_library_without_a_product_is_not_taken_for_a_blas() -> None:
    assert try_blas("libm.so.6", "here").verdict == "has no cblas_sgemm"


def test_a_library_is_not_mistaken_for_another_one_whose_name_begins_alike(tmp_path: Path) -> None:
    beside = shutil.copy(library(tmp_path, "is right"), tmp_path / "libmkl_rt.so.3")
    ctypes.CDLL(str(beside))
    assert Path(blas._mapped_path("libm.so.6")).name.startswith("libm.so")


def test_the_next_candidate_is_taken_and_what_each_did_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashes, right = library(tmp_path, "crashes"), library(tmp_path, "is right")
    monkeypatch.setattr(blas, "_candidates", lambda *_: [(crashes, "the wheel"), (right, "the system's")])
    report = choose_blas()
    assert (report.path, report.fix) == (right, None)
    assert [(one.origin, one.passed) for one in report.tried] == [("the wheel", False), ("the system's", True)]


def test_where_none_passes_it_is_named_with_the_command_that_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes = library(tmp_path, "crashes")
    monkeypatch.setattr(blas, "_candidates", lambda *_: [(crashes, "the wheel cmeel-openblas")])
    report = choose_blas()
    assert report.name is None
    assert report.why.startswith("the wheel cmeel-openblas: died by SIG")
    assert "install" in report.fix
    assert "cmeel" not in report.fix
    assert report.warning.endswith(report.fix)


def test_a_verdict_is_remembered_for_this_file_and_this_cpu_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, tried = library(tmp_path, "is right"), []

    def multiply(path: str) -> str:
        tried.append(path)
        return "passed"

    monkeypatch.setattr(trial, "run_apart", lambda work: work())
    monkeypatch.setattr(blas, "_multiply", multiply)
    for _ in range(3):
        assert try_blas(right, "here").passed
    assert len(tried) == 1
    os.utime(right, ns=(1, 1))
    try_blas(right, "here")
    assert len(tried) == 2
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    try_blas(right, "here")
    assert len(tried) == 3
    monkeypatch.setattr(trial, "cpu_identity", lambda: ("another",))
    try_blas(right, "here")
    assert len(tried) == 4
    try_blas(right, "here", again=True)
    assert len(tried) == 5


@pytest.mark.parametrize("held", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_memory_is_no_memory(held: bytes, tmp_path: Path) -> None:
    right = library(tmp_path, "is right")
    trial._file().parent.mkdir(parents=True)
    trial._file().write_bytes(held)
    assert try_blas(right, "here").passed
    assert list(json.loads(trial._file().read_text()).values()) == ["passed"]


def test_a_folder_that_cannot_be_written_only_costs_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert try_blas(library(tmp_path, "is right"), "here").passed


def test_a_child_leaves_no_process_no_core_and_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    crashes, before = library(tmp_path, "crashes"), set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        try_blas(crashes, "here", again=True)
    assert set(os.listdir("/proc/self/fd")) == before
    assert not list(tmp_path.glob("core*"))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_none_leaves_mlx_alone_and_nothing_to_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXKV_BLAS", "none")
    report = choose_blas()
    assert (report.name, report.path, report.warning) == (None, None, None)
    assert "MLXKV_BLAS=none" in report.why


def test_after_mlx_it_is_too_late_and_the_report_says_so() -> None:
    done = run("import mlx.core, mlxkv.core.blas as b; print(b.load_fast_blas().fix)", MLXKV_BLAS="")
    assert done.stdout.strip() == "import mlxkv before mlx", done.stderr


def test_with_a_gpu_no_blas_is_loaded_and_nothing_needs_fixing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_NVIDIA", (str(tmp_path),))
    report = choose_blas()
    assert (report.name, report.fix) == (None, None)
    assert "GPU" in report.why


@pytest.mark.parametrize("does", ["crashes", "lies", "is not there"])
def test_a_named_library_that_is_of_no_use_gives_one_warning_and_a_working_program(does: str, tmp_path: Path) -> None:
    named = "/nowhere/libblas.so" if does == "is not there" else library(tmp_path, does)
    code = textwrap.dedent(PRODUCT) + "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import mlxkv'])"
    done = run(code, MLXKV_BLAS=named)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("MLXKV_BLAS=") == 1
    assert "unset MLXKV_BLAS" in done.stderr
    assert named not in done.stdout.split("|")[1]


def test_a_named_library_that_is_right_is_taken_without_a_word(tmp_path: Path) -> None:
    right = library(tmp_path, "is right")
    done = run(PRODUCT, MLXKV_BLAS=right)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("|")[1] == right


def test_what_was_loaded_is_what_the_rest_of_the_process_links_to() -> None:
    code = """
        import ctypes, mlxkv
        from mlxkv.core.blas import load_fast_blas
        path = load_fast_blas().path
        address = lambda library: ctypes.cast(ctypes.CDLL(library).cblas_sgemm, ctypes.c_void_p).value
        print(path is None or address(None) == address(path))
    """
    assert run(code, MLXKV_BLAS="").stdout.strip() == "True"


def test_wheels_are_tried_before_the_system_and_only_when_they_are_there(tmp_path: Path) -> None:
    site, prefix = tmp_path / "site-packages", tmp_path / "prefix"
    assert [origin for _, origin in blas._candidates([str(site)], str(prefix))] == ["the system's OpenBLAS"]
    openblas, mkl = site / "cmeel.prefix" / "lib" / "libopenblas.so.0", prefix / "lib" / "libmkl_rt.so.3"
    for path in (openblas, mkl):
        path.parent.mkdir(parents=True)
        path.touch()
    found = [path for path, _ in blas._candidates(["", str(site)], str(prefix))]
    assert found == [str(mkl), str(openblas), "libopenblas.so.0"]


@pytest.mark.skipif(EMULATOR is None, reason="no qemu-user on this machine, or another CPU than x86-64")
@pytest.mark.parametrize("cpu", ["Haswell", "SandyBridge", "Nehalem"], ids=["no AVX-512", "no AVX2", "no AVX"])
def test_on_an_older_cpu_the_program_multiplies_rightly_with_what_runs_there(cpu: str) -> None:
    done = run(PRODUCT, under=[str(EMULATOR), "-cpu", cpu], MLXKV_BLAS="")
    assert done.returncode == 0, done.stderr
    here = run(PRODUCT, MLXKV_BLAS="")
    assert here.returncode == 0, here.stderr
    passed_here = here.stdout.strip().split("|")[-1:] == ["passed"]
    assert not passed_here or "passed" in done.stdout or "died by SIGILL" in done.stdout
    assert run(PRODUCT, MLXKV_BLAS="").stdout == here.stdout, "a verdict of another CPU was used on this one"


def test_where_mlx_dies_importing_it_says_so_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_run_mlx", lambda: os.abort())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    blas.check_mlx()
    with pytest.raises(UnusableMlxError, match=r"MLX died by SIGABRT on this CPU.*Install"):
        __import__("mlx.core")


def test_a_command_on_such_a_machine_ends_with_the_sentence_and_not_by_a_signal(tmp_path: Path) -> None:
    site = tmp_path / "sitecustomize.py"
    forget = "import mlxkv.core.trial as trial\ntrial._recall = lambda key: None\n"
    site.write_text(f"import os, mlxkv.core.blas as blas\n{forget}blas._run_mlx = os.abort\nblas.check_mlx()\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = (
        "import sys; from mlxkv_cli.__main__ import main; sys.argv[1:] = ['explain', 'lab', '1']; sys.exit(main())"
    )
    done = run(command, PYTHONPATH=path, MLXKV_BLAS="none")
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "MLX died by SIGABRT on this CPU" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_remembered_verdict_costs_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = library(tmp_path, "is right")
    assert try_blas(right, "here").passed
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a child was started"))
    assert try_blas(right, "here").passed
