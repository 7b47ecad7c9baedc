"""Where checkpoints are taken: at places that requests come back to, and at a cadence bounded in bytes.

A checkpoint is the state of the layers that cannot be cut by token, after a full block. Other prompts branch off
after a system prompt; the same prompt comes back, longer by a turn; so both ends are kept. In between, the cadence
keeps the bytes of checkpoints under `SHARE` of the keys and values of the same tokens, half of it left for those ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxkv.cache.layout import Layout
from mlxkv.cache.names import BLOCK_TOKENS

SHARE = 0.25
CADENCE_WITHOUT_KV = 2048  # a model that keeps no keys and values has nothing to hold the share against


def cadence_tokens(layout: Layout) -> int:
    """Tokens from one checkpoint of the cadence to the next, a multiple of a block; 0 for a layout without states.

    >>> from mlxkv.cache.layout import ArraySpec, StateSpec
    >>> keys, state = ArraySpec("0.keys", 2, 16, "float32"), StateSpec("1.cache.0", (1, 3, 256), "float32")
    >>> cadence_tokens(Layout((keys,), (state,)))
    192
    """
    return cadence_of(layout.checkpoint_bytes, layout.bytes_per_token) if layout.states else 0


def cadence_of(checkpoint_bytes: int, bytes_per_token: int) -> int:
    """The same from the bytes of a checkpoint and of a token's keys and values."""
    if not bytes_per_token:
        return CADENCE_WITHOUT_KV
    tokens = checkpoint_bytes / (SHARE / 2 * bytes_per_token)
    return max(-(-int(tokens) // BLOCK_TOKENS), 1) * BLOCK_TOKENS


def positions(layout: Layout, prompt_tokens: int, marks: Sequence[int]) -> list[int]:
    """Where a prompt of `prompt_tokens` is checkpointed, ascending.

    Args:
        marks: tokens after which other prompts may branch off, such as the end of the system prompt; each counts as the
            last block boundary before it.
    """
    cadence = cadence_tokens(layout)
    if not cadence:
        return []
    last = (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    found = set(range(cadence, last, cadence))
    found |= {mark // BLOCK_TOKENS * BLOCK_TOKENS for mark in marks if mark <= last} | {last}
    return sorted(found - {0})
