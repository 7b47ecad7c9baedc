"""Seconds to the first token and tokens a second: estimates, always as a range.

Prefill is arithmetic: FLOPs of the projections (linear in tokens) and of attention (quadratic), over the part of the
chip's peak that was measured. Decode is memory: bytes read for one token over the part of the bandwidth that was
measured. Restoring is bytes over the tier's rate. Each estimate takes the worst, the typical and the best case of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mlxkv.budget.machines import Rates, Speed
from mlxkv.budget.memory import Deployment
from mlxkv.sizing.trace import AttentionCall


@dataclass(frozen=True)
class Estimate:
    """A figure that was not measured on this machine: from `low` to `high`, most likely `mid`."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a prefill; a multiplication and an addition are two."""

    linear: int
    quadratic: int

    @property
    def total(self) -> int:
        return self.linear + self.quadratic


@dataclass(frozen=True)
class Latency:
    """Seconds until the first token when nothing, the hot tier or the SSD holds the prompt, and the decode rate.

    `decode_tokens_per_s` is of one sequence, while all of them decode together.
    """

    cold_s: Estimate
    hot_s: Estimate
    ssd_s: Estimate
    decode_tokens_per_s: Estimate


@dataclass(frozen=True)
class _Case:
    """Shares of the peaks that are reached: of FLOPs in prefill, of the bandwidth in decode (added to the measured
    curve) and in copies, of the SSD's rate; `neural` multiplies FLOPs where there are matrix units."""

    prefill: float
    prefill_mixture: float
    decode_more: float
    decode_mixture: float
    copy: float
    ssd: float
    neural: float


# Prefill shares, from measured rates over FLOPs and peak: Qwen3-4B 4-bit 0.76, bf16 0.83, Qwen3-30B-A3B 0.68 (M4 Max,
# mlx-lm BENCHMARKS.md, macs.json), Llama-3.1-8B 0.35 at 32 k (M2 Ultra, mlx-examples#1081). `neural`: Apple reports 3.3
# to 4.1 times the M4's prefill for the M5, which is 2.6 to 3.3 times its float32 peak.
# Mixtures decode slower than their bytes say: LFM2-8B-A1B reaches 0.78 of the dense curve (macs.json).
_WORST = _Case(0.35, 0.30, -0.10, 0.60, 0.35, 0.70, 1.0)
_TYPICAL = _Case(0.70, 0.60, 0.0, 0.80, 0.60, 0.85, 2.8)
_BEST = _Case(0.88, 0.75, 0.06, 1.0, 0.80, 1.0, 3.3)

# Bytes read for a token and the share of the bandwidth reached: Llama-3.2-1B, Llama-3.2-3B, 7B to 9B; macs.json,
# `decode_efficiency` (M4 Pro 24 GB, MLX 4-bit).
_DECODE_SHARES = ((0.695e9, 0.56), (1.81e9, 0.65), (4.0e9, 0.765))
_LEAST_SHARE, _MOST_SHARE = 0.25, 0.85


def prefill_flops(deployment: Deployment, tokens: int) -> Flops:
    """Operations to prefill `tokens` tokens in steps; the head is not needed before the last token.

    Attention is counted as MLX computes it: each step against all keys so far, the masked half of the last square too.
    """
    step = deployment.prefill_step_tokens
    pairs = {
        window: _pairs(tokens, step, window) for window in {c.window_tokens for c in deployment.model.trace.attention}
    }
    quadratic = sum(_pair_flops(call) * pairs[call.window_tokens] for call in deployment.model.trace.attention)
    return Flops(2 * deployment.model.linear_params * tokens, quadratic)


def estimate(deployment: Deployment, tokens: int, sequences: int = 1) -> Latency | None:
    """The waiting time at a context, or None where the machine's rates are unknown.

    Args:
        tokens: of the prompt; all but the last are prefilled or restored.
        sequences: that decode together; the first token is timed for one with nothing else running.
    """
    speed = deployment.machine.speed
    if speed is None:
        return None
    flops = prefill_flops(deployment, tokens - 1).total
    chunks = math.ceil((tokens - 1) / deployment.prefill_step_tokens)
    restored = deployment.model.trace.kv_bytes(tokens - 1) if tokens > 1 else 0

    def cold(rates: Rates, case: _Case) -> float:
        compute = flops / _prefill_rate(deployment, speed, rates, case)
        read = chunks * deployment.model.trace.weights.bytes / (rates.memory_bytes_per_s * case.copy)
        return max(compute, read) + step(rates, case)

    def hot(rates: Rates, case: _Case) -> float:
        return 2 * restored / (rates.memory_bytes_per_s * case.copy) + step(rates, case)

    def ssd(rates: Rates, case: _Case) -> float:
        return restored / (rates.ssd_bytes_per_s * case.ssd) + step(rates, case)

    def step(rates: Rates, case: _Case) -> float:
        return _decode_s(deployment, tokens, 1, rates, case)

    return Latency(
        cold_s=_over(speed, cold),
        hot_s=_over(speed, hot),
        ssd_s=_over(speed, ssd),
        decode_tokens_per_s=_over(speed, lambda rates, case: 1 / _decode_s(deployment, tokens, sequences, rates, case)),
    )


def _over(speed: Speed, figure: Callable[[Rates, _Case], float]) -> Estimate:
    """The figure in the three cases, ascending."""
    mid = figure(speed.typical, _TYPICAL)
    ends = figure(speed.worst, _WORST), figure(speed.best, _BEST)
    return Estimate(min(ends), mid, max(ends))


def _prefill_rate(deployment: Deployment, speed: Speed, rates: Rates, case: _Case) -> float:
    share = case.prefill_mixture if deployment.model.is_mixture else case.prefill
    return rates.flops_per_s * share * (case.neural if speed.neural_accelerators else 1.0)


def _decode_s(deployment: Deployment, tokens: int, sequences: int, rates: Rates, case: _Case) -> float:
    """One step of all sequences: the weights once, each sequence's KV, a shared prefix once."""
    weights = _weights_read(deployment, sequences)
    read = weights + deployment.memory(tokens, sequences).kv_bytes
    share = _decode_share(weights) + case.decode_more
    if deployment.model.is_mixture:
        share *= case.decode_mixture
    return read / (rates.memory_bytes_per_s * min(max(share, _LEAST_SHARE), _MOST_SHARE))


def _weights_read(deployment: Deployment, sequences: int) -> float:
    """Bytes of weights one step reads. More sequences choose more experts, each on its own."""
    weights = deployment.model.trace.weights
    if not deployment.model.is_mixture:
        return float(weights.decode_bytes)
    active = weights.active_params / weights.params
    return weights.decode_bytes / active * (1 - (1 - active) ** sequences)


def _decode_share(read_bytes: float) -> float:
    """The measured curve, straight between its points on a logarithmic scale, and level above them."""
    points = [(math.log(size), share) for size, share in _DECODE_SHARES]
    at = math.log(max(read_bytes, 1.0))
    if at >= points[-1][0]:
        return points[-1][1]
    (x0, y0), (x1, y1) = points[:2] if at < points[1][0] else points[1:]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _pair_flops(call: AttentionCall) -> int:
    """Operations for one query and one key, in all layers of the call: QK^T and AV."""
    return 2 * call.layers * call.shape.query_heads * (call.shape.key_dim + call.shape.value_dim)


def _pairs(tokens: int, step: int, window: int) -> int:
    """Pairs of query and key over all steps of a prefill; a windowed query sees at most `window - 1` past keys a step.

    >>> _pairs(5, 2, 0) == 2 * 2 + 2 * 4 + 1 * 5
    True
    """
    full, rest = divmod(tokens, step)
    most = window - 1 if window else tokens
    growing = min(full, -(-most // step))  # full steps that start before the window is full
    past = step * growing * (growing - 1) // 2 + (full - growing) * most
    return step * (past + full * step) + rest * (min(full * step, most) + rest)
