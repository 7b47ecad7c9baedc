"""`mlxkv budget MODEL`: what fits, how long it waits, and what to change, before anything is downloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxkv.core.errors import UsageError
from mlxkv.core.units import MIB, parse_bytes, parse_tokens
from mlxkv_cli.caching import warnings_on
from mlxkv_cli.options import Json
from mlxkv_cli.output import Output

if TYPE_CHECKING:
    from mlxkv.budget import Plan

_COMPARE = "compare"
_COMPARED_TOKENS = 8192
_SOLD_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(gb|mb|tb)\s*", re.IGNORECASE | re.ASCII)


def _memory(text: str) -> int:
    """Memory as it is sold, where GB means GiB; `parse_bytes` for the rest."""
    try:
        sold = _SOLD_SIZE.fullmatch(text)
        return parse_bytes(f"{sold[1]}{sold[2][0]}iB" if sold else text)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error


def _tier_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error


def _wired_limit(text: str) -> int:
    """A size, or the sysctl's own number, which is in MiB."""
    return int(text) * MIB if text.strip().isascii() and text.strip().isdigit() else _memory(text)


def _tokens(text: str) -> int:
    try:
        return parse_tokens(text)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error


def _contexts(text: str) -> list[int]:
    return [_tokens(part) for part in text.split(",")]


Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="A catalog name, a directory, a config.json, a .gguf file or a hub id; `compare A B ...` for several.",
    ),
]
Context = Annotated[
    Any,
    typer.Option(
        "--context",
        metavar="TOKENS,...",
        parser=_contexts,
        help="Contexts such as 4k,32k,128k. Without it, powers of two up to the model's maximum.",
    ),
]
Sequences = Annotated[int, typer.Option("--sequences", min=1, help="How many run at once, each of that length.")]
SharedPrefix = Annotated[
    int | None,
    typer.Option("--shared-prefix", metavar="TOKENS", parser=_tokens, help="They begin alike; kept once for all."),
]
Weights = Annotated[
    int | None, typer.Option("--weights", metavar="BITS", help="Quantise to 4 or 8 bits, or 16 for none.")
]
Group = Annotated[int, typer.Option("--group", metavar="N", help="Weights that share a scale: 32, 64 or 128.")]
KvBits = Annotated[int | None, typer.Option("--kv-bits", metavar="BITS", help="Quantised KV, where mlx-lm can.")]
KvGroup = Annotated[int, typer.Option("--kv-group", metavar="N", help="Numbers of KV that share a scale.")]
PrefillStep = Annotated[
    int, typer.Option("--prefill-step", min=1, metavar="TOKENS", help="Prompt tokens that go through at once.")
]
HotTier = Annotated[
    int | None,
    typer.Option(
        "--hot",
        metavar="SIZE",
        envvar="MLXKV_HOT",
        parser=_tier_size,
        help="Count a hot tier of this size, and say what it holds. Without it, none is counted.",
    ),
]
ColdTier = Annotated[
    int | None,
    typer.Option(
        "--cold",
        metavar="SIZE",
        envvar="MLXKV_COLD",
        parser=_tier_size,
        help="Say what a cold tier of this size holds.",
    ),
]
Ram = Annotated[
    int | None,
    typer.Option(
        "--ram", metavar="SIZE", parser=_memory, help="A Mac with so much memory, such as 24GB (which is 24 GiB)."
    ),
]
MacOS = Annotated[str | None, typer.Option("--macos", metavar="VERSION", help="15 or 26: the GPU limit differs.")]
Chip = Annotated[
    str | None, typer.Option("--chip", metavar="NAME", help='Such as "M4 Pro"; CPU is this computer without a GPU.')
]
WiredLimit = Annotated[
    int | None,
    typer.Option(
        "--wired-limit",
        metavar="SIZE",
        parser=_wired_limit,
        help="What iogpu.wired_limit_mb is set to: a size, or MiB; 0 is the system's default.",
    ),
]
Require = Annotated[
    int | None,
    typer.Option("--require", metavar="TOKENS", parser=_tokens, help="Exit with code 1 when this does not fit."),
]
Explain = Annotated[bool, typer.Option("--explain", metavar="", help="Print every term with its formula and source.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw memory against context, .svg or .png.")
]


def budget(
    models: Models,
    context: Context = None,
    sequences: Sequences = 1,
    shared_prefix: SharedPrefix = None,
    weights: Weights = None,
    group: Group = 64,
    kv_bits: KvBits = None,
    kv_group: KvGroup = 64,
    prefill_step: PrefillStep = 2048,
    hot: HotTier = None,
    cold: ColdTier = None,
    ram: Ram = None,
    macos: MacOS = None,
    chip: Chip = None,
    wired_limit: WiredLimit = None,
    require: Require = None,
    explain: Explain = False,
    plot: PlotFile = None,
    as_json: Json = False,
) -> None:
    """What fits this Mac, how long it waits, and what to change; `budget compare A B` puts models side by side.

    Needs the model's config only. Bytes are exact; seconds and the 1.4 GiB runtime share are estimates.
    """
    from mlxkv.budget import find_machine
    from mlxkv.budget.measured import with_measured
    from mlxkv.sizing.weights import WeightSpec

    names, comparing = _names(models)
    output = Output(json=as_json)
    machine = find_machine(memory_bytes=ram, macos=macos, chip=chip, wired_limit_bytes=wired_limit)
    with warnings_on(output):
        machine = with_measured(machine)
    settings: dict[str, Any] = {
        "contexts": sorted({*(context or ()), *([require] if require else ())}) or None,
        "sequences": sequences,
        "shared_prefix_tokens": shared_prefix or 0,
        "weights": None if weights is None else WeightSpec(weights, group),
        "kv_bits": kv_bits,
        "kv_group_size": kv_group,
        "prefill_step_tokens": prefill_step,
        "hot_bytes": hot,
        "cold_bytes": cold,
        "machine": machine,
    }
    if comparing:
        if explain or plot is not None:
            raise UsageError("--explain and --plot are about one model; leave `compare` and the other models out.")
        plans = _compare(output, names, settings)
    else:
        plans = [_one(output, names[0], settings, explain=explain, plot_file=plot)]
    if require is not None and not all(plan.at(require).fits for plan in plans):
        raise typer.Exit(1)


def _names(models: list[str]) -> tuple[list[str], bool]:
    """The models, and whether they are to be compared."""
    comparing = models[0] == _COMPARE
    names = models[1:] if comparing else models
    if comparing and len(names) < 2:
        raise UsageError("`compare` takes two models or more: mlxkv budget compare Llama-3.1-8B Qwen3-8B")
    if not comparing and len(names) > 1:
        raise UsageError(f"one model at a time; to put them side by side: mlxkv budget compare {' '.join(names)}")
    return names, comparing


def _one(output: Output, name: str, settings: dict[str, Any], *, explain: bool, plot_file: Path | None) -> Plan:
    from mlxkv.budget import plan
    from mlxkv.budget.schema import json_form
    from mlxkv.budget.terms import terms
    from mlxkv_cli.budget_page import budget_page

    if plot_file is not None:
        from mlxkv.budget.plot import check_plot_file, plot

        check_plot_file(plot_file)
    answer = plan(name, **settings)
    if plot_file is not None:
        plot(answer, plot_file)
        output.say(f"mlxkv: wrote {plot_file}", "dim")
    shown = terms(answer.deployment, answer.advised_tokens, settings["sequences"]) if explain else ()
    output.result(budget_page(answer, shown), **json_form(answer), **({"terms": shown} if explain else {}))
    return answer


def _compare(output: Output, names: list[str], settings: dict[str, Any]) -> list[Plan]:
    from mlxkv.budget import plan
    from mlxkv.budget.schema import json_form
    from mlxkv_cli.budget_page import compare_page

    asked = settings | {"contexts": settings["contexts"] or [_COMPARED_TOKENS]}
    plans = [plan(name, **asked) for name in names]
    output.result(compare_page(plans), models=[json_form(answer) for answer in plans])
    return plans
