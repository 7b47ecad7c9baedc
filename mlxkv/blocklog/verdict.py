"""What is wrong in a summary, and three sentences that say what to do first."""

from __future__ import annotations

from dataclasses import dataclass

from mlxkv.blocklog.summary import Summary
from mlxkv.blocklog.why import ADVICE
from mlxkv.core.units import format_bytes

THRASH_SHARE = 0.05  # of the computed tokens were held once and evicted
UNSTABLE_SHARE = 0.25  # of the computed tokens come after a difference from what is held
UNSTABLE = "unstable prefix"
FULL_SHARE = 0.98
REWRITTEN = 1.2
_LAYERS = ("ArraysCache", "RotatingKVCache", "CacheList", "walk-back", "Rejecting split-GDN", "Ignoring structurally",
           "Split GDN")  # fmt: skip


def counted(number: int, what: str) -> str:
    """A number with its noun.

    >>> counted(1, "request"), counted(1200, "request")
    ('1 request', '1,200 requests')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Trouble:
    """One thing that is wrong: its name, what was seen, what to do, and the prompt tokens it cost (0: not known)."""

    name: str
    seen: str
    advice: str
    tokens: int = 0


def find_trouble(found: Summary, levels: set[str]) -> list[Trouble]:
    """Everything that is wrong, what costs most first.

    Args:
        levels: those a log of oMLX or mlx_lm has; without DEBUG they say little of reuse.
    """
    checks = (_thrash, _unstable, _off, _full, _damaged, _dropped, _rewritten, _rejected, _said)
    trouble = [each for check in checks for each in check(found)]
    trouble += _geometry(found)
    if levels and "DEBUG" not in levels:
        trouble.append(_not_debug(found))
    return sorted(trouble, key=lambda each: -each.tokens)


def verdict(found: Summary, trouble: list[Trouble]) -> tuple[str, str, str]:
    """What was reused, where the rest went, and the one change that would save most."""
    if not found.requests:
        first = "No request is in the log."
    elif found.hit_share is None:
        first = f"{counted(found.requests, 'request')}, and the log does not say what they reused."
    else:
        first = (
            f"{found.hit_share:.0%} of {found.hit_tokens + found.computed_tokens:,} prompt tokens were reused,"
            f" {found.computed_tokens:,} were computed in {counted(found.requests, 'request')}."
        )
    lost = [(reason, each) for reason, each in found.lost() if each.tokens]
    if lost:
        reason, most = lost[0]
        lead = "Most were" if 2 * most.tokens > found.computed_tokens else "The largest part was"
        where = f"{most.tokens:,} tokens in {counted(most.requests, 'request')}"
        second = f"{lead} computed because of: {reason} ({where})."
    else:
        second = "Nothing was computed that could have been reused." if found.reasons else "No reason is known."
    return first, second, _best_change(found, trouble)


def _best_change(found: Summary, trouble: list[Trouble]) -> str:
    causes = [
        (cause, each)
        for cause, each in found.ranked_causes()
        if cause != "unknown" and not ADVICE[cause].startswith("Nothing")
    ]
    worst = next((each for each in trouble if each.tokens), None)
    needed = worst.tokens if worst is not None else 1
    if worst is not None and worst.name == UNSTABLE:  # its causes are its parts, and say better what to change
        needed = int(needed * UNSTABLE_SHARE)
    if causes and causes[0][1].tokens >= needed:
        cause, each = causes[0]
        return f"What would save most ({each.tokens:,} tokens, {cause}): {ADVICE[cause]}"
    if worst is not None:
        return f"What would save most ({worst.tokens:,} tokens, {worst.name}): {worst.advice}"
    if trouble:
        return f"To mend ({trouble[0].name}): {trouble[0].advice}"
    return "There is nothing to change."


def _tokens(found: Summary, *beginnings: str) -> tuple[int, int]:
    chosen = [each for reason, each in found.reasons.items() if reason.startswith(beginnings)]
    return sum(each.tokens for each in chosen), sum(each.requests for each in chosen)


def _room(found: Summary, tier: str) -> str:
    """What gives a tier more room, by the name of the program that wrote the log."""
    omlx = {"hot": "the size of its hot cache", "cold": "the largest size of its SSD cache"}
    return omlx[tier] if found.sources["oMLX"] and not found.sources["mlxkv"] else f"--{tier}"


def _thrash(found: Summary) -> list[Trouble]:
    tokens, requests = _tokens(found, "evicted")
    if tokens <= THRASH_SHARE * found.computed_tokens:
        return []
    seen = f"{tokens:,} tokens in {counted(requests, 'request')} had been held and were evicted"
    advice = f"Give the tiers more room: raise {_room(found, 'hot')}, then {_room(found, 'cold')}."
    return [Trouble("thrash", seen, advice, tokens)]


def _unstable(found: Summary) -> list[Trouble]:
    tokens, requests = _tokens(found, "diverged")
    if requests < 2 or tokens <= UNSTABLE_SHARE * found.computed_tokens:
        return []
    seen = f"{counted(requests, 'request')} left what was held, {tokens:,} tokens were computed after that"
    return [Trouble(UNSTABLE, seen, "See where: mlxkv why FILE ID, or mlxkv lint before a deploy.", tokens)]


def _off(found: Summary) -> list[Trouble]:
    return [
        Trouble(f"the {name} tier is off", "it was opened with a budget of 0", f"Raise {_room(found, name)}.")
        for name, tier in found.tiers.items()
        if tier.off
    ]


def _full(found: Summary) -> list[Trouble]:
    full = []
    for name, tier in found.tiers.items():
        evicted = found.evicted_for_room.get(name, 0)
        filled = tier.peak_bytes >= FULL_SHARE * (tier.budget_bytes or 0)  # of the SSD, what it held before is unknown
        if tier.budget_bytes and evicted and (filled or name == "cold"):
            seen = f"{name} was full ({format_bytes(tier.budget_bytes)}) and evicted {counted(evicted, 'block')}"
            full.append(Trouble("budget too small", seen, f"Raise {_room(found, name)}."))
    return full


def _damaged(found: Summary) -> list[Trouble]:
    if not found.quarantined_blocks:
        return []
    tokens, _ = _tokens(found, "damaged")
    seen = f"{counted(found.quarantined_blocks, 'block file')} failed a check"
    return [Trouble("damaged files", seen, "Run mlxkv cache verify, and check the disk.", tokens)]


def _dropped(found: Summary) -> list[Trouble]:
    advice = {
        "no room": "Raise --cold, or free some disk.",
        "daily write allowance": "The day's writes are used up; it goes on tomorrow (UTC).",
        "offline": "Bring the cache directory back.",
    }
    return [
        Trouble("blocks not written", f"{counted(count, 'block')}: {reason}", advice.get(reason, "See mlxkv doctor."))
        for reason, count in found.dropped.most_common()
    ]


def _rewritten(found: Summary) -> list[Trouble]:
    times = found.write_amplification
    if times is None or times < REWRITTEN:
        return []
    seen = f"each byte was written {times:.2f} times ({format_bytes(found.rewritten_bytes)} again)"
    return [Trouble("written again and again", seen, f"Raise {_room(found, 'cold')}: what is evicted is written anew.")]


def _rejected(found: Summary) -> list[Trouble]:
    layers = {what: count for what, count in found.rejects.items() if what.startswith(_LAYERS)}
    others = {what: count for what, count in found.rejects.items() if what not in layers}
    tokens, _ = _tokens(found, "walk-back", *(f"{kind} layers" for kind in _LAYERS), "no checkpoint", "exact cache hit")
    trouble = []
    if layers:
        seen = f"{counted(sum(layers.values()), 'time')}: {', '.join(sorted(layers))}"
        advice = "They resume only where a stored boundary is; append to prompts, change nothing in them."
        trouble.append(Trouble("layers that cannot be cut", seen, advice, tokens))
    if others:
        seen = f"{counted(sum(others.values()), 'time')}: {', '.join(sorted(others))}"
        trouble.append(
            Trouble("held blocks do not fit", seen, "They are of another model, setting or version: clear them.")
        )
    return trouble


def _said(found: Summary) -> list[Trouble]:
    if not found.logged_trouble:
        return []
    seen = ", ".join(f"{what} ({count:,})" for what, count in found.logged_trouble.most_common())
    return [Trouble("the server's own warnings", seen, "See those lines, and the memory and disk it had.")]


def _geometry(found: Summary) -> list[Trouble]:
    return [
        Trouble(
            "block size overstated",
            f"the log says {format_bytes(each.block64_bytes)} a block of 64 tokens, counting all {each.layers} layers;"
            f" {each.kv_layers} hold KV: {format_bytes(each.exact_bytes)}",
            "Plan with the smaller figure: mlxkv budget MODEL.",
        )
        for each in found.geometry
        if each.counts_all_layers
    ]


def _not_debug(found: Summary) -> Trouble:
    seen = f"the log has no DEBUG lines; the reuse of {counted(found.unknown_requests, 'request')} is not in it"
    return Trouble("little is logged", seen, "Run the server with --log-level debug: it adds hits, tiers and writes.")
