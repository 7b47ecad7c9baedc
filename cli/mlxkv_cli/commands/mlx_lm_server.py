"""`mlxkv mlx-lm-server`: Apple's own server with our tiers behind it."""

from __future__ import annotations

import typer

from mlxkv_cli.caching import cache_config, warnings_on
from mlxkv_cli.options import CacheDir, Cold, Hot, Log, NoCold
from mlxkv_cli.output import Output


def mlx_lm_server(
    context: typer.Context,
    cache_dir: CacheDir = None,
    hot: Hot = None,
    cold: Cold = None,
    no_cold: NoCold = False,
    log: Log = None,
) -> None:
    """Run mlx_lm.server, whose prompts then outlive it: every option that is not listed here goes to it, as --model.

    For those who want Apple's server as it is; `mlxkv serve` does more.
    """
    from mlxkv.server.mlx_lm_server import run

    output = Output()
    with warnings_on(output):
        lost = run(context.args, cache_config(cache_dir, hot, cold, no_cold, log))
    if lost:
        output.warn(f"{lost} blocks did not reach the SSD and will be computed again")
