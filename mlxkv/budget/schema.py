"""The JSON form of a plan: stable, documented in docs/budget.md. Bytes, tokens and seconds are numbers; what was not
measured is {"low", "mid", "high"}; what is unknown is null."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mlxkv.budget.latency import Latency
from mlxkv.budget.plan import ContextPlan, Plan


def json_form(plan: Plan) -> dict[str, Any]:
    """One object. The key `tiers` is there only when a hot or cold budget was asked about."""
    machine, kv = plan.machine, asdict(plan.kv)
    del kv["formula_note"]
    form: dict[str, Any] = {
        "model": plan.model,
        "versions": asdict(plan.versions),
        "kv": kv,
        "weights": asdict(plan.weights),
        "machine": {
            "memory_bytes": machine.memory_bytes,
            "gpu_limit_bytes": machine.gpu_limit_bytes,
            "max_buffer_bytes": machine.max_buffer_bytes,
            "macos": machine.macos,
            "chip": machine.chip,
            "source": machine.source,
            "runtime_share": "estimated" if machine.runtime is None else "measured",
        },
        "contexts": [_context_form(row) for row in plan.contexts],
        "max_context_tokens": plan.max_context_tokens,
        "max_sequences": plan.max_sequences,
        "verdict": plan.verdict,
        "advice": list(plan.advice),
    }
    tiers = {name: asdict(tier) for name, tier in (("hot", plan.hot), ("cold", plan.cold)) if tier is not None}
    return form | ({"tiers": tiers} if tiers else {})


def _context_form(row: ContextPlan) -> dict[str, Any]:
    return {
        "tokens": row.tokens,
        "sequences": row.sequences,
        "kv_bytes": row.memory.kv_bytes,
        "transient_bytes": row.memory.transient_bytes,
        "total_bytes": row.memory.total_bytes,
        "fits": row.fits,
        "binding": row.binding,
        **_latency_form(row.latency),
    }


def _latency_form(latency: Latency | None) -> dict[str, Any]:
    """Null where the machine's rates are unknown. Four significant digits: more would say that it was measured."""
    names = {
        "ttft_cold_s": "cold_s",
        "ttft_hot_s": "hot_s",
        "ttft_ssd_s": "ssd_s",
        "decode_tokens_per_s": "decode_tokens_per_s",
    }
    if latency is None:
        return dict.fromkeys(names)
    figures = asdict(latency)
    return {
        name: {end: float(f"{value:.4g}") for end, value in figures[field].items()} for name, field in names.items()
    }
