"""The one hook into a loaded model: attention over a `SharedPrefixCache` goes to the cache, all else to mlx-lm.

mlx-lm's models call `cache.update_and_fetch` and then `scaled_dot_product_attention(q, k, v, cache=...)` by a name that
each model file imports from `mlx_lm.models.base`. `Dispatch` replaces that name in the files a model's layers come
from. A model of another architecture (latents, windows, sinks, attention written out) runs too, without the hook: the
cache then puts each row's keys together for one layer's step, and mlx-lm's own attention follows.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxkv.attention.shared_prefix import Batch, SharedPrefixCache, begin
from mlxkv.core.platform import keep_open_files_limit

with keep_open_files_limit():
    from mlx_lm.models import base

SERVED = (
    "cohere", "dots1", "ernie4_5", "gemma", "glm4", "glm4_moe", "granite", "helium", "hunyuan_v1_dense", "internlm2",
    "llama", "mimo", "mistral3", "mixtral", "olmo2", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen2_vl",
    "qwen3", "qwen3_moe", "qwen3_vl", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
"""Architectures whose attention goes to the cache: what it returns reaches attention untouched, the mask is causal.
A test runs each of them."""

GROUPED_MASKS = ("gemma2",)
"""Architectures that write attention out with an axis of its own for the heads of a group, in the mask too."""

ATTENTION = "scaled_dot_product_attention"
"""The name that model files call."""

_installed: Counter[str] = Counter()  # model file -> open hooks; the name is a global of that file, whoever loaded it


class Dispatch:
    """The hook for one loaded model, from the time it is made until `close`; a context manager.

    Models of the same architecture share their file: the name goes back when the last hook on it is closed. Nothing
    changes for caches that are not `SharedPrefixCache`s. Owner: the thread that owns MLX.
    """

    def __init__(self, module: nn.Module) -> None:
        """Install.

        Args:
            module: a model of mlx-lm's, loaded or made.
        """
        self.architecture = type(module).__module__.rpartition(".")[2]
        self.served = self.architecture in SERVED
        self._grouped_mask = self.architecture in GROUPED_MASKS and _has_groups(module)
        self._files = attention_files(module) if self.served else []
        for file in self._files:
            if not _installed[file]:
                setattr(sys.modules[file], ATTENTION, shared_attention)
            _installed[file] += 1

    def begin(self, prompt_cache: Sequence[Any]) -> Batch:
        """A batch of one sequence for this model; as `shared_prefix.begin`."""
        return begin(prompt_cache, hooked=self.served, grouped_mask=self._grouped_mask)

    def close(self) -> None:
        """Put mlx-lm's function back. Batches of this model cannot run any more. Closing twice does nothing."""
        for file in self._files:
            _installed[file] -= 1
            if not _installed[file]:
                setattr(sys.modules[file], ATTENTION, base.scaled_dot_product_attention)
        self._files = []

    def __enter__(self) -> Dispatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def shared_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """What stands in for mlx-lm's `scaled_dot_product_attention`, with its arguments."""
    if isinstance(cache, SharedPrefixCache) and not cache.alone:
        return cache.attend(queries, scale=scale)
    theirs: Callable[..., mx.array] = base.scaled_dot_product_attention
    return theirs(queries, keys, values, cache, scale, mask, sinks)


def attention_files(module: nn.Module) -> list[str]:
    """The names of the model files of a module's layers that import mlx-lm's attention by name."""
    names = {type(layer).__module__ for layer in module.modules()}
    return sorted(name for name in names if ATTENTION in vars(sys.modules[name]))


def _has_groups(module: nn.Module) -> bool:
    """Whether query heads share KV heads."""
    return bool(module.args.num_attention_heads != module.args.num_key_value_heads)
