"""Blocks written to this disk, then damaged: each damage must be noticed and answered as a miss.

Needs no model: a store over random bytes, restored through the same plan and the same readers as a request.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxkv.cache.codec import BlockIdentity, relative_path
from mlxkv.cache.layout import ArraySpec, Layout
from mlxkv.cache.names import BLOCK_TOKEN_BYTES, BLOCK_TOKENS, block_name, pack, root_name
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.units import MIB
from mlxkv.prove.check import Check, Figure

FLIPS, CUTS, SWAPS = 24, 8, 6
_BLOCKS = 4
_DAMAGED = 2  # the block of each chain that is damaged: two good ones before it, one behind it
_READ_S = 30.0
_LAYOUT = Layout((ArraySpec("0.keys", 2, 64, "float16"), ArraySpec("0.values", 2, 64, "float16")))
_ADVICE = "Use no --cache-dir on this disk, and report it: what is read back is not held against its digest."


@dataclass(frozen=True)
class Chain:
    """Blocks that were written, with what is in them."""

    root: bytes
    packed: bytes
    blocks: tuple[BlockIdentity, ...]
    payloads: tuple[tuple[mx.array, ...], ...]


def check_bits(scratch: Path) -> Check:
    """One bit of a file flipped, in turn in the header and all over the payload."""

    def flip(path: Path, turn: int, random: random.Random) -> None:
        size = path.stat().st_size
        at = random.randrange(min(size, 600)) if turn % 4 == 0 else random.randrange(size)
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << random.randrange(8)]))

    return _check("flipped bits", scratch, FLIPS, flip)


def check_cuts(scratch: Path) -> Check:
    """A file cut short at some byte, as a power cut leaves it; the last time it is gone."""

    def cut(path: Path, turn: int, random: random.Random) -> None:
        if turn == CUTS - 1:
            path.unlink()
        else:
            os.truncate(path, random.randrange(path.stat().st_size))

    return _check("cut files", scratch, CUTS, cut)


def check_swaps(scratch: Path) -> Check:
    """The whole file of another block, of this chain or of another prompt, in a block's place."""

    def swap(path: Path, turn: int, random: random.Random) -> None:
        del random
        others = sorted(other for other in path.parents[2].glob("*/*/*.safetensors") if other != path)
        shutil.copyfile(others[turn % len(others)], path)

    return _check("swapped files", scratch, SWAPS, swap)


def check_whole(scratch: Path) -> Check:
    """Blocks that nobody damaged come back with the bytes that were written."""
    directory = scratch / "whole"
    chain = _chain(0)
    _write(directory, [chain])
    with _store(directory, [chain]) as store:
        good, equal = _restore(store, chain)
    figures: dict[str, Figure] = {"blocks": _BLOCKS, "restored_blocks": good, "equal": equal}
    if not equal:
        said = f"{good} of {_BLOCKS} blocks came back, and not with the bytes that were written"
        return Check("whole files", "fail", said, figures, _ADVICE)
    if good != _BLOCKS:
        advice = "Free some disk, or choose another --cache-dir: what is written here does not stay."
        return Check("whole files", "fail", f"only {good} of {_BLOCKS} blocks came back", figures, advice)
    return Check("whole files", "ok", f"{_BLOCKS} blocks came back with the bytes that were written", figures)


def _check(name: str, scratch: Path, turns: int, damage: Callable[[Path, int, random.Random], None]) -> Check:
    directory = scratch / name.replace(" ", "-")
    chains = [_chain(turn + 1) for turn in range(turns)]
    _write(directory, chains)
    chance = random.Random(0)
    for turn, chain in enumerate(chains):
        block = chain.blocks[_DAMAGED]
        damage(directory / relative_path(block.root, block.name), turn, chance)
    unnoticed = wrong = 0
    with quiet(), _store(directory, chains) as store:
        for chain in chains:
            good, equal = _restore(store, chain)
            unnoticed += good > _DAMAGED
            wrong += not equal or good < _DAMAGED
    set_aside = store.cold.counters.damaged_blocks if store.cold is not None else 0
    figures: dict[str, Figure] = {"tried": turns, "unnoticed": unnoticed, "wrong": wrong, "set_aside": set_aside}
    if unnoticed or wrong:
        said = f"of {turns} {name}, {unnoticed} were not noticed, and {wrong} took what was right before them along"
        return Check(name, "fail", said, figures, _ADVICE)
    return Check(name, "ok", f"{turns} of {turns} were noticed and answered as a miss", figures)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back what mlxkv warns of: here it is what was asked for."""
    logger = logging.getLogger("mlxkv")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _chain(seed: int) -> Chain:
    """A chain of random tokens and random bytes; no other seed shares any."""
    chance = np.random.default_rng(seed)
    root = root_name({"model": "mlxkv doctor --prove"})
    packed = pack(chance.integers(0, 2**31, _BLOCKS * BLOCK_TOKENS).tolist())
    blocks, parent = [], root
    for index in range(_BLOCKS):
        tokens = packed[index * BLOCK_TOKEN_BYTES : (index + 1) * BLOCK_TOKEN_BYTES]
        blocks.append(BlockIdentity(root, block_name(parent, tokens), parent, index, tokens))
        parent = blocks[-1].name
    payloads = tuple(
        tuple(mx.array(chance.standard_normal(t.shape()).astype(np.float16)) for t in _LAYOUT.tensors) for _ in blocks
    )
    mx.eval(payloads)
    return Chain(root, packed, tuple(blocks), payloads)


def _write(directory: Path, chains: Sequence[Chain]) -> None:
    with _store(directory, chains) as store:
        for chain in chains:
            for block, payload in zip(chain.blocks, chain.payloads, strict=True):
                store.commit(block, payload)


@contextmanager
def _store(directory: Path, chains: Sequence[Chain]) -> Iterator[BlockStore]:
    """A store without a hot tier: what is restored was read from the disk."""
    store = BlockStore(CacheConfig(directory=directory, hot_bytes=0, cold_bytes=64 * MIB, floor_bytes=0))
    try:
        store.register(chains[0].root, _LAYOUT, {}, model="prove")
        yield store
    finally:
        store.close()


def _restore(store: BlockStore, chain: Chain) -> tuple[int, bool]:
    """How many blocks of a chain were restored, and whether each has the bytes that were written."""
    plan = store.plan(chain.root, chain.packed)
    places = [[np.zeros(t.nbytes(), np.uint8) for t in _LAYOUT.tensors] for _ in chain.blocks]
    everything = list(range(len(_LAYOUT.tensors)))
    try:
        reading = store.read(
            chain.root, plan.match.parts, _LAYOUT,
            lambda index: ([array.data for array in places[index]], everything), _READ_S,
        )  # fmt: skip
        good = reading.finish().parts
    finally:
        store.release(plan)
    equal = all(
        place.tobytes() == bytes(memoryview(array).cast("B"))
        for arrays, payload in zip(places[:good], chain.payloads, strict=False)
        for place, array in zip(arrays, payload, strict=True)
    )
    return good, equal
