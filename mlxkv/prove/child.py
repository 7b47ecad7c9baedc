"""`python -m mlxkv.prove.child ASKED ANSWER`: the process of its own that `runs.run_apart` starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mlxkv.models.loader import load
from mlxkv.prove.runs import Subject, open_blocks, run_cached, save_run


def main(asked: Path, answer: Path) -> None:
    """Load the model, restore the prompt from the cold tier, and write down what came of it."""
    wanted = json.loads(asked.read_text(encoding="utf-8"))
    prompt = tuple(wanted["prompt"])
    subject = Subject(load(wanted["model"]), wanted["model"], Path(wanted["directory"]).parent, prompt)
    with open_blocks(subject, hot=False) as cache:
        save_run(run_cached(subject.model, cache, prompt, salt=wanted["salt"]), answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
