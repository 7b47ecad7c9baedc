"""`mlxkv log`: what a log says was reused, what was computed, and why; mlxkv's own log, oMLX's and mlx-lm's."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxkv.core.errors import UsageError
from mlxkv_cli.options import Json, examples
from mlxkv_cli.output import Output

if TYPE_CHECKING:
    from mlxkv.blocklog.events import Event
    from mlxkv.blocklog.outline import Part
    from mlxkv.blocklog.readers import LogReader
    from mlxkv.blocklog.sources import Advance
    from mlxkv.blocklog.summary import Summary

app = typer.Typer(no_args_is_help=True, help="Read a block log, or a log of oMLX or mlx-lm's server.")

SHOWN_REQUESTS, SHOWN_BLOCKS = 50, 50
POLL_S = 0.2
Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="Logs, also .gz; a directory of logs; - is stdin.")]
Text = Annotated[bool, typer.Option("--text", metavar="", help="Show prompt text, where the log has it (--log-text).")]


@app.command(epilog=examples("mlxkv log summary blocks.jsonl", "mlxkv log summary server.log* --json"))
def summary(files: Files, as_json: Json = False) -> None:
    """What was reused, what was computed, why, what is wrong, and the one change that would save most."""
    from mlxkv.blocklog.readers import LogReader
    from mlxkv.blocklog.summary import summarize
    from mlxkv.blocklog.verdict import find_trouble, verdict
    from mlxkv_cli.log_page import summary_page

    output = Output(json=as_json)
    reader = LogReader()
    with _reading(output, files) as advance:
        found = summarize(reader, reader.files(files, advance))
    if not reader.lines:
        raise UsageError("the log is empty; give one with lines in it.")
    _check_known(reader)
    trouble = find_trouble(found, reader.levels)
    said = verdict(found, trouble)
    page = summary_page(found, reader, trouble, said, _exact_bytes(found))
    output.result(page, **_summary_fields(found, reader), trouble=trouble, verdict=list(said))


@app.command(
    epilog=examples("mlxkv log blocks blocks.jsonl --sort hits --top 20", "mlxkv log blocks blocks.jsonl --json")
)
def blocks(
    files: Files,
    chain: Annotated[
        str | None, typer.Option("--chain", metavar="NAME", help="Only the chain (or block) whose name begins so.")
    ] = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="KEY", help="born, used, hits, bytes, written or chain.")
    ] = "born",
    top: Annotated[
        int | None,
        typer.Option("--top", metavar="N", min=0, help="Most rows; 0 is all. Without it 50, or with --json all."),
    ] = None,
    as_json: Json = False,
) -> None:
    """A block a row: name, chain, tokens, KB, tier, born, last used, hits, bytes written."""
    from mlxkv.blocklog.blocks import SORTS, BlockTable
    from mlxkv.blocklog.readers import LogReader
    from mlxkv_cli.log_page import blocks_table

    if sort not in SORTS:
        raise UsageError(f"--sort {sort} is not known; take one of {', '.join(SORTS)}.")
    output = Output(json=as_json)
    table, reader = BlockTable(), LogReader()
    with _reading(output, files) as advance:
        for event in reader.files(files, advance):
            table.add(event)
    _check_known(reader)
    most = (0 if as_json else SHOWN_BLOCKS) if top is None else top
    rows = [row.to_fields() for row in table.chosen(chain=chain, sort=sort, top=most)]
    output.result(
        blocks_table(rows, output.width) if rows else "No blocks in this log.", blocks=rows, count=len(table.rows)
    )
    if not as_json and len(rows) < len(table.rows) and chain is None:
        output.say(f"{len(table.rows) - len(rows):,} more; --top 0 shows all.", "dim")


@app.command(epilog=examples("mlxkv log requests blocks.jsonl", "mlxkv log requests blocks.jsonl --last 10 --json"))
def requests(
    files: Files,
    last: Annotated[
        int | None,
        typer.Option(
            "--last", metavar="N", min=0, help="Only the last N; 0 is all. Without it 50, or with --json all."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """A request a row: prompt tokens by where they came from, time to first token, why matching stopped."""
    from mlxkv.blocklog.readers import LogReader
    from mlxkv_cli.log_page import requests_table

    output = Output(json=as_json)
    most = (0 if as_json else SHOWN_REQUESTS) if last is None else last
    count, reader = 0, LogReader()
    kept: deque[Event] = deque(maxlen=most or None)
    with _reading(output, files) as advance:
        for event in reader.files(files, advance):
            if event.event == "request":
                count += 1
                kept.append(event)
    _check_known(reader)
    shown = requests_table(list(kept), output.width) if kept else "No requests in this log."
    output.result(shown, requests=[_plain(event) for event in kept], count=count)
    if not as_json and len(kept) < count:
        output.say(f"{count - len(kept):,} earlier; --last 0 shows all.", "dim")


@app.command(epilog=examples("mlxkv log request 6b1f0c52a9d4 blocks.jsonl"))
def request(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id, or how it begins.")],
    files: Files,
    text: Text = False,
    as_json: Json = False,
) -> None:
    """Everything the log says of one request, with the blocks it committed and restored."""
    from mlxkv.blocklog.history import find_request, record_of
    from mlxkv.blocklog.readers import LogReader
    from mlxkv.blocklog.sources import need_files

    output = Output(json=as_json)
    need_files(files)
    with _reading(output, files) as advance:
        found = find_request(files, request_id, advance)
    events = [
        each.to_fields() for each in LogReader().files(files) if each.request == found.request and each is not found
    ]
    events = [each for each in events if each["event"] != "request"]
    fields = _plain(found, text=text)
    lines = [
        f"{name:<18}{value if name == 'process' else _short(value)}"
        for name, value in fields.items()
        if name not in ("event", "outline", "source")
    ]
    if (outline := record_of(found).outline) is not None:
        lines += ["", *(_part_line(part) for part in outline.parts)]
    if events:
        lines += ["", *(_event_line(each) for each in events)]
    output.result("\n".join(lines), request=fields, events=events)


@app.command(epilog=examples("mlxkv log tail blocks.jsonl", "mlxkv log tail blocks.jsonl --json"))
def tail(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A block log, or a log of oMLX or mlx_lm.server.")],
    last: Annotated[int, typer.Option("--last", metavar="N", min=0, help="Begin with the last N requests.")] = 10,
    as_json: Json = False,
) -> None:
    """Follow a log: a line a request as they end, also after the file was rotated. Ctrl-C stops.

    With --json it prints one object a line, without an end.
    """
    from mlxkv.blocklog.follow import follow
    from mlxkv.blocklog.readers import LogReader

    output = Output(json=as_json)
    if not file.is_file():
        raise UsageError(f"there is no file {file}; check the path.")
    reader = LogReader()
    waiting: deque[Event] = deque(maxlen=last or 1)
    for lines in follow(file):
        if lines is None:  # all there is now; wait for more
            for event in waiting if last else ():
                _show_request(output, event)
            waiting.clear()
            last = 0
            time.sleep(POLL_S)
            continue
        for event in reader.events(lines):
            if event.event == "request":
                if last:
                    waiting.append(event)
                else:
                    _show_request(output, event)


@app.command(
    epilog=examples(
        "mlxkv log export blocks.jsonl --html report.html", "mlxkv log export blocks.jsonl --csv requests.csv"
    )
)
def export(
    files: Files,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="OUT", help="Requests as a table, one a line.")] = None,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", metavar="OUT", help="Every event, typed; needs the extra `log`.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="One page with plots, for a browser.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the log for other tools: requests as CSV, events as Parquet, a page as HTML. No prompt text in any."""
    from mlxkv.blocklog.export import write_csv, write_html, write_parquet
    from mlxkv.blocklog.readers import LogReader
    from mlxkv.blocklog.sources import find_files, need_files

    output = Output(json=as_json)
    writers = [(csv, write_csv), (parquet, write_parquet), (html, write_html)]
    if not any(path for path, _ in writers):
        raise UsageError("nothing to write; add --csv OUT, --parquet OUT or --html OUT.")
    outputs = [path.resolve() for path, _ in writers if path is not None]
    if len(set(outputs)) < len(outputs):
        raise UsageError("two of the outputs are one file; give each its own name.")
    for source in find_files(files):
        if source.resolve() in outputs:
            raise UsageError(f"{source} is the log itself and would be lost; give the output another name.")
    if len(outputs) > 1:
        need_files(files)
    written = []
    for path, write in writers:
        if path is not None:
            reader = LogReader()
            with _reading(output, files) as advance:
                rows = write(reader, reader.files(files, advance), path)
            _check_known(reader)
            written.append({"file": path, "rows": rows, "bytes": path.stat().st_size})
    lines = [f"{each['file']}: {each['rows']:,} rows, {each['bytes']:,} B" for each in written]
    output.result("\n".join(lines), written=written)


@contextmanager
def _reading(output: Output, files: list[str]) -> Iterator[Advance]:
    """A bar over the bytes of the files."""
    from mlxkv.blocklog.sources import find_files, total_bytes

    with output.progress("reading", total=total_bytes(find_files(files))) as advance:
        yield advance


def _check_known(reader: LogReader) -> None:
    """Nothing, when a line was understood or there is none.

    Raises:
        UsageError: the files are something else.
    """
    if reader.lines and not reader.records.total():
        raise UsageError(
            f"none of {reader.lines:,} lines is of a known log; give a block log, or one of oMLX or mlx_lm.server."
        )


def _exact_bytes(found: Summary) -> dict[str, int]:
    """Bytes of a block of the models that the catalog knows, by the name the log has."""
    from mlxkv.budget.catalog import catalog_figures

    if not found.block_bytes:
        return {}
    known = {figures.name.casefold(): figures.bytes_per_block for figures in catalog_figures()}
    return {model: known[model.casefold()] for model in found.block_bytes if model.casefold() in known}


def _summary_fields(found: Summary, reader: LogReader) -> dict[str, Any]:
    """The summary as plain values, derived figures included."""
    fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
    fields |= {
        "processes": len(found.processes),
        "hit_tokens": found.hit_tokens,
        "hit_share": found.hit_share,
        "write_amplification": found.write_amplification,
        "reasons": [{"reason": reason, **dataclasses.asdict(each)} for reason, each in found.lost()],
        "causes": [{"cause": cause, **dataclasses.asdict(each)} for cause, each in found.ranked_causes()],
        "ttft": {
            name: {"requests": each.count, "median_s": each.at(0.5), "p95_s": each.at(0.95)}
            for name, each in found.ttft.items()
        },
        "geometry": [
            {**dataclasses.asdict(each), "exact_bytes": each.exact_bytes, "counts_all_layers": each.counts_all_layers}
            for each in found.geometry
        ],
        "block_bytes": {model: dict(sizes) for model, sizes in found.block_bytes.items()},
        "exact_block_bytes": _exact_bytes(found),
    }
    counts = {name: getattr(reader, name) for name in ("lines", "unknown_lines", "continued_lines", "torn_lines")}
    return fields | counts | {"cut_lines": reader.read.cut_lines, "duplicates": reader.read.duplicates}


def _plain(event: Event, *, text: bool = False) -> dict[str, Any]:
    fields = event.to_fields()
    if not text:
        fields.pop("text", None)
    return fields


def _short(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _part_line(part: Part) -> str:
    where = part.role if part.index is None else f"message {part.index} ({part.role})"
    return f"  to token {part.end:>8,}  {where}"


def _event_line(event: dict[str, Any]) -> str:
    said = [f"  {event.get('time', '')[11:23]}  {event['event']:<10}", (event.get("block") or "")[:12]]
    said += [
        f"{name} {_short(event[name])}"
        for name in ("index", "tokens", "bytes", "tier", "ms", "reason")
        if name in event
    ]
    return "  ".join(said)


def _show_request(output: Output, event: Event) -> None:
    """One finished request, at once."""
    if output.json:
        print(json.dumps(_plain(event)), flush=True)
        return
    said = [(event.time or "")[11:19], event.request or ""]
    for name, count in (
        ("prompt", event.prompt_tokens), ("hot", event.hot_tokens), ("cold", event.cold_tokens),
        ("reused", event.reused_tokens), ("computed", event.computed_tokens),
    ):  # fmt: skip
        if count is not None:
            said.append(f"{name} {count:,}")
    output.result("  ".join([*said, event.reason or ""]).rstrip())
