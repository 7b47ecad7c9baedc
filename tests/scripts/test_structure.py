"""The table of scripts/structure.py, on packages whose figures are known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]

FILES = {
    "__init__.py": '"""A package."""\n',
    "first.py": """
        from typing import TYPE_CHECKING

        from made.inner import second

        if TYPE_CHECKING:
            from made import alone


        class Reader:
            def read(self):
                try:
                    return second.text()
                except Exception:  # noqa: BLE001 - a page is no reason to stop
                    return None

            def clean(self):
                try:
                    self.read()
                except (ValueError, BaseException):
                    self.gone = True
                    raise
        """,
    "inner/__init__.py": "",
    "inner/second.py": """
        import contextlib


        def text():
            def inner():
                import json
                from made import first

                return json, first

            with contextlib.suppress(Exception):
                return inner()
            try:
                return None
            except ValueError:
                return ""
            except:
                return None
        """,
    "alone.py": "import made.first\n",
}


def table(package: Path) -> list[tuple[str, str]]:
    """The rows that the script prints, without its head."""
    command = [sys.executable, str(ROOT / "scripts" / "structure.py"), str(package)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[:2] == ["| figure | value |", "|---|---|"]
    return [(figure, value) for _, figure, value, _ in (line.split("|") for line in lines[2:])]


def write(directory: Path, files: dict[str, str]) -> Path:
    package = directory / "made"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).removeprefix("\n"), encoding="utf-8")
    return package


def test_the_figures_of_a_small_package_are_those_one_counts_by_hand(tmp_path: Path) -> None:
    assert [(figure.strip(), value.strip()) for figure, value in table(write(tmp_path, FILES))] == [
        ("modules", "5 with 41 lines; median 1, most 21"),
        ("longest module", "21: `made.first`"),
        ("longest class", "13: `made.first.Reader`"),
        ("longest function", "15: `made.inner.second.text`"),
        ("import cycles", "1"),
        ("import cycle", "`made.first`, `made.inner.second`"),
        ("broad excepts", "4"),
        ("broad except", "`made.first.Reader.read`: a page is no reason to stop"),
        ("broad except", "`made.first.Reader.clean`: raised again"),
        ("broad except", "`made.inner.second.text`: no reason given"),
        ("broad except", "`made.inner.second.text`: no reason given"),
        ("late imports", "2 in 1 modules"),
        ("late imports of", "`made.inner.second`: 2"),
    ]


def test_what_is_over_a_limit_is_named_with_its_reason(tmp_path: Path) -> None:
    body = "    x = 1\n" * 60
    text = f"# long: a table\ndef long():  # long: one list\n{body}\ndef longer():\n{body}{body}\n" + "x = 1\n" * 270
    found = table(write(tmp_path, {"__init__.py": text}))
    assert [(figure.strip(), value.strip()) for figure, value in found[1:5]] == [
        ("module over 450 lines", "455: `made` a table"),
        ("function over 60 lines", "121: `made.longer`"),
        ("function over 60 lines", "61: `made.long` one list"),
        ("import cycles", "0"),
    ]


def test_this_repository_s_own_table_has_all_its_modules() -> None:
    count = sum(len(list((ROOT / package).rglob("*.py"))) for package in ("mlxkv", "cli/mlxkv_cli"))
    command = [sys.executable, str(ROOT / "scripts" / "structure.py")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout
    assert f"| modules | {count} with " in said
