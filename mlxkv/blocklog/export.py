"""A log for other tools: requests as CSV, every event as Parquet, and one HTML page with plots. No prompt text."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment

from mlxkv.blocklog.blocks import BlockTable
from mlxkv.blocklog.charts import bars, columns, icicle
from mlxkv.blocklog.events import Event
from mlxkv.blocklog.readers import LogReader
from mlxkv.blocklog.summary import Summarizer
from mlxkv.blocklog.verdict import find_trouble, verdict
from mlxkv.core.errors import UsageError
from mlxkv.core.units import format_bytes, format_seconds

CSV_FIELDS = (
    "time", "process", "source", "model", "root", "request", "prompt_tokens", "hot_tokens", "cold_tokens",
    "reused_tokens", "tail_tokens", "computed_tokens", "matched_tokens", "looked_up_tokens", "restored_bytes",
    "restore_s", "ttft_s", "seconds", "output_tokens", "finished", "reason",
)  # fmt: skip
_INTEGERS = (
    "process", "index", "tokens", "bytes", "prompt_tokens", "hot_tokens", "cold_tokens", "tail_tokens",
    "computed_tokens", "matched_tokens", "restored_bytes", "output_tokens", "looked_up_tokens", "reused_tokens",
)  # fmt: skip
_NUMBERS = ("ms", "restore_s", "ttft_s", "seconds")
_TEXTS = ("event", "time", "source", "model", "root", "request", "block", "parent", "tier", "reason")
_BATCH = 50_000


def write_csv(reader: LogReader, events: Iterable[Event], path: Path) -> int:
    """Write a line a request; returns how many."""
    del reader
    with _created(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_FIELDS)
        rows = 0
        for event in events:
            if event.event == "request":
                writer.writerow([getattr(event, name) for name in CSV_FIELDS])
                rows += 1
    return rows


def write_parquet(reader: LogReader, events: Iterable[Event], path: Path) -> int:
    """Write a row an event, in batches; returns how many.

    Raises:
        UsageError: pyarrow is missing; says what to type.
    """
    del reader
    try:
        import pyarrow as pa  # an extra, and 0.2 s to import
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UsageError(
            f"--parquet needs pyarrow; run `{sys.executable} -m pip install 'mlxkv[log]'` first."
        ) from error
    kinds = [
        *((n, pa.string()) for n in _TEXTS),
        *((n, pa.int64()) for n in _INTEGERS),
        *((n, pa.float64()) for n in _NUMBERS),
    ]
    schema = pa.schema([*kinds, ("finished", pa.bool_())])
    rows = 0
    with pq.ParquetWriter(_created(path), schema) as writer:
        for batch in _batches(events):
            data = {name: [getattr(event, name) for event in batch] for name in schema.names}
            data |= {name: [_int64(value) for value in data[name]] for name in _INTEGERS}
            writer.write_table(pa.table(data, schema=schema))
            rows += len(batch)
    return rows


def _int64(value: int | None) -> int | None:
    """A number that a damaged line may have made too large for a column is left out."""
    return value if value is None or -(2**63) <= value < 2**63 else None


def _batches(events: Iterable[Event]) -> Iterator[list[Event]]:
    batch: list[Event] = []
    for event in events:
        batch.append(event)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def write_html(reader: LogReader, events: Iterable[Event], path: Path) -> int:
    """Write the page; returns the requests it is about. Memory grows with the number of different blocks."""
    summarizer, table = Summarizer(), BlockTable()
    found = summarizer.add_all(_each(events, table))
    trouble = find_trouble(found, reader.levels)
    known = found.hit_tokens + found.computed_tokens
    tokens = [
        ("hot (memory)", "hot", found.hot_tokens), ("cold (SSD)", "cold", found.cold_tokens),
        ("reused, tier not logged", "untiered", found.untiered_tokens), ("computed", "computed", found.computed_tokens),
    ]  # fmt: skip
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        (files("mlxkv.blocklog") / "report.html.j2").read_text(encoding="utf-8")
    )
    facts = [
        ("blocks committed", f"{found.committed_blocks:,}"),
        ("evicted", ", ".join(f"{count:,} {tier}" for tier, count in found.evicted_blocks.items()) or "0"),
        ("set aside", f"{found.quarantined_blocks:,}"),
        ("written", f"{format_bytes(found.written_bytes)} in {found.written_blocks:,} blocks"),
        ("restored", f"{format_bytes(found.restored_bytes)} in {found.restores:,} reads"),
    ]
    models = ", ".join(name for name, _ in found.models.most_common(3)) or "no model named"
    first_tokens = [
        (name, each.count, *(format_seconds(each.at(share) or 0) for share in (0.5, 0.95)))
        for name, each in found.ttft.items()
    ]
    html = page.render(
        title=f"{found.requests:,} requests, {models}",
        period=f"{(found.first_time or '?')[:19]} to {(found.last_time or '?')[:19]}".replace("T", " "),
        verdict=verdict(found, trouble),
        trouble=trouble,
        tokens=[(name, kind, count, count / known if known else 0) for name, kind, count in tokens if count],
        reasons=[(reason, each) for reason, each in found.lost() if reason != "all reused"],
        causes=found.ranked_causes(),
        ttft=first_tokens,
        facts=facts,
        over_time=columns(found.bins),
        distances=bars(table.distances),
        icicle=icicle(table.rows.values()),
        step=format_seconds(found.bins.step_s),
    )  # fmt: skip
    _created(path).write_text(html, encoding="utf-8")
    return found.requests


def _each(events: Iterable[Event], table: BlockTable) -> Iterator[Event]:
    for event in events:
        table.add(event)
        yield event


def _created(path: Path) -> Path:
    """The path, when a file can be made there.

    Raises:
        UsageError: its directory does not exist, or it is a directory.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory; name a file in it.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {path.absolute().parent}; make it first.")
    return path
