"""The block file: any safetensors reader opens it, and no damage to it is ever taken for the block."""

import errno
import json
import os
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from blocks import OTHER_ROOT, ROOT, SMALL, block_layout, blocks_of, empty_payload, payload_of, random_blocks, views_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from mlxkv.cache import codec
from mlxkv.cache.codec import BlockIdentity, file_bytes, file_name, inspect, read_block, relative_path, write_block
from mlxkv.cache.layout import DTYPES, ArraySpec, Layout
from mlxkv.cache.names import block_name, unpack
from mlxkv.core.errors import DamagedBlockError

FIRST, SECOND = blocks_of([i % 7 for i in range(128)])
NUMPY = {"F32": np.float32, "F16": np.float16, "U32": np.uint32, "U8": np.uint8}


def write(path: Path, block: BlockIdentity, layout: Layout, payload: list[np.ndarray] | None = None) -> Path:
    """The file of a block, under `path` when that is a file's name, else under its own name in that folder."""
    path = path / file_name(block.name) if path.is_dir() else path
    with open(path, "wb") as file:
        written = write_block(file.fileno(), block, layout, views_of(payload or payload_of(block, layout)))
    assert written == path.stat().st_size == file_bytes(block, layout)
    return path


def read(path: Path, block: BlockIdentity, layout: Layout) -> list[bytes]:
    """What the file holds for `block`, as bytes; raises as `read_block` does."""
    payload = empty_payload(layout)
    assert read_block(path, block, layout, views_of(payload)) == layout.block_bytes
    return [array.tobytes() for array in payload]


def is_refused(path: Path, block: BlockIdentity = SECOND, layout: Layout = SMALL) -> str:
    """Asserts that both readers find the file damaged; the check that `read_block` names."""
    with pytest.raises(DamagedBlockError):
        inspect(path, payload=True)
    with pytest.raises(DamagedBlockError) as raised:
        read(path, block, layout)
    return raised.value.reason


@pytest.fixture
def good(tmp_path):
    """A sound file of SECOND."""
    return write(tmp_path, SECOND, SMALL)


# --- round trip ------------------------------------------------------------------------------------------------------


@given(st.data())
def test_what_was_written_is_read_back(tmp_path_factory, data):
    array = st.builds(
        ArraySpec, st.uuids().map(str), st.integers(0, 3), st.integers(0, 5), st.sampled_from(sorted(DTYPES))
    )
    layout = Layout(tuple(data.draw(st.lists(array, min_size=1, max_size=4))))
    tokens = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64))
    (block,) = blocks_of(tokens)
    path = write(tmp_path_factory.getbasetemp() / "round-trip", block, layout)
    if layout.tensors:
        assert read(path, block, layout) == [a.tobytes() for a in payload_of(block, layout)]


MIXED = Layout(
    (
        ArraySpec("0.keys", 2, 3, "float32"),
        ArraySpec("0.values", 2, 3, "float16"),
        ArraySpec("1.keys.0", 1, 4, "uint32"),
        ArraySpec("1.keys.1", 1, 4, "uint8"),
        ArraySpec("2.keys", 2, 3, "float32"),
    )
)


def test_the_safetensors_package_reads_the_same_tensors_and_metadata(tmp_path):
    path = write(tmp_path, SECOND, MIXED)
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert tensors.keys() == {tensor.name for tensor in MIXED.tensors}
    for tensor, written in zip(MIXED.tensors, payload_of(SECOND, MIXED), strict=True):
        found = tensors[tensor.name]
        assert (found.shape, found.dtype) == (tensor.shape(), NUMPY[DTYPES[tensor.dtype][0]])
        assert found.tobytes() == written.tobytes()
    assert {k: metadata[k] for k in ("format", "root", "name", "parent", "index")} == {
        "format": "mlxkv-block-1",
        "root": ROOT.hex(),
        "name": SECOND.name.hex(),
        "parent": FIRST.name.hex(),
        "index": "1",
    }
    assert [int(token) for token in metadata["tokens"].split()] == unpack(SECOND.tokens)
    digests = [xxhash.xxh3_128_hexdigest(array.tobytes()) for array in payload_of(SECOND, MIXED)]
    assert metadata["payload_xxh3_128"].split() == digests
    assert datetime.fromisoformat(metadata["created"]).tzinfo is not None


def test_mlx_reads_the_file_as_well_bfloat16_included(tmp_path):
    layout = Layout((ArraySpec("0.keys", 2, 3, "bfloat16"), ArraySpec("0.values", 2, 4, "float32")))
    array = mx.random.normal((1, 2, 64, 3)).astype(mx.bfloat16)
    other = mx.random.normal((1, 2, 64, 4))
    mx.eval(array, other)
    path = tmp_path / file_name(SECOND.name)
    with open(path, "wb") as file:
        write_block(file.fileno(), SECOND, layout, [memoryview(array).cast("B"), memoryview(other).cast("B")])
    found = mx.load(str(path))
    assert mx.array_equal(found["kv0"], array)
    assert mx.array_equal(found["kv1"], other)


@pytest.mark.parametrize("seed", range(5))
def test_the_payload_starts_at_a_multiple_of_64_bytes(tmp_path, seed):
    (block,) = random_blocks(1, seed)
    path = write(tmp_path, block, SMALL)
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert header % 64 == 0
    assert path.stat().st_size == header + SMALL.block_bytes


def test_a_file_lies_under_its_root_and_the_first_byte_of_its_name():
    name = SECOND.name.hex()
    assert relative_path(ROOT, SECOND.name) == Path(ROOT.hex()) / name[:2] / f"{name}.safetensors"


def test_a_payload_in_thousands_of_pieces_is_written_and_read_whole(tmp_path):
    layout = block_layout(64 * 50)
    (payload,) = payload_of(SECOND, layout)
    pieces = [memoryview(payload)[i : i + 1] for i in range(3200)]
    path = tmp_path / file_name(SECOND.name)
    with open(path, "wb") as file:
        write_block(file.fileno(), SECOND, layout, pieces)
    found = np.zeros_like(payload)
    read_block(path, SECOND, layout, [memoryview(found)[i : i + 1] for i in range(3200)])
    assert found.tobytes() == payload.tobytes()


def test_a_payload_of_megabytes_is_checked_to_its_last_byte(tmp_path):
    """Whatever runs it is read and digested in: big views, small ones, and one flipped byte in any of them."""
    layout = block_layout(3 * 2**20)
    (payload,) = payload_of(SECOND, layout)
    path = write(tmp_path, SECOND, layout)
    header = path.stat().st_size - layout.block_bytes
    for size in (layout.block_bytes, 2**20, 100_000, 4096):
        found = np.zeros_like(payload)
        views = [memoryview(found)[at : at + size] for at in range(0, layout.block_bytes, size)]
        assert read_block(path, SECOND, layout, views) == layout.block_bytes
        assert found.tobytes() == payload.tobytes()
        for at in (0, size - 1, layout.block_bytes // 2, layout.block_bytes - 1):
            with open(path, "r+b") as file:
                file.seek(header + at)
                file.write(bytes([payload[at] ^ 1]))
                file.flush()
                with pytest.raises(DamagedBlockError, match="payload digest"):
                    read_block(path, SECOND, layout, views)
                file.seek(header + at)
                file.write(bytes([payload[at]]))


def test_short_writes_and_short_reads_are_continued(tmp_path, monkeypatch):
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [parts[0][:7]]))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:5]], at))
    path = write(tmp_path, SECOND, SMALL)
    assert read(path, SECOND, SMALL) == [a.tobytes() for a in payload_of(SECOND, SMALL)]


def test_only_the_views_are_written_to_and_each_byte_of_them(good):
    around = [np.full(8 + t.nbytes() + 8, 170, np.uint8) for t in SMALL.tensors]
    read_block(good, SECOND, SMALL, [memoryview(a)[8:-8] for a in around])
    for found, written in zip(around, payload_of(SECOND, SMALL), strict=True):
        assert found[8:-8].tobytes() == written.tobytes()
        assert set(found[:8]) | set(found[-8:]) == {170}


def test_reading_leaves_no_descriptor_open_whatever_it_finds(good, tmp_path):
    bad = tmp_path / "bad"
    bad.write_bytes(b"x" * 100)
    before = os.listdir("/dev/fd")
    for path in (good, bad, tmp_path):
        for _ in range(3):
            try:
                read(path, SECOND, SMALL)
                inspect(path, payload=True)
            except DamagedBlockError:
                pass
    assert os.listdir("/dev/fd") == before


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_says_which_block_a_file_is_without_being_told(good):
    block, created, size = inspect(good, payload=True)
    assert (block, size) == (SECOND, good.stat().st_size)
    assert abs(datetime.fromisoformat(created).timestamp() - good.stat().st_mtime) < 60


def test_inspect_reads_the_payload_only_when_asked(good):
    data = bytearray(good.read_bytes())
    data[-1] ^= 1
    good.write_bytes(data)
    assert inspect(good, payload=False)[0] == SECOND
    with pytest.raises(DamagedBlockError, match="payload digest"):
        inspect(good, payload=True)


def test_inspect_refuses_a_file_under_another_name(good, tmp_path):
    moved = good.rename(tmp_path / file_name(FIRST.name))
    with pytest.raises(DamagedBlockError, match="name"):
        inspect(moved, payload=False)


# --- damage ----------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_damage(good):
    data = good.read_bytes()
    payload_at = len(data) - SMALL.block_bytes
    fd = os.open(good, os.O_WRONLY)
    reasons = set()
    try:
        for at, byte in enumerate(data):
            for bit in range(8):
                os.pwrite(fd, bytes([byte ^ (1 << bit)]), at)
                reason = is_refused(good)
                assert (reason == "payload digest") == (at >= payload_at), (at, bit, reason)
                reasons.add(reason)
            os.pwrite(fd, bytes([byte]), at)
    finally:
        os.close(fd)
    assert read(good, SECOND, SMALL) == [a.tobytes() for a in payload_of(SECOND, SMALL)]
    assert {"payload digest", "header digest", "header", "size"} <= reasons


def test_every_truncation_is_damage(good):
    data = good.read_bytes()
    for length in reversed(range(len(data))):
        os.truncate(good, length)
        assert is_refused(good) in ("size", "header"), length


@pytest.mark.parametrize("extra", [1, 64, 4096])
def test_appended_bytes_are_damage(good, extra):
    with open(good, "ab") as file:
        file.write(bytes(extra))
    assert is_refused(good) == "size"


def test_a_zeroed_tail_is_damage_wherever_it_starts(good):
    """What a power cut leaves when the length reached the disk and the bytes did not."""
    data = good.read_bytes()
    for start in range(len(data)):
        zeroed = data[:start] + bytes(len(data) - start)
        if zeroed != data:
            good.write_bytes(zeroed)
            is_refused(good)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (FIRST, "name"),
        (blocks_of([5] * 128)[1], "name"),
        (blocks_of([i % 7 for i in range(128)], OTHER_ROOT)[1], "root"),
    ],
    ids=["the block before", "a block of the same chain place", "the same tokens under another root"],
)
def test_another_blocks_file_under_this_name_is_damage(good, other, reason):
    write(good, other, SMALL)
    assert is_refused(good) == reason


def renamed(block: BlockIdentity) -> BlockIdentity:
    return replace(block, name=block_name(block.parent, block.tokens))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (renamed(replace(SECOND, tokens=FIRST.tokens)), "name"),
        (replace(SECOND, tokens=FIRST.tokens), "name"),
        (replace(SECOND, parent=bytes(32)), "name"),
        (replace(SECOND, root=OTHER_ROOT), "root"),
        (replace(SECOND, index=2), "index"),
        (replace(SECOND, index=-1), "index"),
        (replace(SECOND, name=SECOND.name + b"x"), "name"),
        (replace(SECOND, tokens=SECOND.tokens[:-4]), "name"),
        (renamed(replace(SECOND, tokens=SECOND.tokens[:-4])), "name"),
    ],
)
def test_each_part_of_the_identity_is_compared(good, other, reason):
    """A file that is whole by itself, but says something else about the block than was asked for."""
    write(good, other, SMALL)
    with pytest.raises(DamagedBlockError) as raised:
        read(good, SECOND, SMALL)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    "layout",
    [
        Layout((ArraySpec("0.keys", 1, 3, "uint8"),)),
        Layout((ArraySpec("0.keys", 1, 2, "uint8"), ArraySpec("0.values", 1, 1, "uint8"))),
        Layout((ArraySpec("0.keys", 1, 1, "uint8"), ArraySpec("0.values", 2, 1, "uint8"))),
        Layout((ArraySpec("0.keys", 1, 1, "uint8"), ArraySpec("0.values", 1, 1, "float16"))),
        Layout((ArraySpec("0.keys", 1, 1, "uint8"),)),
        Layout((*SMALL.arrays, ArraySpec("1.keys", 1, 1, "uint8"))),
        Layout((*SMALL.arrays, ArraySpec("1.keys", 1, 1, "float32"))),
    ],
)
def test_another_layouts_file_is_damage(good, layout):
    write(good, SECOND, layout)
    assert inspect(good, payload=True)[0] == SECOND  # whole by itself
    with pytest.raises(DamagedBlockError, match="shapes and dtypes"):
        read(good, SECOND, SMALL)


@pytest.mark.parametrize("change", [-1, 1])
def test_room_of_the_wrong_size_is_never_filled_with_part_of_a_block(good, change):
    views = [memoryview(bytearray(64)), memoryview(bytearray(128 + change))]
    with pytest.raises(DamagedBlockError):
        read_block(good, SECOND, SMALL, views)


Header = dict[str, Any]


def forge(path: Path, edit: Callable[[Header], Header | None], *, sign: bool) -> None:
    """Rewrite the header of a file by `edit`; `sign` makes its own digest right again."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    replaced = edit(header)
    header = header if replaced is None else replaced
    if sign:
        header["__metadata__"]["header_xxh3_128"] = "0" * 32
        text = json.dumps(header, separators=(",", ":")).encode()
        header["__metadata__"]["header_xxh3_128"] = xxhash.xxh3_128_hexdigest(text)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def set_metadata(**values: Any) -> Callable[[Header], None]:
    return lambda header: header["__metadata__"].update(values)


def set_tensor(**values: Any) -> Callable[[Header], None]:
    return lambda header: header["kv1"].update(values)


def without(name: str) -> Callable[[Header], None]:
    def edit(header: Header) -> None:
        del header["__metadata__"][name]

    return edit


EDITS: dict[str, Callable[[Header], Header | None]] = {
    "format of tomorrow": set_metadata(format="mlxkv-block-2"),
    "index with zeros": set_metadata(index="01"),
    "index with a space": set_metadata(index=" 1"),
    "index as a number": set_metadata(index=1),
    "index in other digits": set_metadata(index="\u0661"),
    "index of 5,000 digits": set_metadata(index="9" * 5000),
    "index that is none": set_metadata(index="one"),
    "upper case name": set_metadata(name=SECOND.name.hex().upper()),
    "upper case parent": set_metadata(parent=FIRST.name.hex().upper()),
    "spaced root": set_metadata(root=ROOT.hex(" ")),
    "root that is no hex": set_metadata(root="x" * 64),
    "root as a list": set_metadata(root=[1]),
    "an empty list of tokens": set_metadata(tokens=""),
    "tokens as a list": set_metadata(tokens=unpack(SECOND.tokens)),
    "tokens with zeros": lambda h: set_metadata(tokens="0" + h["__metadata__"]["tokens"])(h),
    "a negative token": set_metadata(tokens="-1 " * 64),
    "a token too large": set_metadata(tokens=f"{2**32} " * 64),
    "one more token": lambda h: set_metadata(tokens=h["__metadata__"]["tokens"] + " 1")(h),
    "created as a number": set_metadata(created=5),
    "created as a list": set_metadata(created=["now"]),
    "a payload digest that is none": set_metadata(payload_xxh3_128=None),
    "an upper case payload digest": lambda h: set_metadata(
        payload_xxh3_128=h["__metadata__"]["payload_xxh3_128"].upper()
    )(h),
    "a field more": set_metadata(note="hello"),
    "a lone surrogate": set_metadata(note="\ud800"),
    "a number nobody can hold": set_metadata(note=float("inf")),
    "other order of fields": lambda h: h | {"__metadata__": dict(reversed(h["__metadata__"].items()))},
    "other order of tensors": lambda h: {k: h[k] for k in ("__metadata__", "kv1", "kv0")},
    "metadata last": lambda h: {k: h[k] for k in ("kv0", "kv1", "__metadata__")},
    "another dtype": set_tensor(dtype="I8"),
    "another shape": set_tensor(shape=[1, 2, 64, 1]),
    "a shape of floats": set_tensor(shape=[1.0, 1, 64, 2]),
    "a shape that is none": set_tensor(shape=None),
    "moved offsets": set_tensor(data_offsets=[0, 128]),
    "offsets past the end": set_tensor(data_offsets=[64, 193]),
    "swapped offsets": set_tensor(data_offsets=[192, 64]),
    "offsets of floats": set_tensor(data_offsets=[64.0, 192.0]),
    "infinite offsets": set_tensor(data_offsets=[0, float("inf")]),
    "infinite minus infinite": set_tensor(data_offsets=[float("inf"), float("inf")]),
    "offsets as text": set_tensor(data_offsets=["64", "192"]),
    "one offset": set_tensor(data_offsets=[64]),
    "another tensor": lambda h: h | {"kv2": {"dtype": "U8", "shape": [0], "data_offsets": [192, 192]}},
    "a renamed tensor": lambda h: {("kv9" if k == "kv1" else k): v for k, v in h.items()},
    "a tensor that is a list": lambda h: h | {"kv1": []},
} | {f"no {name}": without(name) for name in ("format", "root", "name", "parent", "index", "tokens", "created")}

ONLY_THE_LAYOUT_KNOWS = [
    EDITS[name]
    for name in (
        "another dtype",
        "another shape",
        "a shape of floats",
        "a shape that is none",
        "another tensor",
        "a renamed tensor",
    )
]


@pytest.mark.parametrize("sign", [False, True], ids=["as it is", "digest made right again"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_a_header_that_still_parses_but_is_not_the_one_we_write_is_damage(good, edit, sign):
    forge(good, edit, sign=sign)
    with pytest.raises(DamagedBlockError):
        read(good, SECOND, SMALL)
    if not sign or edit not in ONLY_THE_LAYOUT_KNOWS:
        with pytest.raises(DamagedBlockError):
            inspect(good, payload=True)


def test_another_format_is_told_from_damage(good):
    forge(good, set_metadata(format="mlxkv-block-2"), sign=True)
    assert is_refused(good) == "version"


def test_a_file_of_a_partial_block_is_damage_even_when_it_is_asked_for(tmp_path):
    (tail,) = blocks_of(range(63))
    path = write(tmp_path, tail, SMALL)
    assert is_refused(path, tail) == "name"


def test_forging_without_an_edit_gives_a_sound_file(good):
    """The test above would pass on anything if `forge` itself broke the file."""
    before = good.read_bytes()
    forge(good, dict, sign=True)
    assert good.read_bytes() == before


def test_the_time_of_creation_is_the_one_thing_two_sound_files_may_differ_in(good):
    forge(good, set_metadata(created="2020-01-01T00:00:00.000000+00:00"), sign=True)
    assert read(good, SECOND, SMALL) == [a.tobytes() for a in payload_of(SECOND, SMALL)]
    forge(good, set_metadata(created="2021-01-01T00:00:00.000000+00:00"), sign=False)
    assert is_refused(good) == "header digest"


HEADERS = {
    "empty": b"",
    "null": b"null",
    "number": b"5",
    "list": b"[]",
    "list of lists": b"[" * 100_000,
    "objects in objects": b'{"a":' * 100_000,
    "no metadata": b"{}",
    "metadata is null": b'{"__metadata__":null}',
    "metadata is a list": b'{"__metadata__":[["a","b"]]}',
    "metadata is empty": b'{"__metadata__":{}}',
    "zeros": bytes(200),
    "ones": b"\xff" * 200,
    "utf-16": '{"__metadata__":{}}'.encode("utf-16"),
    "a number of 10,000 digits": b'{"__metadata__":{},"a":' + b"9" * 10_000 + b"}",
    "cut": b'{"__metadata__":{"format":"mlxkv-blo',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_a_header_that_is_something_else_is_damage(good, header):
    good.write_bytes(len(header).to_bytes(8, "little") + header + bytes(192))
    assert is_refused(good) in ("header", "size")


@pytest.mark.parametrize("same", [b'"index": "1"', b'"index":"9","index":"1"', b'"\\u0069ndex":"1"', b'\n"index":"1"'])
def test_a_header_that_means_the_same_in_other_bytes_is_damage(good, same):
    """Every length, every value and both digests are right; only the bytes are not those that would be written."""
    data = good.read_bytes()
    assert data.count(b'"index":"1"') == 1
    header = data[8:-192].replace(b'"index":"1"', same).rstrip(b" ")
    header += b" " * (-(8 + len(header)) % 64)
    good.write_bytes(len(header).to_bytes(8, "little") + header + data[-192:])
    assert is_refused(good) == "header bytes"


@pytest.mark.parametrize("length", [0, 1, 2**20 + 1, 2**31, 2**32, 2**63, 2**64 - 1])
def test_an_absurd_header_length_is_damage_and_takes_no_memory(good, length):
    with open(good, "r+b") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(2**33)  # a hole: takes no disk
    tracemalloc.start()
    try:
        assert is_refused(good) == "size"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_the_companion_that_macos_puts_on_exfat_is_damage(good):
    good.write_bytes(bytes([0, 5, 22, 7, 0, 2, 0, 0]) + bytes(4088))
    assert is_refused(good) == "size"


@given(st.data())
def test_any_damage_is_noticed_or_has_changed_nothing(tmp_path_factory, data):
    """Cut, doubled, moved and overwritten ranges of a file of a few KiB."""
    layout = Layout((ArraySpec("0.keys", 2, 8, "float32"), ArraySpec("0.values", 1, 8, "float16")))
    (block,) = random_blocks(1, 3)
    path = write(tmp_path_factory.getbasetemp() / file_name(block.name), block, layout)
    original = path.read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(damaged))] * 2)))
        piece = bytes(damaged[start:stop])
        match data.draw(st.sampled_from(["cut", "double", "move", "random", "zero"])):
            case "cut":
                del damaged[start:stop]
            case "double":
                damaged[start:start] = piece
            case "move":
                del damaged[start:stop]
                at = data.draw(st.integers(0, len(damaged)))
                damaged[at:at] = piece
            case "random":
                damaged[start:stop] = random.Random(stop).randbytes(len(piece))
            case "zero":
                damaged[start:stop] = bytes(len(piece))
    path.write_bytes(damaged)
    if bytes(damaged) == original:
        assert read(path, block, layout) == [a.tobytes() for a in payload_of(block, layout)]
    else:
        is_refused(path, block, layout)


# --- what is no file -------------------------------------------------------------------------------------------------


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing", SECOND, SMALL)
    with pytest.raises(FileNotFoundError):
        inspect(tmp_path / "missing", payload=True)


def test_a_directory_in_its_place_is_damage(good):
    good.unlink()
    good.mkdir()
    assert is_refused(good) == "file type"


def test_a_fifo_in_its_place_is_damage_and_nobody_waits_for_a_writer(good):
    good.unlink()
    os.mkfifo(good)
    assert is_refused(good) == "file type"


def test_a_symlink_is_not_followed_not_even_to_the_block_itself(good, tmp_path):
    real = good.rename(tmp_path / "real")
    good.symlink_to(real)
    for reader in (lambda: read(good, SECOND, SMALL), lambda: inspect(good, payload=True)):
        with pytest.raises(OSError) as raised:  # noqa: PT011 - the errno is what is looked at
            reader()
        assert raised.value.errno in (errno.ELOOP, errno.EMLINK)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_an_unreadable_file_is_an_os_error(good):
    good.chmod(0)
    with pytest.raises(PermissionError):
        read(good, SECOND, SMALL)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_is_an_os_error_of_the_write():
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left"):
            write_block(fd, SECOND, SMALL, views_of(payload_of(SECOND, SMALL)))
    finally:
        os.close(fd)


def test_a_file_that_shrinks_while_it_is_read_is_damage(good, monkeypatch):
    header = codec._read_own_header

    def then_cut(*asked):
        found = header(*asked)
        os.truncate(good, good.stat().st_size - 10)
        return found

    monkeypatch.setattr(codec, "_read_own_header", then_cut)
    with pytest.raises(DamagedBlockError, match="size"):
        read(good, SECOND, SMALL)
