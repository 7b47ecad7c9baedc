"""Whatever a file holds, reading it ends without an error, and every line is an event, a continuation or counted."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from logs import a_day

from mlxkv.blocklog.blocks import BlockTable
from mlxkv.blocklog.readers import LogReader
from mlxkv.blocklog.sources import Cleaner
from mlxkv.blocklog.summary import summarize
from mlxkv.blocklog.verdict import find_trouble, verdict

LOGS = Path(__file__).parents[1] / "data" / "logs"
LINES = [line for path in sorted(LOGS.iterdir()) for line in path.read_bytes().splitlines()]
LINES += a_day().text().encode().splitlines()
ROUGH = st.sampled_from(
    [b"\0", b"\n", b"\r", b"\x1b[3", b'"', b"}", b"{", b" - ", b"\xff\xfe", b"-1", b"9" * 30, b"null"]
)


def read_all(data):
    reader, table = LogReader(), BlockTable()
    events = [*reader.events(Cleaner().lines(data)), *reader.finish()]
    for event in events:
        table.add(event)
    found = summarize(reader, iter(events))
    assert all(verdict(found, find_trouble(found, reader.levels)))
    return reader, events


@given(st.binary(max_size=2000))
def test_any_bytes_can_be_read(data):
    reader, _ = read_all(data)
    assert reader.lines >= reader.unknown_lines


@given(st.lists(st.sampled_from(LINES), max_size=12), st.lists(st.tuples(st.integers(0, 4000), ROUGH), max_size=6))
def test_any_damage_to_real_lines_can_be_read(lines, damage):
    data = bytearray(b"\n".join(lines))
    for at, rough in damage:
        data[at % (len(data) + 1) : at % (len(data) + 1) + len(rough) // 2] = rough
    read_all(bytes(data))


@given(st.permutations(LINES[:60]))
def test_the_order_of_lines_changes_no_count_of_lines(lines):
    reader, _ = read_all(b"\n".join(lines))
    assert reader.lines + reader.torn_lines >= len([line for line in lines if line.strip()])
