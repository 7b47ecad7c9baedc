"""All checks in their order, about three minutes at most: each is told before it begins, and its answer handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxkv.models.loader import load
from mlxkv.prove import arithmetic, damage, disk, equality, memory, speed
from mlxkv.prove.check import Check
from mlxkv.prove.runs import Subject, affordable_blocks, make_prompt

Tell = Callable[[str, float], None]
"""Called with what begins now, and the share of the whole that is done."""


@dataclass(frozen=True)
class Group:
    """Checks that belong together, as a table shows them."""

    title: str
    checks: tuple[Check, ...]


def prove(model: str, scratch: Path, tell: Tell, *, blocks: int | None = None) -> Iterator[Group]:
    """Run everything; writes to `scratch` only, but for the runtime share.

    Args:
        model: what `load` takes.
        blocks: length of the prompt in blocks; None takes what this machine computes in some seconds.

    Raises:
        ModelNotFoundError, ModelError: as `load`.
    """
    tell("loading the model", 0.0)
    loaded = load(model)
    tell("products against float64", 0.05)
    yield Group(
        "numbers", (arithmetic.check_products(), arithmetic.check_quantised(), arithmetic.check_attention())
    )  # fmt: skip
    tell("the file system", 0.1)
    yield Group("file system", tuple(check(scratch) for check in DISK))
    tell("damaged blocks", 0.15)
    yield Group("damage", tuple(check(scratch) for check in DAMAGE))
    tell("how fast the model is", 0.2)
    subject = Subject(loaded, model, scratch, make_prompt(loaded, blocks or affordable_blocks(loaded)))
    tell("restored = fresh", 0.25)
    yield Group("restored = fresh", equality.check_equality(subject))
    tell("memory against the budget", 0.5)
    bill, share = memory.check_memory(subject)
    yield Group("memory", (bill, memory.keep(share)) if share is not None else (bill,))
    tell("cold, hot and SSD", 0.65)
    yield Group("speed", speed.check_speed(subject))
    tell("done", 1.0)


DISK = (disk.check_rename, disk.check_publish, disk.check_sync, disk.check_lock, disk.check_place)
DAMAGE = (damage.check_whole, damage.check_bits, damage.check_cuts, damage.check_swaps)
