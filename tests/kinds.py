"""Every kind of cache against runs without mlxkv: what the tests of kinds and of all architectures share.

The oracle is mlx-lm's own caches, driven here. It notes every row that a layer ever put in and every state at the end
of each step, so it knows what any restore, at any token, should hold. Steps end at absolute multiples of 64 and before
the last prompt token, as the engine's do.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from driving import CHUNK_TOKENS, some_tokens, stops
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes
from tiny import ALL_TINY, Config, randomize

from mlxkv.engine.generate import generate
from mlxkv.prompt_cache.block_cache import BlockCache, PromptCache

DATA = Path(__file__).parent / "data"
SMALLER_WINDOWS = {
    "afmoe": {"sliding_window": 32},
    "recurrent_gemma": {"attention_window_size": 32},
}
"""Where the config at hand has a window that no prompt here would fill."""


def _configs() -> dict[str, Config]:
    found: dict[str, Config] = {}
    for file in ("mlx_lm_architectures.json", "more_architectures.json"):
        for config in json.loads((DATA / file).read_text())["configs"]:
            name = config.get("_name", config["model_type"])
            found[name] = config | SMALLER_WINDOWS.get(name, {})
    return found | {config["model_type"]: config for make in ALL_TINY.values() for config in [make()]}


CONFIGS = _configs()
"""A tiny config of every architecture that can be built, by model_type; those of `tiny` where both have one."""

CALMED = {
    "gemma3": ("q_norm", 0.1),
    "gemma3_text": ("q_norm", 0.1),
    "gemma4": ("q_norm", 0.1),
    "gemma4_text": ("q_norm", 0.1),
    "longcat_flash": ("q_b_proj", 0.25),
    "longcat_flash_ngram": ("q_b_proj", 0.25),
}
"""Parameters made smaller where random ones make attention nearly a step: rounding then shows a thousandfold in the
logits, with mlx-lm's own caches as with ours (Gemma 4 does not scale its scores)."""

CUTS_MATTER = {"plamo3"}
"""mlx-lm masks a window of one token more than its cache keeps, so its answers depend on where steps are cut: only runs
cut alike can be compared."""

REPLY_TOKENS = 40
CONTINUED_TOKENS = 2
EXACT = 1e-5
"""Most that log-probabilities may differ where a restored run cuts its steps elsewhere than a fresh one."""
TIE = 1e-4
"""Log-probabilities nearer than this may come out in either order."""


def vocabulary(config: Config) -> int:
    """Token ids below this are safe to give to the model of `config`."""
    level = config | config.get("text_config", {})
    return min(int(level.get("vocab_size") or level.get("num_vocab") or 128), 128)


def build(config: Config) -> nn.Module:
    """mlx-lm's model of `config`, by mlx-lm's own look-up, with random float32 weights.

    It is run once: Gemma 3n clips some of its own weights when it runs, and so would get another root afterwards.
    """
    model, arguments = _get_classes(config)
    module = randomize(model(arguments.from_dict(config)))
    part, factor = CALMED.get(config["model_type"], ("", 1.0))
    calmed = [(name, factor * array) for name, array in tree_flatten(module.parameters()) if part and part in name]
    module.update(tree_unflatten(calmed))
    mx.eval(module(mx.zeros((1, 1), mx.int32)), module.parameters())
    return module


# prompts


def windows(module: nn.Module) -> list[int]:
    """How far its layers look back that forget, ascending."""
    caches = [cache for _, cache in leaves(make_prompt_cache(module))]
    return sorted(
        {cache.max_size for cache in caches if isinstance(cache, RotatingKVCache)}
        | {cache.chunk_size for cache in caches if isinstance(cache, ChunkedKVCache)}
    )


def lengths(module: nn.Module) -> list[int]:
    """Prompts around a window, when there is one, and around a block; no length twice."""
    around = [n for window in windows(module) for n in (window + 1, window - 1, 3 * window + 17, window)]
    return list(dict.fromkeys([*around, 65, 63, 129, 64, 1]))


@dataclass(frozen=True)
class Case:
    """A second prompt that begins as a stored one does."""

    name: str
    prompt: list[int]


def cases(
    first: list[int], reply: list[int], size: int, *, extend: Sequence[int] = (5, 70), branch: Sequence[int] = (40, 100)
) -> list[Case]:
    """The same again, the conversation extended, and branches off it where it is long enough.

    Args:
        size: of the vocabulary.
    """
    told = first + reply
    found = [Case("resend", first)]
    found += [Case(f"extend by {n}", told + some_tokens(n, n, size)) for n in extend]
    for at in branch:
        if at < len(told):
            other = [*told[:at], (told[at] + 1) % size, *some_tokens(9, at, size)]
            found.append(Case(f"branch at {at}", other))
    return found


# the oracle


class _Seen:
    """Mixed into a cache that forgets: every row it was given."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        for side, rows in (("keys", keys), ("values", values)):
            vars(self).setdefault(f"seen_{side}", []).append(mx.array(rows))  # a ring writes into what it was given
        return super().update_and_fetch(keys, values)  # type: ignore[misc]


class SeenRotatingKVCache(_Seen, RotatingKVCache):
    """A `RotatingKVCache` that forgets nothing."""


class SeenChunkedKVCache(_Seen, ChunkedKVCache):
    """A `ChunkedKVCache` that forgets nothing."""


def _seeing(cache: Any) -> Any:
    if type(cache) is CacheList:
        return CacheList(*(_seeing(inner) for inner in cache.caches))
    if type(cache) is RotatingKVCache:
        return SeenRotatingKVCache(cache.max_size, cache.keep)
    if type(cache) is ChunkedKVCache:
        return SeenChunkedKVCache(cache.chunk_size)
    return cache


def leaves(caches: Sequence[Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every cache that may hold arrays, with its path in the list."""
    for i, cache in enumerate(caches):
        if type(cache) is CacheList:
            yield from leaves(cache.caches, f"{path}{i}.")
        else:
            yield f"{path}{i}", cache


@dataclass
class Run:
    """A run without a block cache: tokens sampled, log-probabilities a step, and everything its caches ever held.

    `rows` are `[heads, tokens, dim]` by path and side, `states` the arrays of every state after so many tokens.
    """

    prompt: list[int]
    reply: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    states: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)


def run_plain(module: nn.Module, prompt: list[int], reply_tokens: int, ends: Sequence[int] | None = None) -> Run:
    """Greedy, with mlx-lm's caches alone; the prompt in steps up to each of `ends`, or as the engine cuts them."""
    caches = [_seeing(cache) for cache in make_prompt_cache(module)]
    run = Run(list(prompt))
    at = 0
    given = list(prompt)
    ends = stops(0, len(prompt)) if ends is None else ends
    for step in range(reply_tokens):
        for end in ends if step == 0 else [len(given)]:
            logits = module(mx.array(given[at:end])[None], cache=caches)[0, -1]
            mx.eval(logits, [cache.state for cache in caches])
            at = end
            run.states[at] = _states(caches)
        logprobs = logits - mx.logsumexp(logits)
        run.logprobs.append(np.array(logprobs))
        run.reply.append(int(mx.argmax(logprobs).item()))
        given.append(run.reply[-1])
    run.rows = dict(_rows(caches))
    return run


def _states(caches: Sequence[Any]) -> dict[str, np.ndarray]:
    """A copy of every array of every state."""
    return {
        f"{path}.{i}": np.array(array)
        for path, leaf in leaves(caches)
        if isinstance(leaf, ArraysCache)
        for i, array in enumerate(leaf.cache)
        if array is not None
    }


def _rows(caches: Sequence[Any]) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in leaves(caches):
        for side in ("keys", "values"):
            if isinstance(leaf, _Seen):
                if f"seen_{side}" in vars(leaf):
                    yield f"{path}.{side}", np.array(mx.concatenate(vars(leaf)[f"seen_{side}"], axis=2)[0])
            elif isinstance(leaf, KVCache) and leaf.keys is not None:
                yield f"{path}.{side}", np.array(getattr(leaf, side)[0, :, : leaf.offset])


# what a restore gave


@dataclass(frozen=True)
class Restored:
    """Copies of what a restored prompt cache holds, windows in the order of their tokens.

    `offsets` are each layer's position; `windows` how far a layer that forgets looks back.
    """

    held: int
    rows: dict[str, np.ndarray]
    states: dict[str, np.ndarray]
    offsets: dict[str, int]
    windows: dict[str, int]


def look(prompt_cache: PromptCache, held: int) -> Restored:
    """Copy what `prompt_cache` holds."""
    rows: dict[str, np.ndarray] = {}
    offsets: dict[str, int] = {}
    windows: dict[str, int] = {}
    for path, leaf in leaves(prompt_cache):
        if isinstance(leaf, ArraysCache) or leaf.keys is None:
            continue
        offsets[path] = leaf.offset
        if isinstance(leaf, RotatingKVCache):
            windows[path] = leaf.max_size
        elif isinstance(leaf, ChunkedKVCache):
            windows[path] = leaf.chunk_size
        for side in ("keys", "values"):
            rows[f"{path}.{side}"] = np.array(_in_order(leaf, getattr(leaf, side))[0])
    return Restored(held, rows, _states(prompt_cache), offsets, windows)


def _in_order(leaf: Any, array: mx.array) -> mx.array:
    if isinstance(leaf, RotatingKVCache):
        return leaf._temporal_order(array)[:, :, -min(leaf.offset, leaf.max_size) :]
    first = leaf.start_position if isinstance(leaf, ChunkedKVCache) else 0
    return array[:, :, : leaf.offset - first]


def check_restored(found: Restored, run: Run) -> None:
    """Every layer is at the same token, holds at least its window, and every byte is that of the run."""
    held = found.held
    if not held:
        assert not found.rows, "something was restored for no token"
        assert not found.states, "something was restored for no token"
        return
    assert set(found.offsets.values()) <= {held}, f"layers at {found.offsets}, the sequence at {held}"
    assert found.rows.keys() == run.rows.keys()
    for path, rows in found.rows.items():
        window = found.windows.get(path.rpartition(".")[0], held)
        assert rows.shape[1] >= min(window, held), f"{path} holds {rows.shape[1]} tokens of a window of {window}"
        expected = run.rows[path][:, held - rows.shape[1] : held]
        assert rows.tobytes() == expected.tobytes(), f"{path} differs at {held} tokens"
    expected_states = run.states[held] if found.states or any(run.states.values()) else {}
    assert found.states.keys() == expected_states.keys()
    for path, state in found.states.items():
        assert state.shape == expected_states[path].shape, path
        assert state.tobytes() == expected_states[path].tobytes(), f"state {path} differs at {held} tokens"


# a request through the block cache


@dataclass(frozen=True)
class Answer:
    """What a request through the block cache gave."""

    held: int
    reply: list[int]
    logprobs: list[np.ndarray]


def ask(module: nn.Module, cache: BlockCache, prompt: list[int], reply_tokens: int) -> Answer:
    """One request, greedy. The never-slower rule is made to forget: a tiny model computes as fast as it restores."""
    logprobs: list[mx.array] = []

    def greedy(step: mx.array) -> mx.array:
        logprobs.append(step[0])
        return mx.argmax(step, axis=-1)

    cache.prefill_rate.value = None
    run = generate(module, cache, prompt, max_tokens=reply_tokens, sampler=greedy, chunk_tokens=CHUNK_TOKENS)
    reply = list(run)
    assert run.event is not None
    held = run.event.hot_tokens + run.event.cold_tokens
    assert held + run.event.computed_tokens == len(prompt)
    return Answer(held, reply, [np.array(step) for step in logprobs])


@dataclass(frozen=True)
class Visit:
    """One case: what a restore gave, and what a request answered."""

    restored: Restored
    answer: Answer


def visit(module: nn.Module, cache: BlockCache, asked: Sequence[Case]) -> list[Visit]:
    """Every case on a cache that holds the first request. All are restored before one is asked, and so stored."""
    restored = []
    for case in asked:
        cache.prefill_rate.value = None
        prompt_cache, held = cache.restore(case.prompt)
        restored.append(look(prompt_cache, held))
    answers = [ask(module, cache, case.prompt, CONTINUED_TOKENS) for case in asked]
    cache.check_integrity()
    assert cache.store.pins() == 0
    return [Visit(*pair) for pair in zip(restored, answers, strict=True)]


def open_cache(module: nn.Module, directory: Path) -> BlockCache:
    return BlockCache.open(module, cache_dir=directory, hot="64MiB", cold="1GiB")


# a first request and all its cases, from every tier


@dataclass
class Scene:
    """A first request, and what each case gave from a tier: `hot`, `cold`, `new process`. `first` is its own answer."""

    name: str
    tokens: int
    run: Run
    first: Answer
    asked: list[Case]
    expected: list[Run]
    visits: dict[str, list[Visit]]
    directory: Path


def play(module: nn.Module, name: str, tokens: int, directory: Path) -> Scene:
    """A prompt of `tokens` tokens and its cases, hot and cold; a copy of the cold tier stays for a new process."""
    size = vocabulary(CONFIGS[name])
    prompt = some_tokens(tokens, tokens, size)
    run = run_plain(module, prompt, REPLY_TOKENS)
    asked = cases(prompt, run.reply, size)
    home = directory / f"{name}-{tokens}"
    with open_cache(module, home) as cache:
        first = ask(module, cache, prompt, REPLY_TOKENS)
        assert cache.store.flush()
        for copy in ("cold", "new"):
            shutil.copytree(home, home.with_name(f"{home.name}-{copy}"))
        visits = {"hot": visit(module, cache, asked)}
    with open_cache(module, home.with_name(f"{home.name}-cold")) as cache:
        visits["cold"] = visit(module, cache, asked)
    again = replace(run, reply=run.reply[:CONTINUED_TOKENS], logprobs=run.logprobs[:CONTINUED_TOKENS])
    expected = [again, *(run_plain(module, case.prompt, CONTINUED_TOKENS) for case in asked[1:])]
    return Scene(name, tokens, run, first, asked, expected, visits, home.with_name(f"{home.name}-new"))


def play_in_a_new_process(scenes: Sequence[Scene], directory: Path) -> None:
    """Add what a process of its own gives for each scene; one process for all of them."""
    directory.mkdir(parents=True, exist_ok=True)
    asked, given = directory / "asked", directory / "given"
    asked.write_bytes(pickle.dumps([(scene.name, scene.directory, scene.asked) for scene in scenes]))
    here = Path(__file__).parent
    subprocess.run(
        [sys.executable, "-c", "import kinds, sys; kinds.answer(*sys.argv[1:])", asked, given],
        env={**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "MLXKV_BLAS": "none"},
        check=True,
        timeout=600,
    )
    for scene, visits in zip(scenes, pickle.loads(given.read_bytes()), strict=True):
        scene.visits["new process"] = visits


def answer(asked: str, given: str) -> None:
    """What the new process does."""
    modules: dict[str, nn.Module] = {}
    found = []
    for name, directory, cases_of in pickle.loads(Path(asked).read_bytes()):
        if name not in modules:
            modules = {name: build(CONFIGS[name])}
        with open_cache(modules[name], directory) as cache:
            found.append(visit(modules[name], cache, cases_of))
    Path(given).write_bytes(pickle.dumps(found))


def check_scene(scene: Scene, tier: str) -> dict[str, float]:
    """Hold what a tier gave against the runs without mlxkv; returns the largest difference of each case.

    Raises:
        AssertionError: naming the case.
    """
    worst = {}
    for case, expected, seen in zip(scene.asked, scene.expected, scene.visits[tier], strict=True):
        try:
            check_restored(seen.restored, scene.run)
            worst[case.name] = check_answer(seen.answer, expected, exact=case.name == "resend")
        except AssertionError as error:
            raise AssertionError(f"{scene.name}, {scene.tokens} tokens, {case.name}, {tier}: {error}") from error
    return worst


def check_answer(answer: Answer, run: Run, *, exact: bool = False) -> float:
    """The same tokens, and log-probabilities within `EXACT`.

    Returns the largest difference, up to the first token that a tie decided.

    Args:
        exact: the steps were cut at the same places, so that nothing may differ.
    """
    worst = 0.0
    for mine, theirs, found, expected in zip(answer.logprobs, run.logprobs, answer.reply, run.reply, strict=True):
        worst = max(worst, float(np.abs(mine - theirs).max()))
        if found != expected:
            gap = float(theirs[expected] - theirs[found])
            assert gap < TIE, f"token {found} in place of {expected}, {gap:.2g} apart"
            break
    allowed = 0.0 if exact else EXACT
    assert worst <= allowed, f"log-probabilities differ by {worst:.2g}, more than {allowed:.2g}"
    return worst


# every architecture, in short


@dataclass(frozen=True)
class Short:
    """What the short scene of one architecture gave: tokens resumed by each request, and the largest difference."""

    caches: str
    checkpoint_bytes: int
    held: dict[str, int]
    worst: float


def play_short(name: str, directory: Path) -> Short:
    """A prompt of 150 twice, one of 300 that goes on from it, and two that leave that one at token 20 and 100.

    Everything is held against mlx-lm on empty caches, and the prompt of 150 once more by a second cache on the
    directory.

    Raises:
        AssertionError: something differs, or the second identical request reuses nothing.
    """
    module = build(CONFIGS[name])
    size = vocabulary(CONFIGS[name])
    whole = some_tokens(300, 7, size)
    first = Case("first", whole[:150])
    asked = [first, Case("resend", whole[:150]), Case("extend to 300", whole)]
    asked += [
        Case(f"branch at {at}", [*whole[:at], (whole[at] + 1) % size, *some_tokens(9, at, size)]) for at in (20, 100)
    ]
    asked.append(Case("cold resend", whole[:150]))
    run = run_plain(module, first.prompt, 2)
    held, worst = {}, 0.0
    for part in (asked[:-1], asked[-1:]):
        with open_cache(module, directory) as cache:
            assert cache.uncached is None, cache.uncached
            for case in part:
                if case.name in ("resend", "cold resend"):
                    prompt_cache, tokens = cache.restore(case.prompt)
                    check_restored(look(prompt_cache, tokens), run)
                same = case.prompt == first.prompt
                answer = ask(module, cache, case.prompt, 2 if same else 1)
                if same:
                    check_answer(answer, run, exact=True)
                elif name not in CUTS_MATTER:
                    worst = max(worst, check_answer(answer, run_plain(module, case.prompt, 1)))
                held[case.name] = answer.held
            cache.check_integrity()
            assert cache.store.pins() == 0
            layout = cache.layout
    assert held["first"] == 0
    assert min(held["resend"], held["cold resend"]) > 0, "the second identical request reused nothing"
    return Short(caches_of(module), layout.checkpoint_bytes, held, worst)


def caches_of(module: nn.Module) -> str:
    """What mlx-lm keeps for a model: `2 RotatingKVCache(32), 2 KVCache`."""
    found: dict[str, int] = {}
    for _, leaf in leaves(make_prompt_cache(module)):
        window = vars(leaf).get("max_size") or vars(leaf).get("chunk_size")
        kind = type(leaf).__name__ + (f"({window})" if window else "")
        found[kind] = found.get(kind, 0) + 1
    return ", ".join(f"{count} {kind}" for kind, count in found.items())
