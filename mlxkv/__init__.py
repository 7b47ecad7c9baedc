"""mlxkv: a KV cache for language models on Apple silicon that never computes the same prompt twice.

import mlx_lm
from mlxkv import BlockCache

model, tokenizer = mlx_lm.load("path or hub id")
cache = BlockCache.open(model, tokenizer=tokenizer)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlxkv.core.blas import check_mlx, load_fast_blas

if TYPE_CHECKING:
    from mlxkv.models.loader import load
    from mlxkv.prompt_cache.block_cache import BlockCache

__all__ = ["BlockCache", "load"]
__version__ = "0.1.0"

load_fast_blas()  # before anything imports mlx: the first library with cblas_sgemm wins
check_mlx()

_HOMES = {"BlockCache": "mlxkv.prompt_cache.block_cache", "load": "mlxkv.models.loader"}


def __getattr__(name: str) -> Any:
    """Import what needs MLX only when it is asked for: `mlxkv --help` does not wait for it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mlxkv' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
