"""The dashboard in a real browser, over a real server and a tiny model that computes."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from driving import some_tokens
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serving import ask
from sites import Site, site

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SHARED_BLOCKS = 3
SHARED = some_tokens(64 * SHARED_BLOCKS, seed=1)
JUST_USED_S = 3.2  # after this long no cell has the ring of one that was just used
KEY = "a key of this test"

pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason="Debian's chromium is not installed: apt install chromium"
)

ISLANDS = """async () => {
  document.querySelector("#map").dispatchEvent(new Event("scroll")); // draws it as it is now
  await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
  // Where the canvas has orange or blue: boxes of what hangs together, in canvas pixels.
  const canvas = document.querySelector("#map canvas");
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  const coloured = (i) => data[4 * i + 3] > 20 && Math.abs(data[4 * i] - data[4 * i + 2]) > 40;
  const seen = new Uint8Array(width * height);
  const islands = [];
  for (let start = 0; start < width * height; start++) {
    if (seen[start] || !coloured(start)) continue;
    const box = { left: width, right: 0, top: height, bottom: 0, pixels: 0 };
    const waiting = [start];
    seen[start] = 1;
    while (waiting.length) {
      const i = waiting.pop();
      const [x, y] = [i % width, Math.floor(i / width)];
      box.left = Math.min(box.left, x);
      box.right = Math.max(box.right, x);
      box.top = Math.min(box.top, y);
      box.bottom = Math.max(box.bottom, y);
      box.pixels++;
      const beside = [[x - 1, y], [x + 1, y], [x, y - 1], [x, y + 1]];
      for (const [nx, ny] of beside) {
        const n = ny * width + nx;
        if (nx < 0 || ny < 0 || nx >= width || ny >= height || seen[n] || !coloured(n)) continue;
        seen[n] = 1;
        waiting.push(n);
      }
    }
    if (box.pixels > 12) islands.push(box);
  }
  return islands;
}"""

CONTRASTS = """() => {
  // Every element with text of its own that is seen: its text, and how its colour stands out from what is behind it.
  const channel = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const found = numbers(getComputedStyle(one).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const texts = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
    if (!own || !one.checkVisibility()) continue;
    const style = getComputedStyle(one);
    const ink = numbers(one instanceof SVGElement ? style.fill : style.color);
    texts.push([one.textContent.trim().slice(0, 40), ratio(ink, behind(one))]);
  }
  const paper = behind(document.querySelector("#map"));
  const marks = ["hot", "cold", "computed"].map((name) => {
    const swatch = document.querySelector(`.swatch.${name}`);
    return [name, ratio(numbers(getComputedStyle(swatch).backgroundColor), paper)];
  });
  return { texts, marks };
}"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Two prompts that share three blocks, and one of its own."""
    with site("llama", tmp_path_factory.mktemp("blocks")) as made:
        ask(made.engine, some_tokens(150, seed=4))
        ask(made.engine, SHARED + some_tokens(130, seed=2))
        ask(made.engine, SHARED + some_tokens(70, seed=3))
        yield made


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)


@pytest.fixture
def open_page(browser: Browser):
    """Opens a page; in the end nothing may have been asked of another host, and nothing may have gone wrong.

    A status that a test provokes is logged by the browser itself: such a test clears `page.troubles`.
    """
    opened = []

    def opener(url: str, **options) -> Page:
        context = browser.new_context(**options)
        page = context.new_page()
        page.troubles, page.asked = [], []
        page.on("console", lambda message: page.troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: page.troubles.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        opened.append((page, url))
        return page

    yield opener
    for page, url in opened:
        page.context.close()
        assert page.troubles == []
        assert {urlsplit(asked).netloc for asked in page.asked} == {urlsplit(url).netloc}


@pytest.fixture
def page(served: Site, open_page):
    made = open_page(served.url)
    made.goto(served.url)
    wait_for_cells(made)
    return made


def wait_for_cells(page: Page) -> None:
    expect(page.locator("#map canvas")).to_have_attribute("data-cells", re.compile("[1-9]"), timeout=20_000)


def wait_for_rest(served: Site, page: Page) -> None:
    """Until no block was used lately: what is drawn from then on has no rings."""
    rest_s = max(block["used"] for block in blocks_of(served)) + JUST_USED_S - time.time()
    if rest_s > 0:
        page.wait_for_timeout(1000 * rest_s)


def blocks_of(served: Site) -> list[dict]:
    return [block for block in served.get("/v1/cache/blocks")["blocks"] if block["kind"] == "block"]


def grid(islands: list[dict]) -> list[list[int]]:
    """Islands as rows of left edges, from top to bottom."""
    rows: dict[int, list[int]] = {}
    for island in islands:
        rows.setdefault(island["top"], []).append(island["left"])
    return [sorted(rows[top]) for top in sorted(rows)]


def synthetic(chains: int, length: int) -> dict:
    """An answer of /v1/cache/blocks with that many chains of that many blocks, all of one first block."""
    names = [f"{i:064x}" for i in range(1, chains * length + 2)]
    row = {"kind": "block", "tokens": 64, "bytes": 786_432, "tier": "both", "hits": 1, "used": 1.0}
    blocks = [{**row, "block": names[0], "parent": "f" * 64}]
    for chain in range(chains):
        own = names[1 + chain * length : 1 + (chain + 1) * length]
        blocks += [{**row, "block": name, "parent": own[i - 1] if i else names[0]} for i, name in enumerate(own)]
    return {"blocks": blocks, "total": 25_000, "root": "f" * 64, "roots": {"f" * 64: "made up"}}


# the map


def test_there_is_one_cell_for_every_block_that_the_server_lists(served, page):
    wait_for_rest(served, page)
    islands = page.evaluate(ISLANDS)
    assert len(islands) == len(blocks_of(served)) > 8
    assert page.locator("#map canvas").get_attribute("data-cells") == str(len(islands))


def test_a_shared_prefix_is_one_stem_with_two_branches(served, page):
    wait_for_rest(served, page)
    first, second, *_ = grid(page.evaluate(ISLANDS))
    pitch = first[1] - first[0]
    assert first[0] == second[0] - SHARED_BLOCKS * pitch, "the second row begins below what follows the stem"
    assert first[: SHARED_BLOCKS + 1] == [first[0] + i * pitch for i in range(SHARED_BLOCKS + 1)]
    parents = [block["parent"] for block in blocks_of(served)]
    (forked,) = {name for name in parents if parents.count(name) > 1} - {served.get("/v1/cache/blocks")["root"]}
    page.focus("#map")
    for _ in range(SHARED_BLOCKS - 1):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#voice")).to_contain_text("shared: 2 ways go on from here")
    expect(page.locator("#voice")).to_contain_text(forked[:12])


def test_a_new_block_appears_by_itself(tmp_path, open_page):
    with site("llama", tmp_path) as made:
        page = open_page(made.url)
        page.goto(made.url)
        expect(page.locator("#map-text")).to_contain_text("Nothing is held yet", timeout=20_000)
        ask(made.engine, some_tokens(130, seed=9))
        cells = str(len(blocks_of(made)))
        expect(page.locator("#map canvas")).to_have_attribute("data-cells", cells, timeout=20_000)


def test_the_pointer_shows_what_a_cell_is(served, page):
    wait_for_rest(served, page)
    island = page.evaluate(ISLANDS)[0]
    page.hover("#map", position={"x": (island["left"] + island["right"]) / 2, "y": island["top"] + 4})
    tip = page.locator("#tip")
    expect(tip).to_be_visible()
    text = tip.inner_text()
    block = next(one for one in blocks_of(served) if one["block"][:12] in text)
    assert block["parent"] == served.get("/v1/cache/blocks")["root"]
    assert "Block 1 of its chain" in text
    assert f"{block['bytes'] // 1024} KiB" in text
    assert "tokens 0 to 63" in text
    page.mouse.move(1, 1)
    expect(tip).to_be_hidden()


def test_arrow_keys_move_over_the_cells(page):
    voice = page.locator("#voice")
    page.focus("#map")
    expect(voice).to_contain_text("Block 1 of its chain")
    page.keyboard.press("ArrowRight")
    expect(voice).to_contain_text("Block 2 of its chain")
    page.keyboard.press("End")
    expect(voice).to_contain_text("nothing continues it")
    page.keyboard.press("Home")
    expect(voice).to_contain_text("Block 1 of its chain")
    page.keyboard.press("ArrowDown")
    expect(voice).to_contain_text(f"Block {SHARED_BLOCKS + 1} of its chain")
    page.keyboard.press("ArrowLeft")
    expect(voice).to_contain_text(f"Block {SHARED_BLOCKS} of its chain")
    page.keyboard.press("ArrowUp")
    expect(voice).to_contain_text(f"Block {SHARED_BLOCKS} of its chain")
    expect(page.locator("#tip")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator("#tip")).to_be_hidden()


def test_checkpoints_are_marks_on_blocks_and_no_cells(tmp_path, open_page):
    with site("qwen3_next", tmp_path) as made:
        ask(made.engine, some_tokens(200, seed=1))
        listed = made.get("/v1/cache/blocks")["blocks"]
        marks = [one for one in listed if one["kind"] == "checkpoint"]
        assert marks
        page = open_page(made.url)
        page.goto(made.url)
        wait_for_cells(page)
        cells = len(listed) - len(marks)
        assert page.locator("#map canvas").get_attribute("data-cells") == str(cells)
        expect(page.locator("#map-text")).to_contain_text(f"{cells} blocks and {len(marks)} checkpoint")
        page.focus("#map")
        said = []
        for _ in range(cells):
            said.append(page.locator("#voice").inner_text())
            page.keyboard.press("ArrowRight")
        assert sum("checkpoint after it" in text for text in set(said)) == len(marks)


@pytest.mark.parametrize("columns", [1, 7, 40])
def test_no_two_cells_lie_on_each_other_and_every_chain_reads_onwards(page, columns):
    chance = random.Random(columns)
    answer = synthetic(chains=0, length=0)
    for i in range(2, 300):
        parent = chance.choice(answer["blocks"])["block"] if chance.random() < 0.9 else "f" * 64
        answer["blocks"].append({**answer["blocks"][0], "block": f"{i:064x}", "parent": parent})
    cells = page.evaluate(
        """async ([answer, columns]) => {
          const { grow, pack } = await import("/static/chains.js");
          const { roots } = grow(answer, new Map());
          const { cells } = pack(roots.get(answer.root), columns);
          return cells.map(({ node, x, y }) => [node.row.block, x, y]);
        }""",
        [answer, columns],
    )
    places = {name: (x, y) for name, x, y in cells}
    assert places.keys() == {block["block"] for block in answer["blocks"]}
    assert len(set(places.values())) == len(cells) == 299
    assert all(0 <= x < columns for x, _ in places.values())
    for block in answer["blocks"]:
        if block["parent"] in places:
            (x, y), (before_x, before_y) = places[block["block"]], places[block["parent"]]
            assert (x, y) == (before_x + 1, before_y) or y > before_y


def test_the_server_s_own_root_comes_first_and_each_root_is_told_apart(served, open_page):
    answer = synthetic(chains=2, length=3)
    other = {**answer["blocks"][0], "block": "a" * 64, "parent": "e" * 64}
    answer = {**answer, "blocks": [other, *answer["blocks"]], "total": 8, "roots": {**answer["roots"], "e" * 64: None}}
    page = open_page(served.url)
    page.route("**/v1/cache/blocks", lambda route: route.fulfill(json=answer))
    page.goto(served.url)
    wait_for_cells(page)
    expect(page.locator("#map-text")).to_have_text("8 blocks in 3 chains, which part at 1 place, of 2 roots.")
    page.focus("#map")
    expect(page.locator("#voice")).to_contain_text("name 000000000000")
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    expect(page.locator("#voice")).to_contain_text("name aaaaaaaaaaaa")
    assert len(grid(page.evaluate(ISLANDS))) == 3, "two rows of the own root and one of the other"


def test_twenty_thousand_blocks_are_drawn_without_an_element_each(served, open_page):
    answer = json.dumps(synthetic(chains=133, length=150))
    page = open_page(served.url)
    page.route("**/v1/cache/blocks", lambda route: route.fulfill(body=answer, content_type="application/json"))
    page.goto(served.url)
    wait_for_cells(page)
    assert page.locator("#map canvas").get_attribute("data-cells") == "19951"
    expect(page.locator("#map-text")).to_contain_text("The 19,951 last used of 25,000 are shown. 19,951 blocks")
    assert page.evaluate("document.querySelectorAll('*').length") < 1_000
    assert page.locator("#map canvas").bounding_box()["height"] < 500
    before = page.evaluate(ISLANDS)
    page.focus("#map")
    page.keyboard.press("End")
    for _ in range(55):
        page.keyboard.press("ArrowDown")
    assert page.evaluate("document.querySelector('#map').scrollTop") > 0
    assert len(before) > 100
    assert len(page.evaluate(ISLANDS)) > 100, "what scrolled into view is drawn"
    page.click("text=Blocks as a table")
    expect(page.locator("#table tr")).to_have_count(200)
    expect(page.locator("#table-text")).to_have_text("The 200 last used of 19,951.")


# figures


def test_the_figures_are_those_of_the_api(served, page):
    tokens = served.get("/v1/cache")["tokens"]
    for source in ("hot", "cold", "computed"):
        expect(page.locator(f"#tokens-{source}")).to_have_text(f"{tokens[source]:,}")
    saved, total = tokens["hot"] + tokens["cold"], sum(tokens.values())
    assert saved > 0
    expect(page.locator("#share")).to_have_text(f"{100 * saved // total} %")
    requests = served.get("/v1/cache/requests")["requests"]
    assert page.locator("#requests span").all_inner_texts() == [one["line"] for one in requests]
    hot = served.get("/v1/cache")["hot"]
    meter = page.get_by_role("meter", name="Memory (hot tier)")
    assert int(meter.get_attribute("aria-valuenow")) == hot["used_bytes"]
    assert int(meter.get_attribute("aria-valuemax")) == hot["budget_bytes"]


def test_the_plot_has_a_bar_for_each_source_as_high_as_its_tokens(page):
    history = [
        {"time": 1_000_000, "hot": 300, "cold": 0, "computed": 100, "requests": 1},
        {"time": 1_000_020, "hot": 0, "cold": 150, "computed": 50, "requests": 1},
    ]
    heights = page.evaluate(
        """async (history) => {
          const { plot } = await import("/static/plot.js");
          const svg = document.querySelector("#plot");
          plot(svg, history, 1000025);
          const bars = [...svg.querySelectorAll("rect")];
          return bars.map((bar) => [bar.getAttribute("class"), bar.getBBox().height, bar.getBBox().x]);
        }""",
        history,
    )
    by_source = {(name, i): (height, x) for i, (name, height, x) in enumerate(heights)}
    assert [name for name, _, _ in heights] == ["hot", "computed", "cold", "computed"]
    unit = by_source[("hot", 0)][0] / 300
    assert [height for _, height, _ in heights] == pytest.approx([300 * unit, 100 * unit, 150 * unit, 50 * unit])
    assert heights[2][2] > heights[0][2], "later is further right"


def test_a_running_request_is_a_progress_bar_in_words_too(served, open_page):
    running = {"request": "abcdef0123456789", "phase": "prefill", "prompt_tokens": 4_000, "done_tokens": 1_000,
               "held_tokens": 640, "output_tokens": 0, "since": 0.0}  # fmt: skip
    page = open_page(served.url)
    page.route("**/v1/cache/requests", lambda route: route.fulfill(json={"running": [running], "requests": []}))
    page.goto(served.url)
    bar = page.get_by_role("progressbar", name="Request abcdef012345")
    expect(bar).to_have_attribute("aria-valuenow", "1000")
    expect(bar).to_have_attribute("aria-valuetext", "prefill, 1,000 of 4,000 tokens, 640 of them from the cache")
    whole = bar.bounding_box()["width"]
    held, computed = [part.bounding_box()["width"] for part in bar.locator("i").all()]
    assert held / whole == pytest.approx(0.16, abs=0.01)
    assert computed / whole == pytest.approx(0.09, abs=0.01)


def test_what_the_server_says_is_text_and_never_markup(served, open_page):
    page = open_page(served.url)
    bad = "<img src=x onerror=alert(1)><b>bold</b>"

    def cache(route):
        route.fulfill(json={**served.get("/v1/cache"), "model": bad, "uncached": bad, "evicted": {bad: 1}})

    def requests(route):
        one = {**served.get("/v1/cache/requests")["requests"][0], "line": bad}
        running = {"request": "<b>r</b>", "phase": bad, "prompt_tokens": 1, "done_tokens": 0, "held_tokens": 0,
                   "output_tokens": 0, "since": 0.0}  # fmt: skip
        route.fulfill(json={"running": [running], "requests": [one]})

    page.route("**/v1/cache", cache)
    page.route("**/v1/cache/requests", requests)
    page.goto(served.url)
    expect(page.locator("#model")).to_have_text(bad)
    expect(page.locator("#requests span")).to_have_text(bad)
    expect(page.locator("#running li p")).to_contain_text(bad)
    expect(page.locator("#tiers")).to_contain_text(bad)
    assert page.locator("img").count() == 0
    assert page.locator("b", has_text="bold").count() == page.locator("#running b", has_text="bold").count() == 0


# the server's side


def test_the_page_asks_for_a_key_keeps_it_for_the_tab_and_asks_again_when_it_is_wrong(tmp_path, open_page):
    with site("llama", tmp_path, keys=(KEY,)) as made:
        ask(made.engine, some_tokens(130, seed=1))
        page = open_page(made.url)
        page.goto(made.url)
        field = page.get_by_label("This server asks for an API key.")
        expect(field).to_be_focused()
        expect(page.locator("main")).to_be_hidden()
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("The server does not accept this key.")
        field.fill(KEY)
        page.get_by_role("button", name="Show the dashboard").click()
        wait_for_cells(page)
        expect(page.get_by_role("alert")).to_be_hidden()
        assert page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]") == [[KEY], 0, ""]
        page.reload()
        wait_for_cells(page)
        assert all(KEY not in asked for asked in page.asked)
        assert all("401" in trouble for trouble in page.troubles)
        page.troubles.clear()


def test_the_page_says_that_the_server_is_gone_and_comes_back_by_itself(served, page):
    served.stop()
    try:
        expect(page.get_by_role("alert")).to_contain_text("The server does not answer", timeout=20_000)
        expect(page.locator("#share")).to_be_visible()
    finally:
        served.start()
    expect(page.get_by_role("alert")).to_be_hidden(timeout=20_000)
    expect(page.get_by_role("status")).to_contain_text("live")
    assert all("Failed to load resource" in trouble for trouble in page.troubles)
    page.troubles.clear()


def test_the_page_says_that_the_engine_stopped(served, open_page):
    page = open_page(served.url)
    page.route("**/v1/cache", lambda route: route.fulfill(json={**served.get("/v1/cache"), "ready": False}))
    page.goto(served.url)
    expect(page.get_by_role("alert")).to_contain_text("The engine does not run")
    assert served.get("/v1/cache")["ready"] is True


def test_each_path_is_asked_at_most_once_a_second_and_not_while_the_tab_is_hidden(page):
    page.asked.clear()
    page.wait_for_timeout(3_000)
    asked = [urlsplit(url).path for url in page.asked]
    assert 1 <= asked.count("/v1/cache") <= 4
    assert asked.count("/v1/cache/blocks") <= 4
    hide = "Object.defineProperty(document, 'hidden', { value: %s, configurable: true });"
    page.evaluate(hide % "true" + "document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(500)
    page.asked.clear()
    page.wait_for_timeout(2_000)
    assert page.asked == []
    page.evaluate(hide % "false" + "document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(500)
    assert page.asked


def test_a_browser_runs_nothing_but_the_package_s_own_files_and_asks_whether_they_changed(served):
    page = httpx.get(served.url)
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["cache-control"] == "no-cache"
    script = httpx.get(served.url + "/static/app.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["cache-control"] == "no-cache"
    again = httpx.get(served.url + "/static/app.js", headers={"if-none-match": script.headers["etag"]})
    assert again.status_code == 304


# for everybody


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_stand_out_from_what_is_behind_them(served, open_page, scheme):
    page = open_page(served.url, color_scheme=scheme)
    page.goto(served.url)
    wait_for_cells(page)
    page.focus("#map")
    page.click("text=Blocks as a table")
    found = page.evaluate(CONTRASTS)
    assert len(found["texts"]) > 40
    assert [text for text in found["texts"] if text[1] < 4.5] == []
    assert len(found["marks"]) == 3
    assert [mark for mark in found["marks"] if mark[1] < 3] == []
    red, *_ = map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert (red > 200) == (scheme == "light")


def test_the_map_is_drawn_anew_when_the_scheme_changes(served, page):
    wait_for_rest(served, page)
    page.emulate_media(color_scheme="light")
    light = page.locator("#map").screenshot()
    page.emulate_media(color_scheme="dark")
    dark = page.locator("#map").screenshot()
    assert light != dark
    assert len(page.evaluate(ISLANDS)) == int(page.locator("#map canvas").get_attribute("data-cells"))


def test_everything_has_a_name_and_a_role(page):
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == 1
    headings = ["Prompt tokens saved", "Tiers", "Blocks", "Saved against computed", "Running", "Last requests"]
    assert [one.inner_text() for one in page.get_by_role("heading", level=2).all()] == headings
    for name in ("Blocks", "Saved against computed", "Running", "Last requests", "Prompt tokens saved"):
        expect(page.get_by_role("region", name=name)).to_be_visible()
    expect(page.get_by_role("application", name=re.compile(r"Blocks \d+ blocks in \d+ chains"))).to_be_visible()
    expect(page.get_by_role("img", name="Saved against computed")).to_be_visible()
    for meter in page.locator("[role=meter], [role=progressbar]").all():
        assert meter.get_attribute("aria-label")
        assert meter.get_attribute("aria-valuetext")
    references = page.evaluate(
        """[...document.querySelectorAll("*")].flatMap((one) =>
          ["aria-labelledby", "aria-describedby", "for"].flatMap((name) => (one.getAttribute(name) ?? "").split(" ")))
          .filter(Boolean).filter((id) => !document.getElementById(id))"""
    )
    assert references == []
    assert page.evaluate("new Set([...document.querySelectorAll('[id]')].map((one) => one.id)).size") == (
        page.locator("[id]").count()
    )


def test_all_that_can_be_done_can_be_reached_with_the_tab_key(page):
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert reached[:4] == ["map", "Blocks as a table", "The same as a table", "requests"]


def test_whatever_scrolls_can_be_scrolled_with_the_keyboard(served, open_page):
    page = open_page(served.url, viewport={"width": 400, "height": 500})
    page.route("**/v1/cache/blocks", lambda route: route.fulfill(json=synthetic(chains=40, length=60)))
    page.goto(served.url)
    wait_for_cells(page)
    page.click("text=Blocks as a table")
    page.wait_for_selector("[aria-label='Table of blocks'] tbody tr")  # it is filled once the browser told it is open
    scrolling = page.evaluate(
        """[...document.querySelectorAll("main *")].filter((one) => one.clientHeight
             && ["auto", "scroll"].includes(getComputedStyle(one).overflowY) && one.scrollHeight > one.clientHeight)
           .map((one) => [one.id || one.getAttribute("aria-label"), one.tabIndex])"""
    )
    assert [name for name, _ in scrolling][:2] == ["map", "Table of blocks"]
    assert all(tab_index == 0 for _, tab_index in scrolling)


@pytest.mark.parametrize("width", [400, 768, 1600])
def test_nothing_is_wider_than_the_window(served, open_page, width):
    page = open_page(served.url, viewport={"width": width, "height": 800})
    page.goto(served.url)
    wait_for_cells(page)
    page.focus("#map")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    frame = page.locator("#map").bounding_box()
    assert frame["x"] + frame["width"] <= width
    assert int(page.locator("#map canvas").get_attribute("data-cells")) == len(blocks_of(served))
