"""What a check answers: plain data, with nothing in it that says whose machine it was."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["ok", "note", "fail"]
Figure = float | int | str | bool | None


@dataclass(frozen=True)
class Check:
    """One line of the answer.

    Attributes:
        verdict: `note` works, with a limit worth knowing; `fail` must not be.
        said: what was seen, in one sentence.
        figures: the numbers behind it; their names end in their unit.
        advice: what to do; never empty when the verdict is `fail`.
    """

    name: str
    verdict: Verdict
    said: str
    figures: dict[str, Figure] = field(default_factory=dict)
    advice: str = ""

    def __post_init__(self) -> None:
        assert self.advice or self.verdict != "fail", f"{self.name} fails and does not say what to do"


def worst(checks: Iterable[Check]) -> Verdict:
    """The gravest verdict; `ok` of none."""
    found = {check.verdict for check in checks}
    return "fail" if "fail" in found else "note" if "note" in found else "ok"


def why(error: Exception) -> str:
    """An error without the paths in it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__ if os.sep in str(error) else str(error) or type(error).__name__


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
