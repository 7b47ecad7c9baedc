"""`mlxkv demo`: the whole idea in one table."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Column, Table

from mlxkv.core.errors import MlxkvError
from mlxkv.core.platform import default_cache_dir
from mlxkv.core.units import GIB, format_bytes, format_seconds
from mlxkv_cli.caching import cache_config, open_cache
from mlxkv_cli.options import CacheDir, Cold, Hot, Json, Log
from mlxkv_cli.output import Output

ANY_BYTES = 2**62

# MLX and mlxkv.models are imported inside the commands: `mlxkv --help` must not wait for them.


def demo(
    cache_dir: CacheDir = None,
    hot: Hot = None,
    cold: Cold = None,
    log: Log = None,
    as_json: Json = False,
    tokens: Annotated[int | None, typer.Option("--tokens", hidden=True, help="About how long the prompt is.")] = None,
    restart: Annotated[str, typer.Option("--restart", hidden=True, help="The salt of the run to find again.")] = "",
) -> None:
    """Compute a prompt, then find it again: in memory, and from a new process on the SSD.

    Uses the demo model (SmolLM2-135M-Instruct) and a text of about 1,000 tokens.
    """
    from mlxkv.engine.demo import PROMPT_TOKENS, SLOW_PROMPT_TOKENS, demo_prompt, demo_run, is_slow, warm_up
    from mlxkv.models.loader import DEMO, load

    output = Output(json=as_json)
    directory = cache_dir or default_cache_dir().parent / "demo"
    slow = is_slow() and tokens is None
    wanted = tokens or (SLOW_PROMPT_TOKENS if slow else PROMPT_TOKENS)
    if slow and not restart:
        output.say(
            f"mlxkv: no fast BLAS was found, so the prompt has {SLOW_PROMPT_TOKENS} tokens and not {PROMPT_TOKENS:,};"
            " `mlxkv doctor` says how to get one."
        )
    if not restart:
        output.say(f"mlxkv: loading {DEMO} ...", "dim")
    model = load(DEMO)
    prompt = demo_prompt(model, wanted)
    warm_up(model)
    # A directory that somebody named may hold more than the demo's own: nothing of it may go for the demo.
    room = 2 * GIB if cache_dir is None else ANY_BYTES
    config = cache_config(directory, hot or 2 * GIB, cold or room, no_cold=False, log=log)
    if restart:
        with open_cache(model, config, output) as cache:
            run = demo_run("restart", model, cache, prompt, salt=restart)
        print(json.dumps(vars(run)))
        return

    # A salt of its own makes the first run cold, whatever earlier demos left behind.
    salt = secrets.token_hex(8)
    if cache_dir is None:
        _forget_earlier(directory)
    with open_cache(model, config, output) as cache:
        block_bytes = cache.layout.block_bytes
        with output.progress("computing the prompt", total=len(prompt)) as advance:
            seen = 0

            def progress(done: int, _total: int) -> None:
                nonlocal seen
                advance(done - seen)
                seen = done

            runs = [vars(demo_run("cold", model, cache, prompt, salt=salt, on_progress=progress))]
        runs.append(vars(demo_run("hot", model, cache, prompt, salt=salt)))
    output.say("mlxkv: starting a new process ...", "dim")
    runs.append(_restarted(salt, wanted, directory))
    equal = len({run["text"] for run in runs}) == 1
    output.result(
        _shown(runs, len(prompt), block_bytes, equal, directory),
        block_bytes=block_bytes,
        block_tokens=64,
        prompt_tokens=len(prompt),
        runs=[{k: v for k, v in run.items() if k != "restore_s"} for run in runs],
        outputs_equal=equal,
        cache_dir=directory,
    )
    if not equal:
        raise typer.Exit(1)


def _restarted(salt: str, tokens: int, directory: Path) -> dict[str, Any]:
    """The same prompt in a process that never saw it."""
    options = ["--restart", salt, "--tokens", str(tokens), "--cache-dir", str(directory)]
    command = [sys.executable, "-m", "mlxkv_cli.main", "demo", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise MlxkvError("the new process failed (its own words are above); run `mlxkv doctor`.")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _forget_earlier(directory: Path) -> None:
    """Delete the blocks of earlier demos; the demo's own folder holds nothing else."""
    from mlxkv.cache.block_log import BlockLog
    from mlxkv.cache.cold import opened

    if directory.is_dir():
        with opened(directory, BlockLog(), change=True) as tier:
            tier.delete(tier.rows(), reason="demo")


def _shown(runs: list[dict[str, Any]], prompt_tokens: int, block_bytes: int, equal: bool, directory: Path) -> Group:
    names = {"cold": "cold: computed", "hot": "hot: from memory", "restart": "restart: from the SSD"}
    table = Table(
        "run", *(Column(title, justify="right") for title in ("reused", "computed", "first token", "restored")),
        box=None, pad_edge=False, header_style="bold",
    )  # fmt: skip
    for run in runs:
        speed = ""
        if run["restored_bytes"]:
            speed = f"{format_bytes(run['restored_bytes'])}, {run['restored_bytes'] / run['restore_s'] / 1e6:,.0f} MB/s"
        table.add_row(
            names[run["name"]],
            f"{run['hot_tokens'] + run['cold_tokens']:,}",
            f"{run['computed_tokens']:,}",
            format_seconds(run["ttft_s"]),
            speed,
        )
    same = "The three replies are equal" if equal else "The replies DIFFER, which must not be; please report it"
    return Group(
        f"prompt of {prompt_tokens:,} tokens, blocks of 64 tokens with {format_bytes(block_bytes)} each\n",
        table,
        f"\n{same}: {runs[0]['text'].strip()!r}",
        f"Blocks are in {directory}",
    )
