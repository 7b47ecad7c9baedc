"""The format of a block file, and the only file that knows it.

    8 bytes   length of the header, u64 little-endian
    header    JSON: the tensor table of safetensors, and `__metadata__` with the block's identity and two digests
    payload   the tensors of the layout, one after the other, nothing between them

A block holds the packed keys and values of 64 tokens; a checkpoint holds the state of the layers that cannot be cut by
token, after the block it is named for. Each tensor has a digest of its own, so that one may be read without the others.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from mlxkv.cache.layout import Layout, Stored, Table
from mlxkv.cache.names import BLOCK_TOKEN_BYTES, BlockName, block_name, checkpoint_name, pack, unpack
from mlxkv.core.errors import DamagedBlockError, UsageError

FORMAT = "mlxkv-block-1"
SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 1 << 20
_VECTORS = 1024  # IOV_MAX on Linux and macOS
_RUN_BYTES = 1 << 18  # read and digested in turn; well within a CPU's L2 cache
_NO_DIGEST = "0" * 32

View = memoryview


@dataclass(frozen=True)
class BlockIdentity:
    """Which block or checkpoint a file is.

    A block's `tokens` are packed and 64, and the first block's parent is its root. A checkpoint has no tokens; its
    parent is the block it ends with, and its index that block's plus one.
    """

    root: BlockName
    name: BlockName
    parent: BlockName
    index: int
    tokens: bytes

    @property
    def is_checkpoint(self) -> bool:
        return not self.tokens

    def table(self, layout: Layout) -> Table:
        """What its file holds."""
        return layout.checkpoint_table if self.is_checkpoint else layout.block_table


def checkpoint_identity(block: BlockIdentity) -> BlockIdentity:
    """The checkpoint after `block`."""
    return BlockIdentity(block.root, checkpoint_name(block.name), block.name, block.index + 1, b"")


def file_name(name: BlockName) -> str:
    return name.hex() + SUFFIX


def relative_path(root: BlockName, name: BlockName) -> Path:
    """`<root>/<first two hex digits>/<name>.safetensors`."""
    text = name.hex()
    return Path(root.hex(), text[:2], text + SUFFIX)


def payload_digest(views: Sequence[View], table: Table) -> str:
    """xxh3-128 of each tensor, in payload order, separated by spaces. Cost: about a tenth of reading them.

    Args:
        views: the payload as bytes, in any number of pieces.
    """
    waiting, digests = list(views), []
    for tensor in table:
        digest = xxhash.xxh3_128()
        for view in _take(waiting, tensor.nbytes):
            digest.update(view)
        digests.append(digest.hexdigest())
    return " ".join(digests)


def encode_header(block: BlockIdentity, layout: Layout, digest: str, created: str | None = None) -> bytes:
    """The length and the header of a block file, padded so that the payload starts at a multiple of 64 bytes."""
    created = created or datetime.now(UTC).isoformat(timespec="microseconds")
    return _header(block, block.table(layout), digest, created)


def file_bytes(block: BlockIdentity, layout: Layout) -> int:
    """Size of the file that `encode_header` and the payload make."""
    table = block.table(layout)
    no_digest = " ".join(_NO_DIGEST for _ in table)
    return len(encode_header(block, layout, no_digest)) + sum(tensor.nbytes for tensor in table)


def write_block(fd: int, block: BlockIdentity, layout: Layout, views: Sequence[View]) -> int:
    """Write a whole block file to `fd` and return its bytes.

    Args:
        views: the payload as bytes, in payload order.

    Raises:
        OSError: what the system says, such as a full disk; the file is then incomplete and must not be published.
    """
    parts = [View(encode_header(block, layout, payload_digest(views, block.table(layout)))), *views]
    total = sum(part.nbytes for part in parts)
    for start in range(0, len(parts), _VECTORS):
        _write_all(fd, parts[start : start + _VECTORS])
    return total


def read_block(
    path: Path, block: BlockIdentity, layout: Layout, views: Sequence[View], tensors: Sequence[int] | None = None
) -> int:
    """Read the payload of `block` straight into `views`, checking all that is read; returns its bytes.

    Args:
        views: writable bytes, in payload order; together exactly the bytes of the tensors read. On an error their
            content is undefined, and the caller must not use it.
        tensors: which tensors of the layout to read, ascending; None reads all.

    Raises:
        DamagedBlockError: the file is not exactly this block; `reason` names the check.
        OSError: the file is missing or cannot be read.

    Cost: one pass of `preadv` into place; the digest runs over what has just arrived, while it is in the CPU's cache.
    """
    fd = _open(path)
    try:
        length, digest = _read_own_header(fd, block, layout)
        return _read_payload(fd, views, length, block.table(layout), digest.split(), tensors)
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
            space = View(bytearray(sum(tensor.nbytes for tensor in table)))
            _read_payload(fd, [space], len(header), table, digest.split(), None)
        return block, created, size
    finally:
        os.close(fd)


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
    for t in table:
        tensors[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [offset, offset + t.nbytes]}
        offset += t.nbytes
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


def _read_own_header(fd: int, block: BlockIdentity, layout: Layout) -> tuple[int, str]:
    """Length of the header and the digests in it, when it is to the byte the one that would be written for `block`.

    Equal bytes are all checks in one; what is wrong with others is looked for only then.
    """
    header, size = _header_bytes(fd)
    try:
        metadata = json.loads(header[8:])["__metadata__"]
        created, digest = str(metadata["created"]), str(metadata["payload_xxh3_128"])
    except (ValueError, KeyError, TypeError, RecursionError):
        created = digest = ""
    nbytes = sum(tensor.nbytes for tensor in block.table(layout))
    expected = encode_header(block, layout, digest, created)
    if header != expected or size != len(header) + nbytes or not _is_named_right(block):
        _, table, found, _, _ = _read_header(fd)
        if found != block:
            raise DamagedBlockError(_difference(found, block))
        raise DamagedBlockError("header bytes" if table == block.table(layout) else "shapes and dtypes")
    return len(header), digest


def _header_bytes(fd: int) -> tuple[bytes, int]:
    """The length and the header as they are in the file, and the file's size."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise DamagedBlockError("size")
    header = os.pread(fd, 8 + length, 0)
    if len(header) != 8 + length:
        raise DamagedBlockError("size")
    return header, size


def _read_header(fd: int) -> tuple[bytes, Table, BlockIdentity, str, str]:
    """The header of any block, checked without knowing whose it should be."""
    header, size = _header_bytes(fd)
    try:
        tensors = json.loads(header[8:])
        metadata = tensors.pop("__metadata__")
        table = tuple(
            Stored(name, t["dtype"], tuple(t["shape"]), t["data_offsets"][1] - t["data_offsets"][0])
            for name, t in tensors.items()
        )
        expected_size = len(header) + sum(tensor.nbytes for tensor in table)
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
    if not _is_named_right(block):
        raise DamagedBlockError("name")
    return header, table, block, created, payload


def _is_named_right(block: BlockIdentity) -> bool:
    if block.is_checkpoint:
        return block.name == checkpoint_name(block.parent)
    return len(block.tokens) == BLOCK_TOKEN_BYTES and block.name == block_name(block.parent, block.tokens)


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


def _read_payload(
    fd: int, views: Sequence[View], offset: int, table: Table, digests: Sequence[str], tensors: Sequence[int] | None
) -> int:
    """Read the wanted tensors into `views`, a run at a time, and hold each against its digest; returns the bytes."""
    if len(digests) != len(table):
        raise DamagedBlockError("payload digest")
    wanted = sum(tensor.nbytes for i, tensor in enumerate(table) if tensors is None or i in tensors)
    if sum(view.nbytes for view in views) != wanted:
        raise DamagedBlockError("size")
    waiting = list(views)
    for i, tensor in enumerate(table):
        if tensors is None or i in tensors:
            digest = xxhash.xxh3_128()
            start = offset
            for run, nbytes in _runs(_take(waiting, tensor.nbytes)):
                _read_all(fd, run, nbytes, start)
                start += nbytes
                for view in run:
                    digest.update(view)
            if digest.hexdigest() != digests[i]:
                raise DamagedBlockError("payload digest")
        offset += tensor.nbytes
    return wanted


def _take(views: list[View], nbytes: int) -> list[View]:
    """Take the first `nbytes` off `views`, cutting the last view where it is longer."""
    end = 0
    while nbytes:
        view = views[end]
        if view.nbytes > nbytes:
            views[end : end + 1] = [view[:nbytes], view[nbytes:]]
        nbytes -= views[end].nbytes
        end += 1
    taken = views[:end]
    del views[:end]
    return taken


def _runs(views: Sequence[View]) -> Iterator[tuple[Sequence[View], int]]:
    """Cut `views` into runs of about `_RUN_BYTES`, each with its bytes."""
    start = nbytes = 0
    for stop, view in enumerate(views):
        size = view.nbytes
        if nbytes and (nbytes + size > _RUN_BYTES or stop - start == _VECTORS):
            yield views[start:stop], nbytes
            start, nbytes = stop, 0
        nbytes += size
    if start < len(views):
        yield views[start:], nbytes


def _read_all(fd: int, views: Sequence[View], nbytes: int, offset: int) -> None:
    """Fill `views`, which are `nbytes`, from `offset` on."""
    read = os.preadv(fd, views, offset)
    while read < nbytes:  # a signal came, or the file ends early
        waiting, skip = [], read
        for view in views:
            waiting.append(view[skip:])
            skip = max(skip - view.nbytes, 0)
        count = os.preadv(fd, [view for view in waiting if view.nbytes], offset + read)
        if count == 0:
            raise DamagedBlockError("size")
        read += count


if sys.byteorder != "little":
    raise ImportError("block files are little-endian; mlxkv runs on little-endian machines only")
