"""Looking after a cold tier from outside a request: what it holds, whether it is sound, what to delete.

Everything here shows before it acts: a plan is a list of rows, and deleting takes that list.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlxkv.cache import codec
from mlxkv.cache.cold import (
    QUARANTINE,
    QUARANTINED,
    ROOT_FILE,
    TEMPORARY,
    ColdTier,
    block_files,
    set_aside,
)
from mlxkv.cache.index import FILE_NAME, Row
from mlxkv.cache.names import TOKEN_BYTES, BlockName
from mlxkv.core.errors import DamagedBlockError
from mlxkv.core.platform import physical_bytes


@dataclass(frozen=True)
class RootUse:
    """What one root (a model, with its settings) holds."""

    root: BlockName
    model: str
    blocks: int
    checkpoints: int
    tokens: int
    block_bytes: int
    used_bytes: int
    hits: int
    last_used: float


@dataclass(frozen=True)
class ChainRow:
    """A block or a checkpoint with its place among the chains.

    Attributes:
        branches: how many blocks continue it.
        used: when it or anything that continues it was used last. A row alone does not say: see `Index.hit`.
    """

    row: Row
    model: str
    branches: int
    used: float


@dataclass
class Verification:
    """What `verify` found; `problems` counts by kind, `files` names each. Foreign files are no problem."""

    blocks: int = 0
    read_bytes: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    files: list[tuple[str, str]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    damaged: list[tuple[Path, str]] = field(default_factory=list)
    missing: list[Row] = field(default_factory=list)

    def add(self, kind: str, what: str) -> None:
        self.problems[kind] += 1
        self.files.append((kind, what))


def roots(tier: ColdTier) -> list[RootUse]:
    """What each root holds, largest first."""
    grouped: dict[BlockName, list[Row]] = {}
    for row in tier.rows():
        grouped.setdefault(row.root, []).append(row)
    found = [
        RootUse(
            root=root,
            model=model_of(tier, root),
            blocks=sum(not row.is_checkpoint for row in rows),
            checkpoints=sum(row.is_checkpoint for row in rows),
            tokens=sum(len(row.tokens) // TOKEN_BYTES for row in rows),
            block_bytes=sum(row.nbytes for row in rows if not row.is_checkpoint),
            used_bytes=sum(row.nbytes for row in rows),
            hits=sum(row.hits for row in rows),
            last_used=max(row.used for row in rows),
        )
        for root, rows in grouped.items()
    ]
    return sorted(found, key=lambda use: -use.used_bytes)


def model_of(tier: ColdTier, root: BlockName) -> str:
    """The model's name as the root's description has it, `?` without one."""
    fields = tier.root_fields(root)
    return str(fields.get("model", "?")) if fields else "?"


def chains(tier: ColdTier) -> Iterator[ChainRow]:
    """Every block, chain by chain: a block is followed by what continues it, the most recently used first."""
    children: dict[BlockName, list[Row]] = {}
    rows = tier.rows()
    used = {row.name: row.used for row in rows}
    for row in sorted(rows, key=lambda row: -row.index):
        children.setdefault(row.root if row.index == 0 else row.parent, []).append(row)
        if row.parent in used:
            used[row.parent] = max(used[row.parent], used[row.name])
    models: dict[BlockName, str] = {}
    firsts = [row for rows in children.values() for row in rows if row.index == 0]
    waiting = sorted(firsts, key=lambda row: (row.root, used[row.name]))
    while waiting:
        row = waiting.pop()
        if row.root not in models:
            models[row.root] = model_of(tier, row.root)
        following = sorted(children.get(row.name, []), key=lambda child: used[child.name])
        branches = sum(not child.is_checkpoint for child in following)
        yield ChainRow(row, models[row.root], branches, used[row.name])
        waiting += following


def last_used(tier: ColdTier, row: Row) -> float:
    """When a block or anything that continues it was used last. Cost: one query a block that continues it."""
    latest, waiting = row.used, [row]
    while waiting:
        following = tier.children(waiting.pop().name)
        latest = max([latest, *(child.used for child in following)])
        waiting += following
    return latest


def plan_prune(tier: ColdTier, keep_bytes: int) -> list[Row]:
    """The blocks that would go for the root to hold at most `keep_bytes`: leaves first, least recently used first."""
    rows = {row.name: row for row in tier.rows()}
    used = {name: row.used for name, row in rows.items()}
    children = Counter(row.parent for row in rows.values())
    leaves = [(row.used, name) for name, row in rows.items() if not children[name]]
    heapq.heapify(leaves)
    plan: list[Row] = []
    excess = tier.used_bytes - keep_bytes
    while leaves and excess > 0:
        _, name = heapq.heappop(leaves)
        row = rows[name]
        plan.append(row)
        excess -= row.nbytes
        children[row.parent] -= 1
        if row.parent in rows:
            used[row.parent] = max(used[row.parent], used[name])
            if not children[row.parent]:
                heapq.heappush(leaves, (used[row.parent], row.parent))
    return plan


def verify(tier: ColdTier) -> Verification:
    """Hold the index against the files and the files against the index, every byte of them. Changes nothing.

    Cost: reads everything.
    """
    found = Verification()
    if not tier.has_index:
        found.add("no sound index", str(tier.directory / FILE_NAME))
    known = {tier.path(row): row for row in tier.rows()}
    present = set()
    for path in block_files(tier.directory):
        present.add(path)
        try:
            block, _, size = codec.inspect(path, payload=True)
        except DamagedBlockError as error:
            found.add(f"damaged ({error.reason})", str(path))
            found.damaged.append((path, error.reason))
            continue
        except OSError as error:
            found.add("unreadable", f"{path}: {error.strerror}")
            found.missing += [known[path]] if path in known else []
            continue
        found.blocks += 1
        found.read_bytes += size
        if path not in known:
            found.add("not in the index" if tier.has_index else "without its parent", str(path))
        elif known[path].identity != block:
            found.add("index disagrees", str(path))
            found.missing.append(known[path])
    for path, row in known.items():
        if path not in present:
            found.add("file missing", str(path))
            found.missing.append(row)
    for path in _leftovers(tier.directory):
        found.add("temporary file", str(path))
    found.foreign = [str(path) for path in _foreign(tier.directory)]
    return found


def repair(tier: ColdTier, found: Verification) -> int:
    """Mend what `verify` found; returns how many blocks are held afterwards.

    Damaged files are set aside, rows without a file dropped, files that the index lacks entered, leftovers deleted.
    What continued a block that is gone goes too: it could never be reached.
    """
    for path, reason in found.damaged:
        row = tier.row_of(path)
        if row is not None:
            tier.quarantine(row.identity, reason)
        else:
            with suppress(FileNotFoundError):
                set_aside(tier.directory, path)
    for row in found.missing:
        tier.forget(row.identity, FileNotFoundError(2, "file missing"))
    for path in _leftovers(tier.directory):
        with suppress(FileNotFoundError):
            path.unlink()
    tier.adopt()
    tier.check_integrity()
    return tier.totals()[0]


def quarantine_use(directory: Path) -> tuple[int, int]:
    """Files in quarantine and their physical bytes."""
    files = [path for path in (directory / QUARANTINE).glob(f"*{QUARANTINED}") if path.is_file()]
    return len(files), sum(physical_bytes(path.stat()) for path in files)


def _leftovers(directory: Path) -> list[Path]:
    return [path for path in directory.glob(f"*/*/.*{TEMPORARY}") if path.is_file() and not path.is_symlink()]


def _foreign(directory: Path) -> Iterator[Path]:
    """Files and links that are not the cache's own; they are never opened, never deleted."""
    ours = set(block_files(directory))
    for path in sorted(directory.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        inside = path.relative_to(directory).parts
        known = (
            path in ours
            or (len(inside) == 1 and path.name.startswith(FILE_NAME))
            or (len(inside) == 2 and path.name == ROOT_FILE)
            or (inside[0] == QUARANTINE and path.name.endswith(QUARANTINED))
            or path.name.endswith(TEMPORARY)
        )
        if not known:
            yield path
