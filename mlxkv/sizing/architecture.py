"""mlx-lm's own class for a config, built lazily and never to be run: tracing needs shapes, not weights.

`import mlx_lm` takes 1.2 s (transformers) and lowers the process's limit of open files; its model files need neither.
They are imported here under a private package name: the same files, but module objects of their own, so that nothing
done to them for tracing can reach a model that runs, and `sys.modules["mlx_lm"]` is left alone.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.machinery
import importlib.util
import inspect
import io
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxkv.core.errors import ModelError
from mlxkv.sizing.config import Config, text_level

_ALIAS = "_mlxkv_traced_mlx_lm"
_MISSING_ARGUMENTS = re.compile(r"missing \d+ required positional arguments?: (.+)")
_QUOTED = re.compile(r"'(\w+)'")
_ATTRIBUTE = re.compile(r"\b(?:args|config)\.(\w+)")

CONFIG_FAULTS = (
    TypeError, ValueError, KeyError, AttributeError, IndexError, AssertionError, ArithmeticError, NotImplementedError,
    RuntimeError,
)  # fmt: skip
"""What mlx-lm's classes, and MLX's shape checks below them, raise on a config they cannot use."""


def make_model(config: Config) -> nn.Module:
    """The model of a checked config: mlx-lm's class, its parameters random, float32 and unevaluated.

    Raises `ModelError` for a model_type mlx-lm does not know and for keys it lacks, naming them.
    Cost: 0.02 to 0.3 s and a few MiB, whatever the model's size.
    """
    if config.get("model_file") is not None:
        raise ModelError(
            f"config.json names its own code (model_file {config['model_file']!r}), which mlxkv never runs."
        )
    model_type: str = config["model_type"]
    architecture = vars(_load(_module_name(config), model_type))
    arguments = architecture["ModelArgs"]
    complete = _complete(config, inspect.signature(arguments).parameters)
    try:
        return architecture["Model"](arguments.from_dict(complete))
    except CONFIG_FAULTS as error:
        raise ModelError(f"config.json of model_type {model_type!r} {_reason(error, complete)}") from error


def sentence(error: BaseException) -> str:
    """What an exception says, without its stop and without the signatures that MLX lists for a wrong argument."""
    return str(error).partition(" The following argument types")[0].partition("\n")[0].rstrip(".: ")


def traced_module(name: str) -> ModuleType:
    """mlx-lm's file `models/<name>.py` as the private copy that `make_model` builds from."""
    with _kernels_stubbed():
        return importlib.import_module(f"{_package()}.models.{name}")


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` for the time of the block."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@cache
def _root() -> Path:
    """The directory of the installed mlx-lm, found without importing it."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.origin is None:
        raise ModelError("mlx-lm is not installed; run `pip install mlx-lm`.")
    return Path(spec.origin).parent


def _package() -> str:
    """The name of the private package, made on first use."""
    if _ALIAS not in sys.modules:
        spec = importlib.machinery.ModuleSpec(_ALIAS, loader=None, is_package=True)
        spec.submodule_search_locations = [str(_root())]
        sys.modules[_ALIAS] = importlib.util.module_from_spec(spec)
    return _ALIAS


@cache
def _remapping() -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """mlx-lm's tables from model_type, and from (model_type, architecture), to file name.

    They stand in `mlx_lm/utils.py`, whose import is the slow one, so the two literals are read from its text.
    """
    tree = ast.parse((_root() / "utils.py").read_text(encoding="utf-8"))
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING")
    }
    return tables["MODEL_REMAPPING"], tables.get("MODEL_ARCHITECTURE_REMAPPING", {})


def _module_name(config: Config) -> str:
    """The file under mlx_lm/models that holds the config's class, by mlx-lm's own rules (`utils._get_classes`)."""
    by_type, by_architecture = _remapping()
    model_type: str = config["model_type"]
    stated = config.get("architectures")
    for architecture in stated if isinstance(stated, list) else [stated]:
        if isinstance(architecture, str) and (model_type, architecture) in by_architecture:
            return by_architecture[model_type, architecture]
    return by_type.get(model_type, model_type)


def _load(name: str, model_type: str) -> ModuleType:
    """The file's module. It must be one that holds a model: a path outside or a helper such as `cache` is not."""
    known = {path.stem: path for path in (_root() / "models").glob("*.py")}
    if name not in known or not _holds_model(known[name]):
        models = [stem for stem, path in known.items() if _holds_model(path)]
        near = difflib.get_close_matches(model_type, sorted({*models, *_remapping()[0]}), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ModelError(f"config.json: model_type {model_type!r} is not one mlx-lm {version('mlx-lm')} knows{hint}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            return traced_module(name)
    except (ImportError, SystemExit) as error:
        reason = said.getvalue().strip() or str(error)
        raise ModelError(f"mlx-lm cannot import its model {name!r}: {reason.rstrip('.')}.") from error


def _holds_model(file: Path) -> bool:
    return "class ModelArgs" in file.read_text(encoding="utf-8")


def _complete(config: Config, fields: Mapping[str, inspect.Parameter]) -> Config:
    """`config` as the class wants it: text settings on top where the class has no text_config, and the two counts
    that may be null or absent, KV heads and head_dim, filled from the others."""
    needed = {name for name, field in fields.items() if field.default is field.empty}
    if "text_config" not in fields:
        return _filled(text_level(config), needed)
    nested = config.get("text_config")
    return config if nested is None else config | {"text_config": _filled(nested, set())}


def _filled(level: Config, needed: set[str]) -> Config:
    """`level` with a null KV head count or head_dim set, and an absent one if it is among the `needed` keys."""
    heads, hidden = level.get("num_attention_heads"), level.get("hidden_size")
    counts = {"num_key_value_heads": heads}
    if isinstance(heads, int) and isinstance(hidden, int):
        counts["head_dim"] = hidden // heads
    wanting = {key for key in counts if level.get(key) is None and (key in level or key in needed)}
    return level | {key: counts[key] for key in wanting}


def _reason(error: Exception, config: Config) -> str:
    """What a class's exception says about its config, as the end of a sentence."""
    if missing := _MISSING_ARGUMENTS.search(str(error)):
        return f"lacks {_listed(_QUOTED.findall(missing[1]))}."
    if isinstance(error, KeyError):
        return f"lacks {_listed([str(error.args[0])])}."
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    unset = [key for key in _ATTRIBUTE.findall(line) if "NoneType" in str(error) and config.get(key) is None]
    if unset:
        return f"lacks the key {unset[0]}, or holds null there."
    return f"cannot be used by mlx-lm: {sentence(error)}."


def _listed(keys: list[str]) -> str:
    return f"the key{'s' if len(keys) > 1 else ''} {', '.join(keys)}"


@contextlib.contextmanager
def _kernels_stubbed() -> Iterator[None]:
    """Where there is no Metal, let kernels made on import give zeros of the right shape instead of an error.

    Only the private copies of mlx-lm's files are imported inside, and they never run.
    """
    if mx.metal.is_available():
        yield
        return
    with replaced(mx.fast, "metal_kernel", _kernel_of_zeros):
        yield


def _kernel_of_zeros(**_: Any) -> Callable[..., list[mx.array]]:
    def kernel(*, output_shapes: list[tuple[int, ...]], output_dtypes: list[mx.Dtype], **_: Any) -> list[mx.array]:
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

    return kernel
