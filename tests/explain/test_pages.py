"""The labs' pages: their code runs and prints what stands below it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "labs").glob("[1-4]-*.md"))
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_prints_what_the_page_says(page):
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert [kind for kind, _ in blocks] == ["python", "text"] * (len(blocks) // 2)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for (_, code), (_, printed) in zip(blocks[::2], blocks[1::2], strict=True):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, page.name, "exec"), names)
        assert out.getvalue() == printed


def test_there_is_a_page_for_every_lab():
    assert [page.name[0] for page in PAGES] == ["1", "2", "3", "4"]
