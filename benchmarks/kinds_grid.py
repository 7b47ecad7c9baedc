"""Play every kind of cache against mlx-lm's own, in full, and write the tables of docs/kinds.md.

    python benchmarks/kinds_grid.py [--only NAME ...] [--rows FILE] [--page docs/kinds.md]

The scenes are those of tests/prompt_cache/test_kinds.py with every prompt length, and those of
tests/prompt_cache/test_every_architecture.py. Takes about ten minutes on one core. Exits with 1 when something differs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["MLXKV_BLAS"] = "none"  # equality to the bit; a tuned BLAS picks kernels by shape
HERE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HERE), str(HERE / "tests"), str(HERE / "tests" / "models")]

import kinds  # noqa: E402 - the tests' own scenes, found above
from test_every_architecture import NOT_BUILT, PLAYED, UNCACHED  # noqa: E402
from test_kinds import ARCHITECTURES  # noqa: E402

CASES = ("resend", "extend by 5", "extend by 70", "branch at 40", "branch at 100")
REASONS = {
    "bitnet": "not played: its layers need a Metal kernel",
    "muse_spark": "not played: its attention needs a Metal kernel",
    "olmo": "not played: its file needs the package ai2-olmo",
    "phi3small": "not played: its forward pass corrupts the heap of mlx 0.32.4 on a CPU",
    "prism_hadamard_qwen35": "not played: it exists only as a packed 2-bit model",
    "deepseek_v41": "not kept: its cache is a class of its own, `LayerCache`; it runs uncached and says so",
}
assert REASONS.keys() >= NOT_BUILT | UNCACHED


def full(name: str, directory: Path) -> str:
    """The row of one architecture: each case with how often it was played and the largest difference."""
    module = kinds.build(kinds.CONFIGS[name])
    every = kinds.lengths(module)
    scenes = [kinds.play(module, name, tokens, directory) for tokens in every]
    kinds.play_in_a_new_process(scenes, directory / "process")
    worst: dict[str, list[float]] = {case: [] for case in CASES}
    for scene in scenes:
        kinds.check_answer(scene.first, scene.run, exact=True)
        for tier in scene.visits:
            for case, difference in kinds.check_scene(scene, tier).items():
                worst[case].append(difference)
    cells = [f"{len(found)} {_difference(max(found))}" for found in worst.values()]
    prompts = ", ".join(map(str, sorted(every)))
    return f"| `{name}` | {kinds.caches_of(module)} | {prompts} | {' | '.join(cells)} |"


def short(name: str, directory: Path) -> str:
    """The row of one architecture in the short scene: where each request resumed."""
    seen = kinds.play_short(name, directory)
    held = [
        f"{seen.held[case]}" for case in ("resend", "cold resend", "extend to 300", "branch at 20", "branch at 100")
    ]
    difference = "= where cut alike" if name in kinds.CUTS_MATTER else _difference(seen.worst)
    return f"| `{name}` | {seen.caches} | {seen.checkpoint_bytes:,} | {' | '.join(held)} | {difference} |"


def _difference(worst: float) -> str:
    return "=" if worst == 0 else f"{worst:.0e}"


def table(head: tuple[str, ...], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="*", help="play these architectures and print their rows")
    parser.add_argument("--page", metavar="FILE", type=Path, help="write the tables into this page, below its marker")
    parser.add_argument("--rows", metavar="FILE", type=Path, help="keep rows in this file, and go on from those in it")
    asked = parser.parse_args()
    rows = json.loads(asked.rows.read_text()) if asked.rows and asked.rows.exists() else {"full": {}, "short": {}}
    failed = []
    for kind, play, names in (("full", full, ARCHITECTURES), ("short", short, PLAYED)):
        for name in names:
            if name in rows[kind] or (asked.only and name not in asked.only):
                continue
            with tempfile.TemporaryDirectory() as directory:
                try:
                    rows[kind][name] = play(name, Path(directory))
                except AssertionError as error:
                    failed.append(name)
                    print(f"| `{name}` | FAILED: {error} |", flush=True)
                    continue
            print(rows[kind][name], flush=True)
            if asked.rows:
                asked.rows.write_text(json.dumps(rows, indent=1))
    if asked.page is not None and not asked.only and not failed:
        in_short = [*rows["short"].values(), *(f"| `{name}` | {why} |" for name, why in REASONS.items())]
        _write(asked.page, list(rows["full"].values()), sorted(in_short, key=str.casefold))
    return 1 if failed else 0


def _write(page: Path, in_full: list[str], in_short: list[str]) -> None:
    text = page.read_text(encoding="utf-8")
    marker = "<!-- made by benchmarks/kinds_grid.py; what follows is written over -->\n"
    head, found, _ = text.partition(marker)
    if not found:
        raise SystemExit(f"{page} has no marker line")
    versions = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlx-lm", "mlx"))
    full_head = ("architecture", "mlx-lm keeps", "prompts", *CASES)
    short_head = (
        "architecture", "mlx-lm keeps", "state, bytes", "resend", "cold resend", "extend 150 to 300", "branch at 20",
        "branch at 100", "difference",
    )  # fmt: skip
    parts = [
        f"Made with {versions}, float32, CPU, the reference BLAS.",
        "",
        "### Every case",
        "",
        "How often each case was played (prompts x tiers: hot, cold, a new process) and the largest difference of"
        " log-probabilities from a run without mlxkv; `=` is none, to the bit.",
        "",
        table(full_head, in_full),
        "",
        "### Every architecture",
        "",
        "At which token each request resumed, after a prompt of 150 tokens (300 for the branches).",
        "",
        table(short_head, in_short),
        "",
    ]
    page.write_text(head + marker + "\n" + "\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
