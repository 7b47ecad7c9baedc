"""A process of its own for `test_restore`: ask for prompts whose blocks another process left on the SSD.

    python restart.py PRECISION CACHE_DIR OUT_DIR ARCHITECTURE:TOKENS ...

Writes one .npz a prompt: `held`, `logits`, `restored/...` and `state/...`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from driving import run_warm, some_tokens
from tiny import ALL_TINY, build_tiny, in_precision

from mlxkv import BlockCache


def main(precision: str, cache_dir: str, out_dir: str, *asked: str) -> None:
    for architecture in sorted({one.partition(":")[0] for one in asked}):
        module = in_precision(build_tiny(ALL_TINY[architecture]()), precision)
        with BlockCache.open(module, cache_dir=cache_dir, hot="64MiB", cold="1GiB") as cache:
            for tokens in (int(one.partition(":")[2]) for one in asked if one.startswith(f"{architecture}:")):
                warm = run_warm(cache, module, some_tokens(tokens, seed=tokens))
                arrays = {f"restored/{path}": array for path, array in warm.restored.items()}
                arrays |= {f"state/{path}": array for path, array in warm.state.items()}
                np.savez(Path(out_dir, f"{architecture}-{tokens}.npz"), held=warm.held, logits=warm.logits, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
