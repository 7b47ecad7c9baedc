"""docs/cli.md says what the commands say."""

from pathlib import Path

from mlxkv_cli.docs import page

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m mlxkv_cli.docs > docs/cli.md`"
