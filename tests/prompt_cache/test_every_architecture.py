"""Every architecture of the installed mlx-lm that can be built tiny: it resumes where mlx-lm's own caches would be."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
from driving import some_tokens
from kinds import CONFIGS, ask, build, open_cache, play_short

PAGE = (Path(__file__).parents[2] / "docs" / "kinds.md").read_text(encoding="utf-8")
NOT_BUILT = {"bitnet"}  # needs a Metal kernel
UNCACHED = {"deepseek_v41"}  # a cache class of its own
PLAYED = sorted(CONFIGS.keys() - NOT_BUILT - UNCACHED, key=str.casefold)


@pytest.mark.parametrize("name", PLAYED)
def test_a_second_request_reuses_something_and_answers_as_mlx_lm_alone(name: str, tmp_path: Path) -> None:
    assert play_short(name, tmp_path).held["resend"] > 0


@pytest.mark.parametrize("name", sorted(UNCACHED))
def test_a_model_that_cannot_be_kept_says_so_on_every_request(name: str, tmp_path: Path) -> None:
    module = build(CONFIGS[name])
    with open_cache(module, tmp_path) as cache:
        assert cache.uncached is not None
        assert "runs uncached" in cache.uncached
        for _ in range(2):
            assert ask(module, cache, some_tokens(150, 7), 2).held == 0
        sequence = cache.start(some_tokens(150, 7))
        assert sequence.finish().reason == cache.uncached


def test_the_page_has_every_architecture_with_a_row_or_a_reason() -> None:
    version = importlib.metadata.version("mlx-lm")
    if f"mlx-lm {version}" not in PAGE:
        pytest.skip(f"docs/kinds.md was not written for mlx-lm {version}; run benchmarks/kinds_grid.py")
    rows = set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE))
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    files = (Path(spec.origin).parent / "models").glob("*.py")
    models = {path.stem for path in files if "class ModelArgs" in path.read_text(encoding="utf-8")}
    assert (models | CONFIGS.keys()) - rows == set()
    for name in NOT_BUILT | UNCACHED:
        assert re.search(rf"^\| `{name}` \| not ", PAGE, re.MULTILINE), f"{name} has no reason"
