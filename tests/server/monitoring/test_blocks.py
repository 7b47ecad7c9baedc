"""The list of blocks that the server gives."""

from __future__ import annotations

import time

import pytest
from driving import some_tokens
from serving import ask
from sites import Site, site

SHARED = some_tokens(192, seed=1)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Three blocks shared by two prompts, and a prompt of its own, whose blocks are older."""
    with site("llama", tmp_path_factory.mktemp("blocks")) as made:
        ask(made.engine, some_tokens(200, seed=4))
        ask(made.engine, SHARED + some_tokens(128, seed=2))
        ask(made.engine, SHARED + some_tokens(70, seed=3))
        yield made


def listed(served: Site, limit: int) -> list[dict]:
    return served.get(f"/v1/cache/blocks?limit={limit}")["blocks"]


def test_a_list_cut_anywhere_has_the_beginning_of_every_chain_in_it(served):
    whole = served.get("/v1/cache/blocks")
    assert whole["total"] == len(whole["blocks"]) > 8
    for limit in range(whole["total"] + 1):
        blocks = listed(served, limit)
        assert len(blocks) == limit
        names = {block["block"] for block in blocks}
        assert all(block["parent"] in names or block["parent"] == whole["root"] for block in blocks)


def test_a_block_was_used_when_what_continues_it_was(served):
    blocks = {block["block"]: block for block in served.get("/v1/cache/blocks")["blocks"]}
    continued = [block for block in blocks.values() if block["parent"] in blocks]
    assert continued
    assert all(blocks[block["parent"]]["used"] >= block["used"] for block in continued)


def test_the_last_used_comes_first_and_its_time_is_a_time_of_day(served):
    before = time.time()
    ask(served.engine, some_tokens(200, seed=4))
    after = time.time()
    first, *rest = listed(served, 100)
    assert first["parent"] == served.get("/v1/cache/blocks")["root"]
    assert before <= first["used"] <= after
    assert all(first["used"] >= block["used"] for block in rest)
    assert [block["used"] for block in rest] == sorted((block["used"] for block in rest), reverse=True)


def test_the_model_of_every_root_is_named(served):
    found = served.get("/v1/cache/blocks")
    assert found["roots"] == {found["root"]: "llama"}


def test_a_root_that_another_process_wrote_is_named_by_the_directory(tmp_path):
    for model in ("llama", "qwen3"):
        with site(model, tmp_path) as made:
            ask(made.engine, some_tokens(130, seed=1))
            found = made.get("/v1/cache/blocks")
    assert sorted(found["roots"].values()) == ["llama", "qwen3"]
    assert found["roots"][found["root"]] == "qwen3"
