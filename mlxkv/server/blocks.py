"""What the tiers hold, as JSON: for the dashboard's map and for whoever asks."""

from __future__ import annotations

from typing import Any

from mlxkv.cache.names import BLOCK_TOKENS, TOKEN_BYTES
from mlxkv.cache.store import BlockStore
from mlxkv.models.block_cache import BlockCache


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


def held_blocks(cache: BlockCache, limit: int) -> dict[str, Any]:
    """Blocks and checkpoints of both tiers, hot ones first, then by last use; on the engine's thread."""
    store = cache.store
    found: dict[bytes, dict[str, Any]] = {}
    hot = sorted(store.hot.entries(), key=lambda entry: -entry.used)
    for entry in hot:
        found[entry.name] = {
            "block": entry.name.hex(),
            "parent": entry.parent.hex(),
            "kind": "block" if entry.tokens else "checkpoint",
            "tokens": len(entry.tokens) // TOKEN_BYTES,
            "bytes": entry.nbytes,
            "tier": "hot",
            "hits": entry.hits,
            "used": None,
        }
    rows = sorted(store.cold.rows(), key=lambda row: -row.used) if store.cold is not None else []
    for row in rows:
        known = found.get(row.name)
        if known is not None:
            known.update(tier="both", used=row.used, hits=max(known["hits"], row.hits))
            continue
        found[row.name] = {
            "block": row.name.hex(),
            "parent": row.parent.hex(),
            "kind": "checkpoint" if row.is_checkpoint else "block",
            "tokens": 0 if row.is_checkpoint else BLOCK_TOKENS,
            "bytes": row.nbytes,
            "tier": "cold",
            "hits": row.hits,
            "used": row.used,
        }
    shown = list(found.values())[:limit]
    return {"blocks": shown, "total": len(found), "root": cache.root().hex()}
