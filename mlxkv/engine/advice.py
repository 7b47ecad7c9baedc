"""Which of a server's settings to change when the device failed, with what they are set to now."""

from __future__ import annotations

from mlxkv.core.device import Advice
from mlxkv.core.units import format_bytes
from mlxkv.engine.chunks import LEAST_CHUNK_TOKENS
from mlxkv.engine.scheduler import Limits


def advice(limits: Limits, *, hot_bytes: int, chunk_tokens: int | None) -> Advice:
    """What to lower, by what went wrong; a setting that is at its least already is not named.

    Args:
        chunk_tokens: length of the chunk that went wrong, shorter deep in a prompt; None for a step of all rows.
    """
    memory = "--memory" if limits.memory_bytes is None else f"--memory (now {format_bytes(limits.memory_bytes)})"
    hot = f"--hot (now {format_bytes(hot_bytes)})" if hot_bytes else ""
    rows = f"--sequences (now {limits.sequences})" if limits.sequences > 1 else ""
    chunk = f"--prefill-chunk below {chunk_tokens:,}" if (chunk_tokens or 0) > LEAST_CHUNK_TOKENS else ""
    work = _lower(rows if chunk_tokens is None else chunk)
    return {"memory": _lower(memory, hot, rows), "array": work, "count": _lower(hot, rows), "time": work}


def _lower(*settings: str) -> str:
    *others, last = [setting for setting in settings if setting] or [""]
    if not last:
        return "send a shorter prompt"
    return f"lower {', '.join(others)}{' or ' if others else ''}{last}, or send a shorter prompt"
