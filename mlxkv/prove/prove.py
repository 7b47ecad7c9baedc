"""All checks in their order, about three minutes at most: each is told before it begins, and its answer handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxkv.core.errors import MlxkvError
from mlxkv.models.loader import load
from mlxkv.prove import arithmetic, damage, disk, equality, memory, speed
from mlxkv.prove.check import Check, why
from mlxkv.prove.runs import Subject, affordable_blocks, make_prompt

Tell = Callable[[str, float], None]
"""Called with what begins now, and the share of the whole that is done."""

NUMBERS = (arithmetic.check_products, arithmetic.check_quantised, arithmetic.check_attention)
DISK = (disk.check_rename, disk.check_publish, disk.check_sync, disk.check_lock, disk.check_place)
DAMAGE = (damage.check_whole, damage.check_bits, damage.check_cuts, damage.check_swaps)

_BROKEN = (RuntimeError, ValueError, OSError, MlxkvError)  # what a device, a disk and the cache raise


@dataclass(frozen=True)
class Group:
    """Checks that belong together, as a table shows them."""

    title: str
    checks: tuple[Check, ...]


def prove(model: str, scratch: Path, tell: Tell, *, blocks: int | None = None) -> Iterator[Group]:
    """Run everything; writes to `scratch` only, but for the runtime share.

    A check that breaks has failed, and the others go on.

    Args:
        model: what `load` takes.
        blocks: length of the prompt in blocks; None takes what this machine computes in some seconds.

    Raises:
        ModelNotFoundError, ModelError: as `load`.
    """
    tell("loading the model", 0.0)
    loaded = load(model)
    tell("products against float64", 0.05)
    yield Group("numbers", attempt("numbers", lambda: tuple(check() for check in NUMBERS)))
    tell("the file system", 0.1)
    yield Group("file system", attempt("file system", lambda: tuple(check(scratch) for check in DISK)))
    tell("damaged blocks", 0.15)
    yield Group("damage", attempt("damage", lambda: tuple(check(scratch) for check in DAMAGE)))
    tell("how fast the model is", 0.2)
    subject = Subject(loaded, model, scratch, make_prompt(loaded, blocks or affordable_blocks(loaded)))
    tell("restored = fresh", 0.25)
    yield Group("restored = fresh", attempt("restored = fresh", lambda: equality.check_equality(subject)))
    tell("memory against the budget", 0.5)
    yield Group("memory", attempt("memory", lambda: _memory(subject)))
    tell("cold, hot and SSD", 0.65)
    yield Group("speed", attempt("speed", lambda: speed.check_speed(subject)))
    tell("done", 1.0)


def attempt(name: str, checks: Callable[[], tuple[Check, ...]]) -> tuple[Check, ...]:
    """The answers of `checks`; one that fails where they could not be given."""
    try:
        return checks()
    except _BROKEN as error:
        advice = "Run it again on a quiet machine with free memory and disk, and report it if it stays."
        return (Check(name, "fail", f"it broke: {why(error)}", {}, advice),)


def _memory(subject: Subject) -> tuple[Check, ...]:
    bill, share = memory.check_memory(subject)
    return (bill,) if share is None else (bill, memory.keep(share))
