"""Where checkpoints are taken, and that a checkpoint's file is believed only when every byte of it is right."""

from __future__ import annotations

import json
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from blocks import ROOT, blocks_of, random_blocks, views_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from mlxkv.cache.block_log import BlockLog
from mlxkv.cache.checkpoint import CADENCE_WITHOUT_KV, SHARE, cadence_tokens, positions
from mlxkv.cache.codec import (
    BlockIdentity,
    checkpoint_identity,
    file_bytes,
    file_name,
    inspect,
    read_block,
    write_block,
)
from mlxkv.cache.cold import ColdTier
from mlxkv.cache.hot import HotTier
from mlxkv.cache.layout import ArraySpec, Layout, StateSpec
from mlxkv.cache.names import block_name, checkpoint_name, pack
from mlxkv.cache.prefix import match
from mlxkv.core.errors import DamagedBlockError

HYBRID = Layout(
    (ArraySpec("3.keys", 1, 1, "uint8"), ArraySpec("3.values", 1, 1, "uint8", window=32)),
    (StateSpec("0.cache.0", (1, 3, 5), "float32"), StateSpec("0.cache.1", (1, 2, 2, 2), "bfloat16")),
)
FIRST, SECOND = random_blocks(2, seed=1)
CHECKPOINT = checkpoint_identity(SECOND)


def states_of(block: BlockIdentity, layout: Layout = HYBRID) -> list[np.ndarray]:
    """One array a state, its bytes drawn from the checkpoint's name."""
    source = random.Random(block.name)
    return [np.frombuffer(source.randbytes(state.nbytes), np.uint8) for state in layout.states]


def write(path: Path, block: BlockIdentity = CHECKPOINT) -> bytes:
    with open(path, "wb") as file:
        assert write_block(file.fileno(), block, HYBRID, views_of(states_of(block))) == file_bytes(block, HYBRID)
    return path.read_bytes()


def read(path: Path, block: BlockIdentity = CHECKPOINT, tensors: list[int] | None = None) -> list[bytes]:
    wanted = [state.nbytes for i, state in enumerate(HYBRID.states) if tensors is None or i in tensors]
    room = [np.zeros(nbytes, np.uint8) for nbytes in wanted]
    read_block(path, block, HYBRID, views_of(room), tensors)
    return [array.tobytes() for array in room]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / file_name(CHECKPOINT.name)


# where


layouts = st.builds(
    lambda row, state: Layout(
        (ArraySpec("0.keys", 1, row, "float32"),) if row else (), (StateSpec("1.cache.0", (1, state), "float32"),)
    ),
    st.integers(0, 300),
    st.integers(1, 100_000),
)


@given(layouts, st.integers(1, 40_000))
def test_the_cadence_alone_takes_at_most_half_the_share(layout: Layout, tokens: int) -> None:
    cadence = cadence_tokens(layout)
    assert cadence % 64 == 0
    assert cadence > 0
    if layout.bytes_per_token:
        taken = tokens // cadence * layout.checkpoint_bytes
        assert taken <= SHARE / 2 * layout.bytes_per_token * tokens
        if cadence > 64:  # and no less often than that allows
            assert layout.checkpoint_bytes > SHARE / 2 * layout.bytes_per_token * (cadence - 64)
    else:
        assert cadence == CADENCE_WITHOUT_KV


@given(layouts, st.integers(1, 20_000), st.lists(st.integers(0, 20_000), max_size=4))
def test_a_prompt_is_checkpointed_at_block_boundaries_that_leave_a_token_to_compute(
    layout: Layout, tokens: int, marks: list[int]
) -> None:
    found = positions(layout, tokens, marks)
    assert found == sorted({*found})
    assert all(at % 64 == 0 and 0 < at < tokens for at in found)
    last = (tokens - 1) // 64 * 64
    assert last == 0 or found[-1] == last
    for mark in marks:
        assert mark // 64 * 64 in {0, *found} or mark > last


def test_a_model_without_states_is_never_checkpointed() -> None:
    layout = Layout((ArraySpec("0.keys", 1, 4, "float32"),))
    assert cadence_tokens(layout) == 0
    assert positions(layout, 5000, [100]) == []


def test_a_checkpoint_is_named_after_its_block_and_no_block_is() -> None:
    assert CHECKPOINT.name == checkpoint_name(SECOND.name) != checkpoint_name(FIRST.name)
    assert (CHECKPOINT.parent, CHECKPOINT.index, CHECKPOINT.tokens) == (SECOND.name, 2, b"")
    assert CHECKPOINT.name != block_name(SECOND.name, b"")


# its file


def test_a_checkpoint_is_read_back_to_the_bit_and_by_any_safetensors_reader(path: Path) -> None:
    write(path)
    assert read(path) == [state.tobytes() for state in states_of(CHECKPOINT)]
    assert inspect(path, payload=True)[0] == CHECKPOINT
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    arrays = mx.load(str(path))
    assert {name: array.shape for name, array in arrays.items()} == {state.path: state.shape for state in HYBRID.states}
    assert metadata["tokens"] == ""
    assert metadata["index"] == "2"


def test_each_tensor_has_a_digest_of_its_own_and_is_read_alone(path: Path) -> None:
    data = write(path)
    first, second = states_of(CHECKPOINT)
    digests = json.loads(data[8:].split(b"}}")[0] + b"}}")["__metadata__"]["payload_xxh3_128"].split()
    assert digests == [xxhash.xxh3_128_hexdigest(first.tobytes()), xxhash.xxh3_128_hexdigest(second.tobytes())]
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert read(path, tensors=[0]) == [first.tobytes()]
    for tensors in ([1], None):
        with pytest.raises(DamagedBlockError, match="payload digest"):
            read(path, tensors=tensors)


def test_every_truncation_is_damage(path: Path) -> None:
    data = write(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedBlockError):
            read(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(DamagedBlockError, match="size"):
        read(path)


def test_every_flipped_bit_is_damage(path: Path) -> None:
    data = write(path)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedBlockError):
            read(path)


@pytest.mark.parametrize(
    "other", [checkpoint_identity(FIRST), checkpoint_identity(random_blocks(2, seed=2)[1]), SECOND]
)
def test_another_checkpoints_or_blocks_file_under_its_name_is_damage(path: Path, other: BlockIdentity) -> None:
    with open(path, "wb") as file:
        views = (
            views_of(states_of(other))
            if other.is_checkpoint
            else [memoryview(bytes(t.nbytes())) for t in HYBRID.tensors]
        )
        write_block(file.fileno(), other, HYBRID, views)
    with pytest.raises(DamagedBlockError):
        read(path)


# in the tiers


def test_a_checkpoint_goes_on_its_own_value_and_its_block_stays() -> None:
    tier = HotTier(10**6)
    chain = random_blocks(4, seed=3)
    for block in chain:
        tier.put(block.name, block.parent, block.tokens, (np.zeros(100, np.uint8),), first=block.index == 0)
        if block.index in (1, 3):
            checkpoint = checkpoint_identity(block)
            tier.put(checkpoint.name, block.name, b"", (np.zeros(1000, np.uint8),), first=False)
    old, new = checkpoint_identity(chain[1]).name, checkpoint_identity(chain[3]).name
    tier.hit([new])
    gone = [tier.evict() for _ in range(3)]
    assert [entry.name for entry in gone if entry] == [old, new, chain[3].name], "the unused one first, leaves only"
    assert chain[1].name in tier
    tier.check_integrity()


def test_an_unused_checkpoint_is_the_first_to_go_from_the_ssd_and_its_block_stays(tmp_path: Path) -> None:
    layout = Layout(HYBRID.arrays, (StateSpec("0.cache.0", (1, 8192), "float32"),))
    tier = ColdTier(tmp_path / "blocks", 10**9, floor_bytes=0, daily_write_bytes=None, log=BlockLog())
    tier.open()
    chain = random_blocks(3, seed=4)
    taken = [checkpoint_identity(chain[1]), checkpoint_identity(chain[2])]
    for block in chain:
        views = [memoryview(bytes(t.nbytes())) for t in layout.tensors]
        assert tier.write(block, layout, views) is None
    for checkpoint in taken:
        assert tier.write(checkpoint, layout, views_of(states_of(checkpoint, layout))) is None
    tier.hit([taken[1].name])
    tier.budget_bytes = tier.used_bytes - 1
    blocks, _ = tier.shrink(tier.budget_bytes)
    assert blocks == 1
    assert {row.name for row in tier.rows()} == {*(block.name for block in chain), taken[1].name}
    tier.check_integrity()
    tier.close()


def test_checkpoints_are_entered_again_when_the_index_is_made_anew(tmp_path: Path) -> None:
    def opened() -> ColdTier:
        tier = ColdTier(tmp_path / "blocks", 10**9, floor_bytes=0, daily_write_bytes=None, log=BlockLog())
        tier.open()
        return tier

    tier = opened()
    for block in (FIRST, SECOND):
        assert tier.write(block, HYBRID, [memoryview(bytes(t.nbytes())) for t in HYBRID.tensors]) is None
    assert tier.write(CHECKPOINT, HYBRID, views_of(states_of(CHECKPOINT))) is None
    before = {row.identity for row in tier.rows()}
    tier.close()
    (tmp_path / "blocks" / "index.sqlite").unlink()
    tier = opened()
    assert {row.identity for row in tier.rows()} == before
    tier.check_integrity()
    tier.close()


def test_a_checkpoint_without_its_block_is_not_kept(tmp_path: Path) -> None:
    tier = ColdTier(tmp_path / "blocks", 10**9, floor_bytes=0, daily_write_bytes=None, log=BlockLog())
    tier.open()
    assert tier.write(CHECKPOINT, HYBRID, views_of(states_of(CHECKPOINT))) == "parent not held"
    hot = HotTier(10**6)
    assert hot.put(CHECKPOINT.name, SECOND.name, b"", tuple(states_of(CHECKPOINT)), first=False)[0] is False
    tier.close()


def test_a_restore_of_windows_and_states_counts_what_it_moves() -> None:
    assert HYBRID.bytes_per_token == 2
    assert HYBRID.checkpoint_bytes == 76
    assert HYBRID.restored_bytes(0) == 0
    assert HYBRID.restored_bytes(20) == 20 + 20 + 76
    assert HYBRID.restored_bytes(1000) == 1000 + 32 + 76
    assert HYBRID.rows_bytes(0, 960, 1000) == 960
    assert HYBRID.rows_bytes(960, 1000, 1000) == 40 + 32


def test_a_prompt_matches_the_same_whether_checkpoints_hang_on_it_or_not() -> None:
    hot, cold = HotTier(10**6), HotTier(0)
    blocks = blocks_of(range(200))
    for block in blocks:
        hot.put(block.name, block.parent, block.tokens, (np.zeros(4, np.uint8),), first=block.index == 0)
    asked = [pack([*range(150), 9, 9]), pack([*range(128), 9, 9]), pack(range(300))]
    before = [match(ROOT, packed, hot, cold) for packed in asked]
    for block in blocks[:3]:
        checkpoint = checkpoint_identity(block)
        hot.put(checkpoint.name, block.name, b"", (np.zeros(4, np.uint8),), first=False)
    assert [match(ROOT, packed, hot, cold) for packed in asked] == before
