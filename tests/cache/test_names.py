"""Names: equal exactly when root and tokens are equal, in every process."""

import json
import os
import struct
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxkv.cache import names
from mlxkv.cache.names import BLOCK_TOKENS, block_name, chain, common_tokens, pack, root_name, unpack
from mlxkv.core.errors import UsageError

ROOT = root_name({"model": "tiny"})
tokens = st.integers(0, 2**32 - 1)


def name_by_hand(parent: bytes, block: list[int]) -> bytes:
    return sha256(parent + struct.pack("<I", len(block)) + struct.pack(f"<{len(block)}I", *block)).digest()


@given(st.lists(tokens, max_size=5))
def test_packing_is_u32_little_endian_and_unpack_undoes_it(ids):
    assert pack(ids) == struct.pack(f"<{len(ids)}I", *ids)
    assert unpack(pack(ids)) == ids


@pytest.mark.parametrize("bad", [-1, 2**32, 1.0, "1", None, [1], 2**70])
def test_what_is_not_a_token_id_is_refused_in_one_sentence(bad):
    with pytest.raises(UsageError, match=r"^token ids are whole numbers from 0 to 2\*\*32 - 1 .*\.$"):
        pack([1, bad])


@given(st.lists(tokens, max_size=300))
def test_a_name_is_the_sha256_of_parent_count_and_tokens(ids):
    parent, expected = ROOT, []
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = name_by_hand(parent, ids[start : start + BLOCK_TOKENS])
        expected.append(parent)
    assert list(chain(ROOT, pack(ids))) == expected


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 129, 192, 193])
def test_full_blocks_have_a_name_and_a_partial_last_one_has_none(count):
    assert len(list(chain(ROOT, pack(range(count))))) == count // 64


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 129, 192])
def test_a_longer_prompt_continues_the_chain_of_a_shorter_one(count):
    shorter = list(chain(ROOT, pack(range(count))))
    longer = list(chain(ROOT, pack(range(count + 64))))
    assert longer[:-1] == shorter


@pytest.mark.parametrize("changed", [0, 63, 64, 127])
def test_a_changed_token_renames_its_block_and_all_after_it_and_none_before(changed):
    ids = list(range(192))
    before = list(chain(ROOT, pack(ids)))
    ids[changed] += 1000
    after = list(chain(ROOT, pack(ids)))
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < changed // 64 for i in range(3)]


def test_equal_blocks_at_different_places_have_different_names():
    assert len(set(chain(ROOT, pack([7] * 64 * 5)))) == 5


def test_another_root_gives_no_name_in_common():
    ids = pack(range(256))
    assert not set(chain(ROOT, ids)) & set(chain(root_name({"model": "tiny", "salt": "x"}), ids))


@given(st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, min_size=1, max_size=6))
def test_tails_of_different_tokens_have_different_names(a, b):
    assert (block_name(ROOT, pack(a)) == block_name(ROOT, pack(b))) == (a == b)


FIELD = st.text(st.sampled_from("ab=,\0"), max_size=4)


@given(st.dictionaries(FIELD, FIELD, max_size=3), st.dictionaries(FIELD, FIELD, max_size=3))
def test_different_fields_never_give_the_same_root(a, b):
    assert (root_name(a) == root_name(b)) == (a == b)


def test_field_boundaries_are_part_of_the_root():
    collisions = [
        {"adapter": "ab", "salt": "c"},
        {"adapter": "a", "salt": "bc"},
        {"adapter": "abc", "salt": ""},
        {"adapter": "", "salt": "abc"},
        {"adapter": "abc"},
        {"adapter": "ab", "saltc": ""},
        {"adaptera": "b", "salt": "c"},
        {"adapter": "c", "salt": "ab"},  # a salt chosen to equal an adapter
        {"adapter": "ab\0salt\0c"},
        {},
    ]
    assert len({root_name(fields) for fields in collisions}) == len(collisions)


def test_the_order_in_which_fields_were_set_is_not_part_of_the_root():
    assert root_name({"a": "1", "b": "2"}) == root_name({"b": "2", "a": "1"})


def test_a_root_is_as_long_as_a_name():
    assert len(ROOT) == len(next(chain(ROOT, pack(range(64))))) == 32


PRINT_NAMES = """
import json
from mlxkv.cache.names import chain, pack, root_name
fields = {"model": "tiny", "adapter": "none", "salt": "s\u00e4lt"}
print(json.dumps([name.hex() for name in chain(root_name(fields), pack(range(130)))]))
"""


def test_names_are_the_same_in_every_process(tmp_path):
    found = []
    for hash_seed in (None, "0", "1"):
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONHASHSEED", "LC_ALL", "LANG")}
        environment |= {"LC_ALL": "C"} if hash_seed is None else {"PYTHONHASHSEED": hash_seed, "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            [sys.executable, "-c", PRINT_NAMES],
            cwd=tmp_path if hash_seed == "1" else Path(__file__).parent,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout))
    root = root_name({"salt": "s\u00e4lt", "adapter": "none", "model": "tiny"})
    here = [name.hex() for name in chain(root, pack(range(130)))]
    assert found == [here, here, here]
    assert here == [
        "fb8c49c3e7fc8c327d41ec719484055418cbd6d7a9a77de1923263763a3ebb8b",
        "87e24604949b03a36ba3ed15ecddf2b3a073dcd7ce0b70ddb58314ebc4e0ee2e",
    ]  # as first released: another value here makes every cache out there worthless


def common_by_hand(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


WIDE = st.sampled_from([0, 1, 256, 2**16, 2**24, 2**31, 2**32 - 1])


@given(st.lists(WIDE, max_size=70), st.lists(WIDE, max_size=8), st.lists(WIDE, max_size=8))
def test_common_tokens_are_those_a_person_counts(shared, a, b):
    a, b = shared + a, shared + b
    assert common_tokens(pack(a), pack(b)) == common_by_hand(a, b)


@pytest.mark.parametrize("at", range(64))
@pytest.mark.parametrize("bit", [0, 7, 8, 31])
def test_one_different_bit_ends_what_is_common_at_its_token(at, bit):
    ids = [5] * 64
    other = [token ^ (1 << bit) if i == at else token for i, token in enumerate(ids)]
    assert common_tokens(pack(ids), pack(other)) == at


def test_a_prompt_of_150_000_tokens_takes_one_hash_a_block(monkeypatch):
    hashed: list[int] = []

    def counting(data: bytes):
        hashed.append(len(data))
        return sha256(data)

    packed = pack(range(150_000))
    monkeypatch.setattr(names, "sha256", counting)
    assert len(list(chain(ROOT, packed))) == 2343
    assert hashed == [32 + 4 + 256] * 2343
