"""Following blocks through a log: hits, tiers and distances of chains written by hand."""

from logs import Script

from mlxkv.blocklog.blocks import BlockTable
from mlxkv.blocklog.charts import WIDTH, bars, columns, icicle
from mlxkv.blocklog.history import read_history
from mlxkv.blocklog.readers import LogReader
from mlxkv.blocklog.summary import Bins
from mlxkv.blocklog.why import explain

ROOT = "0" * 64


def chain(log, names, request, parent=ROOT, start=0):
    """Commits of one request: `names` are single letters, each continues the one before."""
    for index, name in enumerate(names, start):
        log.block(name, request=request, parent=parent, index=index)
        parent = name * 64
    return log


def three_requests():
    """`abc`; then `ab` reused and `d` behind it; then `abd` reused and nothing committed but a restore."""
    log = chain(Script(), "abc", "r1").request(192, request="r1")
    chain(log, "d", "r2", parent="b" * 64, start=2).request(192, hot=128, request="r2")
    return log.block("d", "restore", tier="cold", request="r3").request(200, cold=192, request="r3")


def table_of(log):
    table = BlockTable()
    for event in LogReader().events(log.text().encode().splitlines()):
        table.add(event)
    return table


def test_every_block_of_a_restored_chain_is_hit_once_a_request():
    table = table_of(three_requests())
    assert {row.block[0]: row.hits for row in table.chosen()} == {"a": 2, "b": 2, "c": 0, "d": 1}


def test_a_chain_is_called_by_its_first_block():
    table = table_of(three_requests())
    assert {row.block[0]: (row.chain[0], row.index) for row in table.chosen()} == {
        "a": ("a", 0), "b": ("a", 1), "c": ("a", 2), "d": ("a", 2)
    }  # fmt: skip
    assert [row.block[0] for row in table.chosen(sort="chain")] == ["a", "b", "c", "d"]


def test_a_block_is_where_it_last_went():
    log = Script().block("a").block("b").block("a", "offload", tier="cold").block("a", "evict").block("b", "evict")
    log.block("c").block("c", "offload", tier="cold").block("c", "quarantine", tier="cold")
    assert {row.block[0]: row.tier for row in table_of(log).chosen()} == {"a": "cold", "b": None, "c": "hot"}


def test_a_distance_is_how_many_requests_later_a_chain_was_used_again():
    log = three_requests()
    assert table_of(log).distances == {1: 2}  # r2 uses what r1 made, r3 what r2 made
    log.request(100, request="x").request(100, request="y")
    log.block("d", "restore", tier="cold", request="r6").request(200, cold=192, request="r6")
    assert table_of(log).distances == {1: 2, 3: 1}


def test_distances_are_drawn_by_powers_of_two():
    chart = bars(table_of(three_requests()).distances)
    assert [box.says for box in chart.boxes] == ["1 requests later: 2 times"]
    many = bars(type(table_of(three_requests()).distances)({1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 8: 1, 9: 1}))
    assert [mark.text for mark in many.marks[2:]] == ["1", "2", "3 to 4", "5 to 8", "9 to 16"]
    assert [int(box.says.split(": ")[1].split(" ")[0]) for box in many.boxes] == [1, 1, 2, 2, 1]


def test_the_icicle_has_every_block_once_and_parts_where_prompts_do():
    chart = icicle(table_of(three_requests()).rows.values())
    assert (chart.shown, chart.of) == (4, 4)
    assert [box.says.split(",")[0] for box in chart.boxes] == [
        "blocks 0 to 1", "blocks 2 to 2", "blocks 2 to 2"
    ]  # fmt: skip
    top, left, right = chart.boxes
    assert top.width > 0.99 * WIDTH
    assert abs(left.width - right.width) < 1
    assert left.y == right.y >= top.y + top.height


def test_a_very_long_chain_and_very_many_are_drawn_without_recursion():
    log = Script()
    parent = ROOT
    for index in range(3000):
        name = f"{index + 1:064x}"
        log.add("commit", block=name, parent=parent, index=index, tokens=64, bytes=1, request="r1")
        parent = name
    for index in range(3000):
        log.add("commit", block=f"{index + 10**6:064x}", parent=ROOT, index=0, tokens=64, bytes=1)
    chart = icicle(table_of(log).rows.values())
    assert chart.of == 6000
    assert 0 < chart.shown < chart.of  # too narrow to be seen: left out, and said so
    assert sum(box.width for box in chart.boxes if box.y == 0) <= WIDTH


def test_columns_are_as_high_as_their_tokens():
    bins = Bins()
    bins.add(0, 10, 20, 0, 100)
    bins.add(3, 0, 0, 50, 50)
    chart = columns(bins)
    heights = {box.says: box.height for box in chart.boxes}
    assert heights["cold: 20 tokens"] == 2 * heights["hot: 10 tokens"]
    assert heights["computed: 70 tokens"] == 7 * heights["hot: 10 tokens"]
    assert heights["untiered: 50 tokens"] == 5 * heights["hot: 10 tokens"]


def test_what_a_request_evicts_after_it_began_is_not_why_it_missed(tmp_path):
    log = chain(Script(), "ab", "r1").request(128, request="r1")
    log.block("a", "evict", reason="budget", time="2026-11-30T01:00:00+00:00").block("x", request="r2").request(
        64, request="r2"
    )
    chain(log, "a", "r3").block("a", "evict", reason="late")
    chain(log, "b", "r3", parent="a" * 64, start=1).request(128, request="r3", reason="evicted")
    path = tmp_path / "log"
    path.write_text(log.text(), encoding="utf-8")
    history = read_history([str(path)], "r3")
    assert [(gone.block[0], gone.reason, gone.by) for gone in history.gone] == [("a", "budget", "r2")]
    assert "01:00:00" in explain(history.record, history.earlier, history.gone).detail


def test_a_log_whose_blocks_go_round_in_a_circle_ends():
    log = Script().block("a", parent="b" * 64, index=0, request="r1").block("b", parent="a" * 64, index=1, request="r1")
    log.block("c", parent="b" * 64, index=2, request="r2").request(192, hot=128, request="r2")
    assert {row.block[0]: row.hits for row in table_of(log).chosen()} == {"a": 1, "b": 1, "c": 0}
