"""Bytes, tokens and seconds: how they are read and how they are written.

Reads GB (1e9) and GiB (2**30) and every size between; writes KiB, MiB and GiB only, so that no figure has two meanings.
"""

from __future__ import annotations

import re

from mlxkv.core.errors import UsageError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_TOKENS = re.compile(r"\s*(\d+)\s*([km]?)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `8GiB`, `500MB` or `0`.

    A number without a unit is refused (except 0): nobody can say whether it meant bytes or gigabytes.

    >>> parse_bytes("1.5 GiB"), parse_bytes("2GB"), parse_bytes("0")
    (1610612736, 2000000000, 0)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a size; write a number and a unit, such as 8GiB or 500MB.")
    number, unit = match.groups()
    if not unit:
        if float(number) == 0:
            return 0
        raise UsageError(f"{text!r} has no unit; write {number}GiB, {number}MiB or {number}B.")
    if unit.lower() not in _UNITS:
        raise UsageError(f"{text!r} has the unknown unit {unit!r}; use B, KB, MB, GB, TB, KiB, MiB, GiB or TiB.")
    return int(float(number) * _UNITS[unit.lower()])


def format_bytes(count: int) -> str:
    """Two significant decimals in the largest binary unit that keeps the number at 1 or more.

    >>> format_bytes(786432), format_bytes(1474560), format_bytes(12)
    ('768.00 KiB', '1.41 MiB', '12 B')
    """
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count} B"


def parse_tokens(text: str) -> int:
    """Tokens of a count such as `32768`, `32k` (1,024 each) or `1m`.

    >>> parse_tokens("4k"), parse_tokens("1000")
    (4096, 1000)
    """
    match = _TOKENS.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"{text!r} is not a number of tokens; write a whole number above zero, such as 32768 or 32k.")
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]


def format_seconds(seconds: float) -> str:
    """Milliseconds below a second, then seconds, then minutes.

    >>> format_seconds(0.0031), format_seconds(0.21), format_seconds(7.5), format_seconds(150)
    ('3 ms', '0.21 s', '7.5 s', '2 min 30 s')
    """
    if seconds < 0.1:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.001 else f"{seconds * 1e3:.2f} ms"
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
