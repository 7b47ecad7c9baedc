"""`mlxkv cache`: what it shows is what is there, and what it deletes is what it showed."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from driving import run_warm, some_tokens
from talking import plain_tokenizer, save_talking_model
from tiny import build_tiny, tiny_llama

from mlxkv.cache import maintenance
from mlxkv.cache.block_log import BlockLog
from mlxkv.cache.cold import opened
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import MIB
from mlxkv.prompt_cache.block_cache import BlockCache
from mlxkv_cli.docs import JSON_FIELDS
from mlxkv_cli.main import run

FIRST = some_tokens(260, seed=1)
SECOND = FIRST[:130] + some_tokens(130, seed=2)
OTHER = some_tokens(130, seed=3)
BLOCKS = {"alpha": 6, "beta": 2}


def open_cache(directory, name, **options):
    config = CacheConfig(directory=directory, hot_bytes=0, cold_bytes=64 * MIB, floor_bytes=0, **options)
    return BlockCache(build_tiny(tiny_llama()), {"model": name}, BlockStore(config), name=name)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache of two models: `alpha` with two chains that part after two blocks, `beta` with one."""
    directory = tmp_path_factory.mktemp("made") / "blocks"
    for name, prompts in (("alpha", [FIRST, SECOND]), ("beta", [OTHER])):
        with open_cache(directory, name) as cache:
            for prompt in prompts:
                run_warm(cache, cache._module, prompt)
                cache.store.flush()
    return directory


@pytest.fixture
def blocks(made, tmp_path):
    """A copy of it for one test."""
    return Path(shutil.copytree(made, tmp_path / "blocks"))


@pytest.fixture
def ask(capsys):
    """Runs `mlxkv cache ... --json` and returns its exit code and its one object."""

    def asker(verb, directory, *options):
        code = run(["cache", verb, *options, "--cache-dir", str(directory), "--json"])
        out, err = capsys.readouterr()
        assert out.count("\n") == 1, err
        return code, json.loads(out)

    return asker


def names(blocks):
    with opened(blocks, BlockLog(), change=True) as tier:
        return {row.name.hex(): row for row in tier.rows()}


def place_of(path):
    header = path.read_bytes()
    metadata = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
    return int(metadata["index"])


def files_in(directory):
    """Every file with its content, the index aside."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith("index.sqlite")
    }


VERBS = {
    "info": [],
    "ls": [],
    "verify": [],
    "prune": ["--keep", "1GiB", "--dry-run"],
    "clear": ["--dry-run"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_json_is_one_object_with_the_documented_fields_and_looking_changes_nothing(ask, blocks, verb):
    before = files_in(blocks)
    code, found = ask(verb, blocks, *VERBS[verb])
    assert code == 0
    assert found.keys() == JSON_FIELDS[f"cache {verb}"].keys()
    assert files_in(blocks) == before


@pytest.mark.parametrize("verb", VERBS)
def test_where_there_is_no_cache_yet_nothing_is_found_and_nothing_is_made(ask, tmp_path, verb):
    code, found = ask(verb, tmp_path / "absent", *VERBS[verb])
    assert code == 0
    assert found.keys() == JSON_FIELDS[f"cache {verb}"].keys()
    assert not any(found.get(field) for field in ("blocks", "models", "used_bytes", "planned_blocks", "problems"))
    assert list(tmp_path.iterdir()) == []


def test_info_counts_each_model_and_every_byte_of_the_root(ask, blocks):
    _, found = ask("info", blocks, "--cold", "1GiB", "--hot", "512MiB")
    assert {model["model"]: model["blocks"] for model in found["models"]} == BLOCKS
    assert {model["model"]: model["tokens"] for model in found["models"]} == {"alpha": 384, "beta": 128}
    assert (found["cold_budget_bytes"], found["hot_budget_bytes"]) == (2**30, 2**29)
    physical = sum(path.lstat().st_blocks * 512 for path in [blocks, *blocks.rglob("*")])
    assert physical <= found["used_bytes"] <= physical + MIB
    assert found["used_bytes"] > sum(model["used_bytes"] for model in found["models"])


def test_info_for_a_person_names_models_sizes_and_budgets(capsys, blocks):
    assert run(["cache", "info", "--cache-dir", str(blocks), "--cold", "1GiB"]) == 0
    shown = capsys.readouterr().out
    assert "of 1.00 GiB" in shown
    assert {line.split()[0] for line in shown.splitlines() if line.startswith(tuple(BLOCKS))} == set(BLOCKS)


def test_ls_shows_every_block_after_what_it_continues(ask, blocks):
    _, found = ask("ls", blocks)
    seen = set()
    for block in found["blocks"]:
        assert block["parent"] in (seen if block["index"] else {block["root"]})
        seen.add(block["block"])
    assert seen == names(blocks).keys()
    assert {block["tier"] for block in found["blocks"]} == {"cold"}


def test_ls_shows_the_blocks_of_one_model(ask, blocks):
    _, found = ask("ls", blocks, "--model", "beta")
    assert [(block["model"], block["index"]) for block in found["blocks"]] == [("beta", 0), ("beta", 1)]
    assert ask("ls", blocks, "--model", "gamma") == (0, {"blocks": []})


def test_ls_shows_as_many_as_asked_for_and_says_how_many_more(ask, capsys, blocks):
    assert len(ask("ls", blocks, "--limit", "3")[1]["blocks"]) == 3
    assert len(ask("ls", blocks, "--limit", "0")[1]["blocks"]) == 8
    assert run(["cache", "ls", "--limit", "3", "--cache-dir", str(blocks)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 4  # and a head
    assert err == "5 more; --limit 0 shows all.\n"


def test_a_restored_chain_has_one_hit_more(ask, blocks):
    def hits():
        return {block["block"]: block["hits"] for block in ask("ls", blocks)[1]["blocks"]}

    before = hits()
    with open_cache(blocks, "alpha") as cache:
        cache.restore(FIRST)
    after = hits()
    assert sum(after[name] - before[name] for name in after) == 4
    assert max(after[name] - before[name] for name in after) == 1


def test_a_block_was_used_when_what_continues_it_was(ask, blocks):
    with closing(sqlite3.connect(blocks / "index.sqlite")) as index:
        index.execute("UPDATE blocks SET used = 0")
        index.commit()
    with open_cache(blocks, "alpha") as cache:
        cache.restore(FIRST)
    found = [block for block in ask("ls", blocks)[1]["blocks"] if not block["used"].startswith("1970")]
    assert [block["index"] for block in found] == [0, 1, 2, 3]
    assert len({block["used"] for block in found}) == 1
    assert ask("show", blocks, found[0]["block"])[1]["used"] == found[0]["used"]


def test_show_finds_a_block_by_the_first_digits_of_its_name(ask, blocks):
    known = names(blocks)
    for name, row in known.items():
        code, found = ask("show", blocks, name[:16].upper())
        assert code == 0
        assert found.keys() == JSON_FIELDS["cache show"].keys() - {"text"}
        assert (found["block"], found["index"], found["parent"]) == (name, row.index, row.parent.hex())
        assert set(found["children"]) == {other for other, child in known.items() if child.parent == row.name}
        assert Path(found["file"]).stat().st_blocks * 512 == found["bytes"]
        assert len(found["token_ids"]) == found["tokens"] == 64


def test_show_decodes_the_text_only_when_asked_to(ask, capsys, blocks, tmp_path):
    model = save_talking_model(tmp_path / "model")
    name = next(name for name, row in names(blocks).items() if row.index == 3)
    code, found = ask("show", blocks, name, "--text", "--model", str(model))
    assert code == 0
    assert found.keys() == JSON_FIELDS["cache show"].keys()
    assert found["text"] == plain_tokenizer().decode(found["token_ids"])
    run(["cache", "show", name, "--cache-dir", str(blocks)])
    assert found["text"] not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("block", "said"), [("", "not the start"), ("xyz", "not the start"), ("0" * 64, "no block starts with")]
)
def test_show_of_a_block_that_is_not_there_is_wrong_usage(capsys, blocks, block, said):
    assert run(["cache", "show", block, "--cache-dir", str(blocks), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.endswith("`mlxkv cache ls` shows them.\n")


def test_show_of_a_name_that_two_blocks_have_asks_for_more_digits(capsys, blocks):
    firsts = [name[0] for name in names(blocks)]
    digit = next(digit for digit in firsts if firsts.count(digit) > 1)
    assert run(["cache", "show", digit, "--cache-dir", str(blocks)]) == 2
    assert f"several blocks start with {digit}; give more digits." in capsys.readouterr().err


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit": (flip, "damaged (payload digest)"),
    "a cut file": (lambda path: os.truncate(path, path.stat().st_size // 2), "damaged (size)"),
    "an empty file": (lambda path: os.truncate(path, 0), "damaged (size)"),
    "no file": (lambda path: path.unlink(), "file missing"),
    "another block": (
        lambda path: shutil.copyfile(next(p for p in path.parents[1].rglob("*.safetensors") if p != path), path),
        "damaged (name)",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_verify_says_1_and_repairs_with_fix(ask, blocks, kind):
    damage, problem = DAMAGE[kind]
    path = next(path for path in blocks.rglob("*.safetensors") if place_of(path) == 3)  # the end of a chain
    damage(path)
    for _ in range(2):  # looking does not mend
        code, found = ask("verify", blocks)
        assert (code, found["problems"], found["fixed"]) == (1, {problem: 1}, False)
        assert [Path(problem["file"]).name for problem in found["files"]] == [path.name]
        assert found["blocks"] == 7
    code, found = ask("verify", blocks, "--fix")
    assert (code, found["problems"], found["fixed"]) == (0, {problem: 1}, True)
    code, found = ask("verify", blocks)
    assert (code, found["problems"], found["blocks"]) == (0, {}, 7)
    assert len(names(blocks)) == 7
    assert not path.exists()


def test_what_continued_a_damaged_block_goes_with_it(ask, blocks):
    path = next(path for path in blocks.rglob("*.safetensors") if place_of(path) == 2)
    flip(path)
    assert ask("verify", blocks, "--fix")[0] == 0
    code, found = ask("verify", blocks)
    assert (code, found["blocks"]) == (0, 6)
    _, found = ask("info", blocks)
    assert found["quarantined_files"] == 1
    assert found["quarantined_bytes"] > 0


def test_a_lost_index_is_a_problem_and_is_made_again_from_the_files(ask, blocks):
    before = names(blocks).keys()
    for path in blocks.glob("index.sqlite*"):
        path.unlink()
    code, found = ask("verify", blocks)
    assert (code, found["blocks"], found["problems"]) == (1, 8, {"no sound index": 1})
    assert not list(blocks.glob("index.sqlite*"))
    code, found = ask("verify", blocks, "--fix")
    assert (code, found["held_blocks"]) == (0, 8)
    assert names(blocks).keys() == before


def test_looking_at_a_cache_without_index_and_first_block_deletes_nothing(ask, blocks):
    for path in blocks.glob("index.sqlite*"):
        path.unlink()
    next(path for path in blocks.rglob("*.safetensors") if place_of(path) == 0).unlink()
    left = sorted(blocks.rglob("*"))
    for verb in ("info", "ls", "verify"):
        ask(verb, blocks)
    assert sorted(blocks.rglob("*")) == left


@pytest.fixture
def foreign(blocks, tmp_path):
    """Other people's files among the blocks: path -> content, None for a directory."""
    fan = next(path for path in blocks.rglob("*.safetensors") if place_of(path) == 0).parent
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    content = {
        fan / f"._{'a' * 64}.safetensors": bytes.fromhex("0005160700020000").ljust(4096, b"\0"),
        fan / f"{fan.name}{'b' * 62}.safetensors" / "inside.txt": b"mine",
        fan / ".DS_Store": b"mine",
        blocks / "movie.mp4": b"mine" * 1000,
        blocks / "holiday" / "photo.jpg": b"mine",
    }
    for path, data in content.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    link = fan / f"{fan.name}{'c' * 62}.safetensors"
    link.symlink_to(outside)
    return {**content, link: b"mine", outside: b"mine"}


def test_other_people_s_files_are_listed_apart_and_are_no_problem(ask, blocks, foreign):
    code, found = ask("verify", blocks)
    assert (code, found["problems"]) == (0, {})
    assert set(found["foreign"]) == {str(path) for path in foreign if path.is_relative_to(blocks)}


@pytest.mark.parametrize("act", [["verify", "--fix"], ["clear", "--yes"], ["prune", "--keep", "0", "--yes"]])
def test_other_people_s_files_stay_whatever_is_deleted(ask, blocks, foreign, act):
    assert ask(act[0], blocks, *act[1:])[0] == 0
    assert {path: path.read_bytes() for path in foreign} == foreign
    if act[0] != "verify":
        assert names(blocks) == {}


def test_prune_deletes_exactly_what_it_planned_and_then_it_fits(ask, blocks):
    before = names(blocks)
    _, sizes = ask("info", blocks)
    keep = sizes["used_bytes"] - 3 * before[next(iter(before))].nbytes
    with opened(blocks, BlockLog(), change=True) as tier:
        planned = {row.name.hex() for row in maintenance.plan_prune(tier, keep)}
    content = files_in(blocks)
    code, shown = ask("prune", blocks, "--keep", f"{keep}B", "--dry-run")
    assert (code, shown["planned_blocks"], shown["blocks"], shown["freed_bytes"]) == (0, len(planned), 0, 0)
    assert files_in(blocks) == content
    code, done = ask("prune", blocks, "--keep", f"{keep}B", "--yes")
    assert (code, done["blocks"], done["freed_bytes"]) == (0, len(planned), shown["planned_bytes"])
    after = names(blocks)
    assert before.keys() - after.keys() == planned
    assert all(row.index == 0 or row.parent.hex() in after for row in after.values())
    assert ask("info", blocks)[1]["used_bytes"] <= keep
    assert ask("verify", blocks)[0] == 0


def test_prune_takes_the_least_recently_used_first(ask, blocks):
    with open_cache(blocks, "alpha") as cache:
        cache.restore(FIRST)
    before = names(blocks)
    used = ask("info", blocks)[1]["used_bytes"]
    ask("prune", blocks, "--keep", f"{used - 3 * before[next(iter(before))].nbytes}B", "--yes")
    with open_cache(blocks, "alpha") as cache:
        assert cache.restore(FIRST).tokens == 256


def test_prune_of_what_fits_deletes_nothing(ask, capsys, blocks):
    code, found = ask("prune", blocks, "--keep", "1GiB", "--yes")
    assert (code, found["blocks"], found["planned_blocks"]) == (0, 0, 0)
    run(["cache", "prune", "--keep", "1GiB", "--cache-dir", str(blocks)])
    assert capsys.readouterr().out == "Nothing to delete.\n"


@pytest.mark.parametrize("act", [["prune", "--keep", "0"], ["clear"]])
def test_where_nobody_can_be_asked_nothing_is_deleted(capsys, blocks, act):
    content = files_in(blocks)
    assert run(["cache", *act, "--cache-dir", str(blocks)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mlxkv: Delete 8 blocks, ")
    assert err.endswith("to go ahead, add --yes\n")
    assert files_in(blocks) == content


@pytest.mark.parametrize("keep", ["5", "much", "-1GiB", ""])
def test_a_size_that_has_no_meaning_is_wrong_usage(capsys, blocks, keep):
    assert run(["cache", "prune", "--keep", keep, "--yes", "--cache-dir", str(blocks)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mlxkv: ")
    assert err.count("\n") == 1
    assert len(names(blocks)) == 8


def test_clear_of_one_model_leaves_the_other(ask, blocks):
    code, found = ask("clear", blocks, "--model", "alpha", "--yes")
    assert (code, found["blocks"]) == (0, 6)
    assert {row.root.hex() for row in names(blocks).values()} == {ask("ls", blocks)[1]["blocks"][0]["root"]}
    assert {block["model"] for block in ask("ls", blocks)[1]["blocks"]} == {"beta"}
    assert ask("clear", blocks, "--model", "gamma", "--yes")[1]["blocks"] == 0


def test_no_empty_folder_stays_behind_a_deleted_block(ask, blocks):
    _, sizes = ask("info", blocks)
    folders = [path for path in blocks.rglob("*") if path.is_dir()]
    for act in (("prune", blocks, "--keep", f"{sizes['used_bytes'] - 1}B"), ("clear", blocks, "--model", "alpha")):
        assert ask(*act, "--yes")[1]["blocks"] > 0
        left = [path for path in blocks.rglob("*") if path.is_dir()]
        assert 0 < len(left) < len(folders)
        assert all(any(path.iterdir()) for path in left)
        folders = left


def test_after_clear_the_cache_works_as_before(ask, blocks):
    assert ask("clear", blocks, "--yes")[1]["blocks"] == 8
    with open_cache(blocks, "alpha") as cache:
        assert run_warm(cache, cache._module, FIRST).held == 0
        cache.store.flush()
        assert run_warm(cache, cache._module, FIRST).held == 256


@pytest.mark.parametrize("verb", VERBS)
def test_a_directory_that_cannot_be_used_is_one_sentence_that_says_what_to_do(capsys, tmp_path, verb):
    (tmp_path / "file").write_text("")
    others = tmp_path / "others"
    others.mkdir()
    others.chmod(0o777)
    for path in (tmp_path / "file", others):
        assert run(["cache", verb, *VERBS[verb], "--cache-dir", str(path), "--json"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert str(path) in err
        assert err.endswith("choose another --cache-dir.\n")
        assert err.count("\n") == 1


def test_the_directory_comes_from_the_environment_too(blocks):
    flip(next(blocks.rglob("*.safetensors")))
    done = subprocess.run(
        [sys.executable, "-m", "mlxkv_cli.main", "cache", "verify"],
        env={**os.environ, "MLXKV_CACHE_DIR": str(blocks)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "1 damaged (payload digest)" in done.stdout
    assert "mlxkv cache verify --fix" in done.stdout
    assert done.stderr == ""
