"""Block logs written by hand, one line a second."""

import json

from mlxkv.blocklog.readers import LogReader
from mlxkv.blocklog.summary import summarize
from mlxkv.blocklog.verdict import find_trouble
from mlxkv.core.units import MIB


class Script:
    """Lines of a block log, one a second."""

    def __init__(self):
        self.lines = []

    def add(self, event, **fields):
        at = len(self.lines)
        time = f"2026-11-30T{at // 3600:02}:{at // 60 % 60:02}:{at % 60:02}.000+00:00"
        self.lines.append({"time": time, "process": 1, "event": event, **fields})
        return self

    def request(self, prompt, hot=0, cold=0, reason="never seen", **fields):
        found = {"model": "tiny", "root": "0" * 64, "request": f"r{len(self.lines)}", "prompt_tokens": prompt}
        if hot + cold == prompt - 1:
            reason = None
        known = {"reason": reason} if reason is not None else {}
        found |= {"hot_tokens": hot, "cold_tokens": cold, "computed_tokens": prompt - hot - cold}
        found |= {"matched_tokens": hot + cold, "tail_tokens": 0, "output_tokens": 5}
        return self.add("request", **(found | known | fields))

    def block(self, name, event="commit", **fields):
        return self.add(
            event, block=name * 64, **{"bytes": MIB, "tier": "hot", "tokens": 64, "model": "tiny", **fields}
        )

    def text(self):
        return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in self.lines)

    def summary(self):
        reader = LogReader()
        lines = self.text().encode().splitlines()
        return summarize(reader, [*reader.events(lines), *reader.finish()])

    def trouble(self):
        return {each.name: each for each in find_trouble(self.summary(), set())}


def a_day():
    """A log with some of everything."""
    log = Script().add("open", bytes=4 * MIB, tier="hot").add("open", bytes=64 * MIB, tier="cold")
    for i in range(60):
        name = "0123456789abcdef"[i % 16]
        if i % 3 == 0:
            log.request(
                1000, hot=(i % 5) * 100, cold=(i % 4) * 100, tail_tokens=i % 7, reason="never seen", ttft_s=0.1 * i
            )
        if i % 4 == 0:
            log.request(500, hot=300, reason=f"diverged at token {300 + i}" if i % 8 else "evicted", ttft_s=2.0)
        log.block(name).block(name, "offload", tier="cold", bytes=MIB + 100)
        if i % 2:
            log.block(name, "evict", reason="budget")
        if i % 10 == 0:
            log.block(name, "quarantine", reason="payload digest").block(name, "drop", reason="no room", tier="cold")
        if i % 7 == 0:
            log.block(name, "restore", tier="cold")
    return log.request(10, reason="shorter than a block").block("a", tokens=7).block("b", tokens=0)
