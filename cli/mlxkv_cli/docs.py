"""The page docs/cli.md, made from the commands' own `--help`: `python -m mlxkv_cli.docs > docs/cli.md`.

A test holds the page to the commands, and what `--json` prints to `JSON_FIELDS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
import typer.main

from mlxkv_cli.main import app

JSON_FIELDS: dict[str, dict[str, str]] = {
    "demo": {
        "block_bytes": "bytes of K and V in a block, all layers",
        "block_tokens": "64",
        "prompt_tokens": "length of the prompt",
        "runs": "one object a run, `cold`, `hot` and `restart`: `name`, `hot_tokens`, `cold_tokens`, `computed_tokens`,"
        " `ttft_s`, `restored_bytes`, `text`",
        "outputs_equal": "whether the three texts are the same; exit code 1 when not",
        "cache_dir": "where the blocks are",
    },
    "budget": {
        "model": "what it is called",
        "versions": "`mlxkv`, `mlx`, `mlx_lm`",
        "kv": "KV of one sequence in exact bytes; this and the rest in [the budget](budget.md#json)",
        "weights": "`bytes`, `params`, `bits`",
        "machine": "its limits, and where they are from",
        "contexts": "one object a context: bytes, `fits`, `binding`, waiting times as `low`, `mid`, `high`",
        "max_context_tokens": "the longest context that fits",
        "max_sequences": "how many sequences of the longest listed context that fits",
        "verdict": "`fits`, `tight` or `does not fit`",
        "advice": "what to change, best first",
        "tiers": "only with `--hot` or `--cold`: `bytes` and `tokens` of each",
        "terms": "only with `--explain`: every term with its formula and source",
        "models": "only with `compare`: one such object a model, and nothing else",
    },
    "models": {
        "models": "one object a model: `name`, `hub_id`, `bytes_per_token`, `bytes_per_block`, `window_tokens`,"
        " `window_bytes_per_token`, `fixed_bytes`, `context_tokens`",
    },
    "chat": {
        "text": "the reply",
        "request": "the `request` event of [the block log](block-log.md)",
    },
    "cache info": {
        "cache_dir": "the cold tier's root",
        "used_bytes": "physical bytes of the root",
        "cold_budget_bytes": "most it may take",
        "hot_budget_bytes": "most memory the hot tier of a process may hold",
        "floor_bytes": "free disk that is never used",
        "daily_write_bytes": "most that is written in a day (UTC)",
        "written_today_bytes": "how much of it is written",
        "quarantined_files": "damaged files set aside",
        "quarantined_bytes": "their physical bytes",
        "models": "one object a root: `root`, `model`, `blocks`, `checkpoints`, `tokens`, `block_bytes` (without"
        " checkpoints), `used_bytes`, `hits`, `last_used` (seconds since 1970)",
    },
    "cache ls": {
        "blocks": "one object a block, a block before what continues it: `block`, `parent`, `root`, `model`, `index`,"
        " `tokens`, `bytes`, `tier`, `hits`, `created`, `used`",
    },
    "cache show": {
        "block": "its name, 64 hex digits",
        "parent": "the name it continues; the root for the first",
        "root": "its root",
        "model": "the model's name",
        "index": "its place in the chain, from 0",
        "kind": "`block` or `checkpoint`",
        "tokens": "64; 0 for a checkpoint",
        "bytes": "physical bytes of its file",
        "tier": "`cold`",
        "hits": "how often it was restored",
        "created": "when its row was made, ISO 8601",
        "used": "when it was last used",
        "file": "its file",
        "children": "names of the blocks that continue it",
        "token_ids": "its 64 tokens",
        "text": "the tokens as text, only with `--text`",
    },
    "cache verify": {
        "blocks": "sound blocks",
        "held_blocks": "blocks held afterwards; fewer where `--fix` dropped what could not be reached",
        "read_bytes": "bytes read",
        "problems": "count by kind; exit code 1 when there is one and `--fix` was not given",
        "files": "one object a problem: `problem`, `file`",
        "foreign": "files in the root that are not the cache's; nothing is done to them",
        "fixed": "whether `--fix` was given",
    },
    "cache prune": {
        "planned_blocks": "blocks that would go",
        "planned_bytes": "their physical bytes",
        "blocks": "blocks deleted",
        "freed_bytes": "their physical bytes",
        "dry_run": "whether `--dry-run` was given",
    },
    "top": {
        "cache": "what `/v1/cache` answers: [the HTTP API](http.md)",
        "running": "one object a request that runs now",
        "requests": "the last requests, newest first, as in [the block log](block-log.md), with `time` and `line`",
    },
    "bench": {
        "figures": "one object a figure: `name`, `unit`, `median`, `p90`, `samples`, `detail`",
        "machine": "where it ran; beside it `versions`, `model`, `url`, `tokens`, `rounds`",
    },
    "log summary": {
        "requests": "requests in the log; `unfinished_requests`, `unknown_requests` (the log does not say what they"
        " reused) and `short_requests` (under a block) are among them",
        "prompt_tokens": "of all requests: `hot_tokens` + `cold_tokens` + `untiered_tokens` (reused, no tier named)"
        " + `computed_tokens` + `unknown_tokens`; `tail_tokens` are part of `hot_tokens`",
        "hit_tokens": "prompt tokens that were not computed; `hit_share` of those whose reuse is known",
        "looked_up_tokens": "prompt tokens an index found, also where they could not be restored",
        "committed_blocks": "blocks published; beside it `committed_tails`, `committed_checkpoints`, `committed_bytes`",
        "restores": "reads from the SSD; beside it `restored_bytes`",
        "evicted_blocks": "by tier; `evicted_for_room` those of them that made room for others; beside it"
        " `evicted_bytes`, `quarantined_blocks`, `dropped` (blocks by reason)",
        "written_blocks": "blocks written to the SSD; beside it `written_bytes`, `rewritten_bytes`"
        " and `write_amplification`, written bytes over those written for the first time",
        "reasons": "why matching stopped, most tokens first: `reason`, `requests`, `tokens`",
        "causes": "the likely causes, where outlines tell: `cause`, `requests`, `tokens`",
        "ttft": "by class (`reused`, `partly reused`, `computed`): `requests`, `median_s`, `p95_s`",
        "bins": "tokens over time: `start`, `step_s`, and a list each of `hot`, `cold`, `untiered`, `prompt`",
        "block_bytes": "by model, how many blocks had which bytes; `exact_block_bytes` of models in the catalog",
        "tiers": "by tier: `budget_bytes`, `held_bytes` at the end, `peak_bytes`, `off`",
        "geometry": "of oMLX: what it said a block costs, `exact_bytes`, and `counts_all_layers`; `block_tokens`,"
        " `scans`, `rejects`, `unstored_tokens`, `pressure`, `logged_trouble` are of it too",
        "sources": "requests by program; beside it `models`, `processes`, `first_time`, `last_time`, `output_tokens`",
        "lines": "lines read; beside it `unknown_lines`, `continued_lines`, `torn_lines`, `cut_lines`, `duplicates`",
        "trouble": "one object a thing that is wrong: `name`, `seen`, `advice`, `tokens`",
        "verdict": "three sentences",
    },
    "log blocks": {
        "blocks": "one object a block: `block`, `chain`, `index`, `tokens`, `bytes`, `model`, `tier` (absent from both:"
        " null), `born`, `last_used`, `hits`, `written_bytes`, `parent`, `request`",
        "count": "blocks in the log",
    },
    "log requests": {
        "requests": "one object a request, as in [the block log](block-log.md), and `source`, `finished`",
        "count": "requests in the log",
    },
    "log request": {
        "request": "its fields; the text only with `--text`",
        "events": "what was done for it: commits and restores",
    },
    "log export": {"written": "one object a file: `file`, `rows`, `bytes`"},
    "why": {
        "request": "its id",
        "nearest": "the earlier request that shares most, or null; beside it `nearest_time`",
        "token": "number of the first token that differs; when `exact` is false it is from `token` to `latest_token`",
        "role": "what that token is in: a message's role, or `tools`, `end`, `reply`; beside it `index`, the message's"
        " place",
        "cause": "the likely cause; beside it `detail`, what was seen, and `advice`, what to change",
        "matched_tokens": "where matching stopped; beside it `lost_tokens`, the prompt tokens computed from there",
        "words": "only with `--text`: the text before, how this prompt goes on, how the nearest does",
    },
    "lint": {
        "turns": "one object a request: `line`, `prompt_tokens`, `reusable_tokens`, `nearest_line`, `broken`, `cause`,"
        " `detail`, `advice`, `role`, `index`; `words` only with `--text`",
        "requests": "how many; `broken` of them lost a prefix",
        "prompt_tokens": "of all requests; beside it `reusable_tokens`",
        "reusable_share": "of the tokens after the first request; null for one request",
    },
    "explain lab": {
        "lab": "its number",
        "title": "what it is about",
        "recipe": "how the numbers are made",
        "grids": "one object a table: `title`, `rows`, `columns`, `values` unrounded, `digits`, `heat`",
        "shows": "what is seen in the numbers",
        "hides": "what is not",
    },
    "explain shapes": {
        "model": "what it is called",
        "tokens": "length of the prompt",
        "stages": "before, in each kind of layer, and after: `title`, `layers`, and `tensors` with `path`, `made_by`,"
        " `shape`, `grows`",
        "bills": "one object a context: `tokens`, `linear_flops`, `attention_flops`, `decode_linear_flops`,"
        " `decode_attention_flops`, `kv_bytes`, `decode_weight_bytes`",
        "formula": "KV bytes with this model's numbers",
        "bytes_per_token": "KV that each further token adds",
    },
    "explain attention": {
        "model": "what it is called",
        "pieces": "the text of each token",
        "words": "the words and marks",
        "layers": "how many the model has",
        "heads": "how many a layer has",
        "layer": "the one asked for, or null for the mean over all",
        "head": "the one asked for, or null for the mean over all",
        "weights": "row i is what token i attends to; each row sums to 1",
        "ranking": "with `--from`: `word`, `heads`, `after`, and `words` with `word`, `mean`, `top_heads`, `layer`,"
        " `head`, `most`; otherwise null",
    },
    "doctor": {
        "versions": "Python and the packages that matter",
        "machine": "CPU, cores, memory, system",
        "device": "what MLX computes on, and its limit",
        "wired": "the most weights that are kept in memory: `wired_bytes`, and with 0 the `reason`; null without MLX",
        "blas": "the BLAS in use, and why",
        "cache": "the root: path, owner, mode, free disk",
        "open_files": "the limits in force",
        "demo_weights": "the demo model's file",
        "fixes": "what has to be mended, each with a command; exit code 1 when there is one",
        "hints": "what could be better",
        "checks": "only with `--prove`, and of the above only `versions` and `machine`: one object a check, `name`,"
        " `verdict` (`ok`, `note`, `fail`), `said`, `figures`, `advice`; see [doctor](doctor.md)",
        "verdict": "with `--prove`: the gravest of all checks; exit code 1 when it is `fail`",
        "model": "the model's name",
        "seconds": "how long it all took",
    },
}
JSON_FIELDS["cache clear"] = JSON_FIELDS["cache prune"]

HEAD = """# Commands

Made by `python -m mlxkv_cli.docs` from the commands themselves; do not edit by hand.

Data is on stdout, talk on stderr. With `--json` stdout is one JSON object with the fields named here. Exit codes:
0 done, 1 a negative answer or it could not be done, 2 wrong usage, 130 stopped with Ctrl-C. An error is one sentence
that ends in what to do; `MLXKV_DEBUG=1` shows where it was raised. An option that names a variable can be set there
for good.
"""


def page() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    names: list[str] = group.list_commands(typer.Context(group))
    parts = [HEAD, "\n".join(f"- [`mlxkv {name}`](#mlxkv-{name.replace(' ', '-')})" for name in names) + "\n"]
    for name in names:
        parts.append("\n".join(_section(name, group.get_command(typer.Context(group), name))))
    return "\n".join(parts)


def _section(name: str, command: Any) -> Iterator[str]:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in shown if not parameter.opts[0].startswith("-")]
    options = [parameter for parameter in shown if parameter.opts[0].startswith("-")]
    yield f"## mlxkv {name}\n"
    yield f"{command.help}\n"
    usage = " ".join([f"mlxkv {name}", *(_name(argument) for argument in arguments), "[OPTIONS]"])
    examples = [line.strip().replace("\\[", "[") for line in command.epilog.splitlines()[1:]]
    yield "\n".join(f"    {line}" for line in [usage, "", *examples]) + "\n"
    yield "| | |\n|---|---|"
    for parameter in [*arguments, *options]:
        yield f"| `{_name(parameter)}` | {_meaning(parameter)} |"
    fields = JSON_FIELDS.get(name)
    if fields:
        yield "\nWith `--json`:\n\n| field | means |\n|---|---|"
        for field, means in fields.items():
            yield f"| `{field}` | {means} |"
    yield ""


def _name(parameter: Any) -> str:
    if not parameter.opts[0].startswith("-"):
        return str(parameter.metavar or parameter.name.upper())
    names = ", ".join(parameter.opts)
    return f"{names} {parameter.metavar}" if parameter.metavar else names


def _meaning(parameter: Any) -> str:
    said = [parameter.help or ""]
    if parameter.required and parameter.opts[0].startswith("-"):
        said.append("Required.")
    if parameter.default not in (None, False, ""):
        said.append(f"Default: {parameter.default}.")
    if parameter.envvar:
        said.append(f"Variable: `{parameter.envvar}`.")
    return " ".join(said)


if __name__ == "__main__":
    print(page(), end="")
