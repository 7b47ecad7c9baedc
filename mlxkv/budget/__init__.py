"""What fits, how long it waits, and what to change: exact bytes from a model's config, before a deploy.

from mlxkv.budget import find_machine, plan

answer = plan("Qwen2.5-0.5B-Instruct", machine=find_machine(chip="M4 Pro"), contexts=[32_768])
print(answer.verdict, answer.max_context_tokens)
"""

from mlxkv.budget.formula import formula_bytes_per_token, formula_kv_bytes
from mlxkv.budget.latency import Estimate, Latency
from mlxkv.budget.machines import Machine, find_machine
from mlxkv.budget.memory import Deployment, Judgement, Memory
from mlxkv.budget.model import TracedModel, trace_model
from mlxkv.budget.plan import ContextPlan, KvFigures, Plan, TierPlan, Versions, WeightFigures, plan
from mlxkv.budget.source import Source, find_source

__all__ = [
    "ContextPlan", "Deployment", "Estimate", "Judgement", "KvFigures", "Latency", "Machine", "Memory", "Plan",
    "Source", "TierPlan", "TracedModel", "Versions", "WeightFigures", "find_machine", "find_source",
    "formula_bytes_per_token", "formula_kv_bytes", "plan", "trace_model",
]  # fmt: skip
