"""The format of a block file, and the only file that knows it.

    8 bytes   length of the header, u64 little-endian
    header    JSON: the tensor table of safetensors, and `__metadata__` with the block's identity and two digests
    payload   the packed tensors of the layout, one after the other, nothing between them

Any safetensors reader opens it. Reading checks everything and believes nothing: size, header digest, version, root,
name, parent, place and tokens, tensor table, payload digest; then the header once more, byte for byte against the one
that would be written. A file that fails is damaged, whatever else is right about it.

The safetensors package writes whole buffers and reads by path, without O_NOFOLLOW and into memory of its own; blocks
are written from and read into MLX's memory, so the header is made here and the package checks it in the tests.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from mlxkv.cache.layout import DTYPES, Layout
from mlxkv.cache.names import BLOCK_TOKEN_BYTES, BlockName, block_name, pack, unpack
from mlxkv.core.errors import DamagedBlockError, UsageError

FORMAT = "mlxkv-block-1"
SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 1 << 20
_VECTORS = 1024  # IOV_MAX on Linux and macOS
_RUN_BYTES = 1 << 19  # read and digested in turn; well within a CPU's L2 cache
_NO_DIGEST = "0" * 32

View = memoryview
Table = dict[str, tuple[str, list[int], int]]
"""Tensor name -> safetensors dtype, shape, bytes; in payload order."""


@dataclass(frozen=True)
class BlockIdentity:
    """Which block a file is. `tokens` is packed and holds a full block; the first block's parent is its root."""

    root: BlockName
    name: BlockName
    parent: BlockName
    index: int
    tokens: bytes


def file_name(name: BlockName) -> str:
    return name.hex() + SUFFIX


def relative_path(root: BlockName, name: BlockName) -> Path:
    """`<root>/<first two hex digits>/<name>.safetensors`."""
    text = name.hex()
    return Path(root.hex(), text[:2], text + SUFFIX)


def payload_digest(views: Iterable[View]) -> str:
    """xxh3-128 of the payload, in payload order. Cost: about a tenth of reading it."""
    digest = xxhash.xxh3_128()
    for view in views:
        digest.update(view)
    return str(digest.hexdigest())


def encode_header(block: BlockIdentity, layout: Layout, digest: str, created: str | None = None) -> bytes:
    """The length and the header of a block file, padded so that the payload starts at a multiple of 64 bytes."""
    created = created or datetime.now(UTC).isoformat(timespec="microseconds")
    return _header(block, _layout_table(layout), digest, created)


def file_bytes(block: BlockIdentity, layout: Layout) -> int:
    """Size of the file that `encode_header` and the payload make."""
    return len(encode_header(block, layout, _NO_DIGEST)) + layout.block_bytes


def write_block(fd: int, block: BlockIdentity, layout: Layout, views: Sequence[View]) -> int:
    """Write a whole block file to `fd` and return its bytes.

    Args:
        views: the payload in payload order, as bytes.

    Raises:
        OSError: what the system says, such as a full disk; the file is then incomplete and must not be published.
    """
    parts = [View(encode_header(block, layout, payload_digest(views))), *views]
    total = sum(part.nbytes for part in parts)
    for start in range(0, len(parts), _VECTORS):
        _write_all(fd, parts[start : start + _VECTORS])
    return total


def read_block(path: Path, block: BlockIdentity, layout: Layout, views: Sequence[View]) -> int:
    """Read the payload of `block` straight into `views`, checking all of it; returns the bytes read.

    Args:
        views: writable bytes, in payload order; together exactly `layout.block_bytes`. On an error their content is
            undefined, and the caller must not use it.

    Raises:
        DamagedBlockError: the file is not exactly this block; `reason` names the check.
        OSError: the file is missing or cannot be read.

    Cost: one pass of `preadv` into place; the digest runs over what has just arrived, while it is in the CPU's cache.
    """
    fd = _open(path)
    try:
        header, table, found, created, digest = _read_header(fd)
        if found != block:
            raise DamagedBlockError(_difference(found, block))
        if table != _layout_table(layout):
            raise DamagedBlockError("shapes and dtypes")
        if _read_payload(fd, views, len(header)) != digest:
            raise DamagedBlockError("payload digest")
        if encode_header(block, layout, digest, created) != header:
            raise DamagedBlockError("header bytes")
        return layout.block_bytes
    finally:
        os.close(fd)


def inspect(path: Path, *, payload: bool) -> tuple[BlockIdentity, str, int]:
    """Identity, time of creation and size of a block file, checked without knowing what it should be.

    Args:
        payload: also read the payload and check its digest.

    Raises:
        DamagedBlockError, OSError: as `read_block`.
    """
    fd = _open(path)
    try:
        header, table, block, created, digest = _read_header(fd)
        if path.name != file_name(block.name):
            raise DamagedBlockError("name")
        if _header(block, table, digest, created) != header:
            raise DamagedBlockError("header bytes")
        size = os.fstat(fd).st_size
        if payload:
            found = xxhash.xxh3_128()
            offset = len(header)
            while chunk := os.pread(fd, 1 << 20, offset):
                found.update(chunk)
                offset += len(chunk)
            if found.hexdigest() != digest:
                raise DamagedBlockError("payload digest")
        return block, created, size
    finally:
        os.close(fd)


def _layout_table(layout: Layout) -> Table:
    return {t.name: (DTYPES[t.dtype][0], list(t.shape()), t.nbytes()) for t in layout.tensors}


def _header(block: BlockIdentity, table: Table, digest: str, created: str) -> bytes:
    metadata = {
        "format": FORMAT,
        "root": block.root.hex(),
        "name": block.name.hex(),
        "parent": block.parent.hex(),
        "index": str(block.index),
        "tokens": " ".join(map(str, unpack(block.tokens))),
        "created": created,
        "payload_xxh3_128": digest,
        "header_xxh3_128": _NO_DIGEST,
    }
    tensors: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, nbytes) in table.items():
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    metadata["header_xxh3_128"] = xxhash.xxh3_128_hexdigest(_json(metadata, tensors))
    text = _json(metadata, tensors)
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def _json(metadata: dict[str, str], tensors: dict[str, Any]) -> bytes:
    return json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()


def _open(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedBlockError("file type")
    return fd


def _read_header(fd: int) -> tuple[bytes, Table, BlockIdentity, str, str]:
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise DamagedBlockError("size")
    header = os.pread(fd, 8 + length, 0)
    if len(header) != 8 + length:
        raise DamagedBlockError("size")
    try:
        tensors = json.loads(header[8:])
        metadata = tensors.pop("__metadata__")
        table = {
            name: (t["dtype"], t["shape"], t["data_offsets"][1] - t["data_offsets"][0]) for name, t in tensors.items()
        }
        expected_size = 8 + length + sum(nbytes for _, _, nbytes in table.values())
        digest = xxhash.xxh3_128_hexdigest(_json({**metadata, "header_xxh3_128": _NO_DIGEST}, tensors))
        if size != expected_size:
            raise DamagedBlockError("size")
        if digest != metadata["header_xxh3_128"]:
            raise DamagedBlockError("header digest")
        if metadata["format"] != FORMAT:
            raise DamagedBlockError("version")
        block = BlockIdentity(
            root=bytes.fromhex(metadata["root"]),
            name=bytes.fromhex(metadata["name"]),
            parent=bytes.fromhex(metadata["parent"]),
            index=int(metadata["index"]),
            tokens=pack([int(token) for token in metadata["tokens"].split()]),
        )
        created, payload = str(metadata["created"]), str(metadata["payload_xxh3_128"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, UsageError) as error:
        raise DamagedBlockError("header") from error
    if len(block.tokens) != BLOCK_TOKEN_BYTES or block_name(block.parent, block.tokens) != block.name:
        raise DamagedBlockError("name")
    return header, table, block, created, payload


def _difference(found: BlockIdentity, wanted: BlockIdentity) -> str:
    for field in ("root", "name", "parent", "index", "tokens"):
        if replace(found, **{field: getattr(wanted, field)}) != found:
            return field
    return "identity"


def _write_all(fd: int, parts: Sequence[View]) -> None:
    waiting = [part.cast("B") for part in parts if part.nbytes]
    while waiting:
        written = os.writev(fd, waiting)
        while waiting and written >= waiting[0].nbytes:
            written -= waiting.pop(0).nbytes
        if waiting and written:
            waiting[0] = waiting[0][written:]


def _read_payload(fd: int, views: Sequence[View], offset: int) -> str:
    """Read from `offset` into `views`, a run at a time, and return the digest of what was read."""
    digest = xxhash.xxh3_128()
    for run in _runs(views):
        offset += _read_all(fd, run, offset)
        for view in run:
            digest.update(view)
    return str(digest.hexdigest())


def _runs(views: Sequence[View]) -> Iterator[Sequence[View]]:
    """Cut `views` into runs of about `_RUN_BYTES`."""
    start = nbytes = 0
    for stop, view in enumerate(views):
        if nbytes and (nbytes + view.nbytes > _RUN_BYTES or stop - start == _VECTORS):
            yield views[start:stop]
            start, nbytes = stop, 0
        nbytes += view.nbytes
    if start < len(views):
        yield views[start:]


def _read_all(fd: int, views: Sequence[View], offset: int) -> int:
    """Fill `views` from `offset` on; returns their bytes."""
    total = sum(view.nbytes for view in views)
    read = os.preadv(fd, views, offset)
    while read < total:  # a signal came, or the file ends early
        waiting, skip = [], read
        for view in views:
            waiting.append(view[skip:])
            skip = max(skip - view.nbytes, 0)
        count = os.preadv(fd, [view for view in waiting if view.nbytes], offset + read)
        if count == 0:
            raise DamagedBlockError("size")
        read += count
    return total


if sys.byteorder != "little":
    raise ImportError("block files are little-endian; mlxkv runs on little-endian machines only")
