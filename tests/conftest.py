"""What every test has: reproducible hypothesis runs, MLX's reference BLAS, and no way into the user's own cache."""

import os
import sys

os.environ.setdefault("MLXKV_BLAS", "none")  # tests ask for equality to the bit; a tuned BLAS picks kernels by shape

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("ci")  # `pytest --hypothesis-profile NAME` overrides it


@pytest.fixture(autouse=True, scope="session")
def _own_home(tmp_path_factory):
    """A home folder of this run's own, in subprocesses too."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
        yield


@pytest.fixture(autouse=True)
def _no_clock_decides(monkeypatch):
    """A tiny model may compute faster than a busy machine restores, and the never-slower rule would then be right.

    Without a measured prefill it stays out of the way; its own tests set the rates themselves.
    """
    block_cache = sys.modules.get("mlxkv.prompt_cache.block_cache")
    if block_cache is not None:
        monkeypatch.setattr(block_cache, "MEASURED_TOKENS", 10**9)


def pytest_addoption(parser):
    parser.addoption(
        "--all-kinds", action="store_true", help="Play every prompt length of every kind of cache (several minutes)."
    )
