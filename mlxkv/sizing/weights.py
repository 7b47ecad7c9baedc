"""A model's weights as numbers: built from its config, in the precision asked for, nothing evaluated.

The rules are mlx-lm's own (`mlx_lm.convert` for a quantisation that is asked for, `utils.load_model` for one that the
config states), so the bytes are those of the model that mlx-lm would load.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxkv.core.errors import ModelError, UsageError
from mlxkv.sizing.architecture import CONFIG_FAULTS, make_model, sentence, traced_module
from mlxkv.sizing.config import Config, check_config, text_level

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)
_GROUP_SIZES = (16, *AFFINE_GROUP_SIZES)
_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
_PACKED_PARTS = ("scales", "biases", "global_scale")

Predicate = Callable[[str, nn.Module], "bool | dict[str, Any]"]


@dataclass(frozen=True)
class WeightSpec:
    """The precision the user asks for.

    Attributes:
        bits: 2 to 8 for affine quantisation, 16 or 32 for none.
        group_size: weights that share a scale and a bias; only quantised weights have groups.
    """

    bits: int
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.bits not in (*AFFINE_BITS, 16, 32):
            raise UsageError(f"weights of {self.bits} bits do not exist; use 2, 3, 4, 5, 6, 8, 16 or 32.")
        if self.group_size not in AFFINE_GROUP_SIZES:
            raise UsageError(f"MLX has no groups of {self.group_size} weights; use 32, 64 or 128.")


@runtime_checkable
class _ChoosesQuantization(Protocol):
    """mlx-lm's optional hook: which layers `convert` quantises, and how."""

    @property
    def quant_predicate(self) -> Predicate: ...


@runtime_checkable
class _Sanitizes(Protocol):
    """mlx-lm's optional hook: a checkpoint's arrays to the module's."""

    def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]: ...


@runtime_checkable
class _Quantizable(Protocol):
    """A layer MLX can quantise."""

    def to_quantized(self, **settings: Any) -> nn.Module: ...


def build(config: Mapping[str, Any], *, weights: WeightSpec | None = None) -> nn.Module:
    """The model of a config.json as mlx-lm would load it, its parameters shapes and dtypes only.

    Args:
        config: a config.json's object, checked here.
        weights: the precision to quantise or cast to; None for what the config states.

    Returns:
        A module for tracing. Its random parameters are not evaluated: reading shapes costs nothing, running it would
        draw every weight.

    Raises `ModelError` naming the key that is missing or wrong.
    Cost: 0.02 to 0.5 s and at most some 100 MiB, 671 B parameters included.
    """
    checked = check_config(config)
    module = make_model(checked)
    module.eval()
    _drop_tied_head(module, checked)
    _cast(module, _dtype(checked, weights))
    if weights is None:
        _quantize_as_published(module, checked)
    elif weights.bits in AFFINE_BITS:
        _quantize(module, {"bits": weights.bits, "group_size": weights.group_size})
    return module


def count_params(module: nn.Module) -> int:
    """Parameters of a module, quantised weights counted one by one and their scales and biases not at all."""
    bits = {path: layer.bits for path, layer in module.named_modules() if "scales" in layer}
    return sum(_size(name, array, bits) for name, array in tree_flatten(module.parameters()))


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters, scales and biases included."""
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def _size(name: str, array: mx.array, bits: Mapping[str, int]) -> int:
    owner, _, part = name.rpartition(".")
    if owner not in bits:
        return int(array.size)
    if part in _PACKED_PARTS:
        return 0
    return int(array.size) * 32 // bits[owner] if part == "weight" else int(array.size)


def _dtype(config: Config, weights: WeightSpec | None) -> mx.Dtype:
    """The floating dtype of what is not quantised; the KV cache follows it."""
    level = text_level(config)
    stated = next((level[key] for key in ("torch_dtype", "dtype") if level.get(key) in tuple(_DTYPES)), "bfloat16")
    if weights is not None and weights.bits == 32:
        return mx.float32
    if weights is not None and weights.bits == 16 and stated == "float32":
        return mx.bfloat16
    return _DTYPES[stated]


def _cast(module: nn.Module, dtype: mx.Dtype) -> None:
    """Cast every floating parameter. The few that mlx-lm's `cast_predicate` spares (a router's bias, a decay rate) are
    cast too: at most 50 KB a model, and no cache's dtype depends on them."""

    def cast(array: mx.array) -> mx.array:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array

    module.update(tree_map(cast, module.parameters()))


def _drop_tied_head(module: nn.Module, config: Config) -> None:
    """Let the class drop an output head that checkpoints do not hold.

    Gemma 3 and recurrent_gemma build a head and drop it in `sanitize` when the checkpoint has none, so they are shown
    a checkpoint without one, unless the config says that the head is not tied.
    """
    if text_level(config).get("tie_word_embeddings") is False:
        return
    arrays = dict(tree_flatten(module.parameters()))
    others = {name: array for name, array in arrays.items() if "lm_head" not in name.split(".")}
    if len(others) < len(arrays) and isinstance(module, _Sanitizes):
        module.sanitize(others)


def _quantize(
    module: nn.Module,
    settings: dict[str, Any],
    *,
    layers: Mapping[str, Any] = MappingProxyType({}),
    wanted: Predicate | None = None,
) -> None:
    """Quantise in place with `settings` (bits, group_size, mode); `layers` overrides them by path (False: leave).

    Raises ValueError for groups that MLX does not have: no layer would divide into them, and all would stay dense.
    """
    if settings["group_size"] not in _GROUP_SIZES:
        raise ValueError(f"group_size is {settings['group_size']!r}, and MLX has groups of 16, 32, 64 and 128")
    hook = module.quant_predicate if isinstance(module, _ChoosesQuantization) else None
    choose: Predicate = wanted or hook or (lambda _path, _layer: True)

    def choice(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if path in layers:
            chosen = layers[path]
            return dict(chosen) if isinstance(chosen, dict) else bool(chosen)
        if not isinstance(layer, _Quantizable) or _width(layer) % settings["group_size"]:
            return False
        return choose(path, layer)

    nn.quantize(module, class_predicate=choice, **settings)


def _width(layer: nn.Module) -> int:
    """Weights in a row, the axis that is cut into groups."""
    return int(layer["weight"].shape[-1])


def _quantize_as_published(module: nn.Module, config: Config) -> None:
    """Apply the quantisation the config states: MLX's own, or one that mlx-lm reads from other tools' checkpoints."""
    level = text_level(config)
    own, foreign = config.get("quantization"), config.get("quantization_config") or level.get("quantization_config")
    try:
        if own is not None:
            settings = {key: own[key] for key in ("group_size", "bits")} | {"mode": own.get("mode", "affine")}
            _quantize(module, settings, layers=own)
        elif foreign is not None:
            _quantize_foreign(module, foreign)
    except (*CONFIG_FAULTS, re.error) as error:
        what = f"lacks the key {error}" if isinstance(error, KeyError) else f"cannot be used: {sentence(error)}"
        raise ModelError(f"the quantization in config.json {what}.") from error


def _quantize_foreign(module: nn.Module, stated: dict[str, Any]) -> None:
    """As `mlx_lm.utils.load_model`; which layers are packed only their checkpoint knows, so its list of exceptions
    and the rule of these formats (linear layers but the head) stand for it."""
    if stated["quant_method"] == "bitnet":
        vars(traced_module("bitlinear_layers"))["bitnet_quantize"](module, stated)
        return
    settings = _foreign_settings(stated)
    if settings is None:
        return
    left_out = [
        *_names(stated, "modules_to_not_convert"),
        *_names(stated, "ignore"),
        *_names(stated, "exclude_modules"),
    ]

    def wanted(path: str, layer: nn.Module) -> bool:
        return not isinstance(layer, nn.Embedding) and "lm_head" not in path and not _matches(path, left_out)

    _quantize(module, settings, wanted=wanted)


def _foreign_settings(stated: dict[str, Any]) -> dict[str, Any] | None:
    """MLX's quantisation for another tool's, or None where mlx-lm unpacks it on load."""
    method = stated["quant_method"]
    mxfp4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    mxfp8 = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    nvfp4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    if method == "fp8":
        packed = stated.get("scale_fmt") == "ue8m0" and stated.get("weight_block_size") == [32, 32]
        return mxfp8 if packed else None
    if method in ("awq", "gptq"):
        return {"group_size": stated.get("group_size", 128), "bits": stated.get("bits", 4)}
    if method == "modelopt":
        return nvfp4 | {"group_size": stated.get("quantization", stated).get("group_size", 16)}
    if method == "compressed-tensors":
        method = stated["format"]
    known = {
        "mxfp4": mxfp4, "mxfp4-pack-quantized": mxfp4, "mxfp8": mxfp8, "nvfp4-pack-quantized": nvfp4,
        "pack-quantized": {"group_size": 32, "bits": 4, "mode": "affine"},
    }  # fmt: skip
    if method not in known:
        raise ValueError(f"mlx-lm does not load {method!r}; give the precision yourself")
    return known[method]


def _names(stated: dict[str, Any], key: str) -> list[str]:
    return list(stated.get(key) or ())


def _matches(path: str, patterns: list[str]) -> bool:
    """Whether a path is one of the names, wildcards (`*`) or regular expressions (`re:`), or lies below one."""
    return any(
        re.match(pattern[3:], path) if pattern.startswith("re:") else fnmatch.fnmatch(path, f"*{pattern}*")
        for pattern in patterns
    )
