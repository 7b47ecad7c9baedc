"""What the tiers hold, as JSON: for the dashboard's map and for whoever asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlxkv.cache.names import BLOCK_TOKENS, TOKEN_BYTES
from mlxkv.cache.store import BlockStore


def hot_use(store: BlockStore) -> dict[str, Any]:
    """The hot tier against its budget."""
    return {"used_bytes": store.hot.used_bytes, "budget_bytes": store.hot.budget_bytes, "blocks": len(store.hot)}


def cold_use(store: BlockStore) -> dict[str, Any] | None:
    """The cold tier against its budget; None when it is switched off."""
    cold = store.cold
    if cold is None:
        return None
    return {
        "used_bytes": cold.used_bytes,
        "budget_bytes": cold.budget_bytes,
        "blocks": cold.totals()[0],
        "offline": cold.offline,
        "written_today_bytes": cold.written_today_bytes(),
    }


def hot_blocks(store: BlockStore) -> list[dict[str, Any]]:
    """The hot tier's blocks, tails and checkpoints; on the engine's thread."""
    return [
        {
            "block": entry.name.hex(),
            "parent": entry.parent.hex(),
            "kind": "block" if entry.tokens else "checkpoint",
            "tokens": len(entry.tokens) // TOKEN_BYTES,
            "bytes": entry.nbytes,
            "tier": "hot",
            "hits": entry.hits,
            "used": entry.used_at,
        }
        for entry in store.hot.entries()
    ]


def held_blocks(store: BlockStore, hot: Iterable[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Blocks and checkpoints of both tiers, the last used first; from any thread.

    A block is at least as recently used as what continues it, and stands before it: however short `limit` cuts the
    list, every chain in it begins at its root. `used` is in seconds since 1970.

    Args:
        hot: of `hot_blocks`.
    """
    found = {block["block"]: block for block in hot}
    for row in store.cold.rows() if store.cold is not None else []:
        name = row.name.hex()
        known = found.get(name)
        if known is not None:
            known.update(tier="both", used=max(known["used"], row.used), hits=max(known["hits"], row.hits))
            continue
        found[name] = {
            "block": name,
            "parent": row.parent.hex(),
            "kind": "checkpoint" if row.is_checkpoint else "block",
            "tokens": 0 if row.is_checkpoint else BLOCK_TOKENS,
            "bytes": row.nbytes,
            "tier": "cold",
            "hits": row.hits,
            "used": row.used,
        }
    shown = _last_used_first(found)[:limit]
    names = {block["block"] for block in shown}
    roots = dict.fromkeys(block["parent"] for block in shown if block["parent"] not in names)
    models = {root: store.model_of(bytes.fromhex(root)) for root in roots}
    return {"blocks": shown, "total": len(found), "roots": models}


def _last_used_first(found: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Using a block uses its ancestors: the tiers note it of the deepest alone, so it is passed on here."""
    depths: dict[str, int] = {}
    for name in found:
        above = []
        while name in found and name not in depths:
            above.append(name)
            name = found[name]["parent"]
        depth = depths.get(name, 0)
        for place, below in enumerate(reversed(above), 1):
            depths[below] = depth + place
    for name in sorted(found, key=depths.__getitem__, reverse=True):
        parent = found.get(found[name]["parent"])
        if parent is not None:
            parent["used"] = max(parent["used"], found[name]["used"])
    return sorted(found.values(), key=lambda block: (-block["used"], depths[block["block"]]))
