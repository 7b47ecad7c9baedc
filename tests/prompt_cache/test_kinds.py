"""Every kind of cache, from every tier, against mlx-lm without mlxkv: what is restored, and what comes of it.

A scene is a prompt, 40 tokens of reply, and what follows it: the same again, the conversation longer by 5 and by 70,
branches off it at token 40 and 100. Here every architecture plays one of its prompt lengths, each length played by
some; `--all-kinds` plays all.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from kinds import CONFIGS, REPLY_TOKENS, Scene, build, check_answer, check_scene, lengths, play, play_in_a_new_process
from mlx_lm.models.cache import ArraysCache, RotatingKVCache
from tiny import build_tiny, tiny_gemma3

from mlxkv.cache.checkpoint import cadence_tokens
from mlxkv.prompt_cache.adapter import Adapter, UncachedModelError

ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gemma3n", "gemma4_text", "gemma2", "gpt_oss", "deepseek_v2",
    "deepseek_v3", "qwen3_next", "qwen3_5", "lfm2", "falcon_h1", "granitemoehybrid", "nemotron_h", "mamba2", "minimax",
    "glm4_moe", "olmo3", "cohere2", "phi3", "smollm3", "exaone4", "llama4", "recurrent_gemma", "baichuan_m1",
)  # fmt: skip


@pytest.fixture(scope="module", params=ARCHITECTURES)
def scenes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Scene]:
    """An architecture's scenes, played hot, cold and in a process of their own."""
    module = build(CONFIGS[request.param])
    every = lengths(module)
    turn = ARCHITECTURES.index(request.param) % 4
    chosen = every if request.config.getoption("--all-kinds") else [every[turn]]
    directory: Path = tmp_path_factory.mktemp(request.param)
    played = [play(module, request.param, tokens, directory) for tokens in chosen]
    play_in_a_new_process(played, directory / "process")
    return played


def test_the_first_request_gives_what_mlx_lm_gives_to_the_bit(scenes: list[Scene]) -> None:
    for scene in scenes:
        assert scene.first.held == 0
        check_answer(scene.first, scene.run, exact=True)


@pytest.mark.parametrize("tier", ["hot", "cold", "new process"])
def test_every_layer_is_restored_to_the_bit_and_goes_on_as_mlx_lm_would(scenes: list[Scene], tier: str) -> None:
    for scene in scenes:
        check_scene(scene, tier)


@pytest.mark.parametrize("tier", ["hot", "cold", "new process"])
def test_each_case_resumes_as_deep_as_its_kind_can(scenes: list[Scene], tier: str) -> None:
    for scene in scenes:
        held = [visit.restored.held for visit in scene.visits[tier]]
        assert held == [deepest(scene, case.name, len(case.prompt), tier) for case in scene.asked], scene.tokens


def deepest(scene: Scene, case: str, prompt_tokens: int, tier: str) -> int:
    """Where a second prompt can resume, from what the first request left; one token is always computed.

    The last token of a reply is never fed to the model. By token, everything shared is used hot, and full blocks cold.
    A state is only where a checkpoint was taken: at the last block boundary before the prompt's last token, at the last
    one that the reply reached, and at the cadence.
    """
    told = scene.tokens + REPLY_TOKENS - 1
    shared = {"resend": scene.tokens, "extend": told, "branch": int(case.rpartition(" ")[2]) if " " in case else 0}
    limit = min(shared[case.partition(" ")[0]], prompt_tokens - 1)
    layout = Adapter(build(CONFIGS[scene.name])).layout
    if not layout.states:
        return min(limit, told if tier == "hot" else told // 64 * 64)
    cadence, last = cadence_tokens(layout), (scene.tokens - 1) // 64 * 64
    taken = {last, *range(cadence, last, cadence)} | ({told // 64 * 64} if told // 64 * 64 > last else set())
    return max((at for at in taken if at <= limit), default=0)


# caches that nothing here covers


class Remembering(nn.Module):
    """A model whose state grows with every token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]

    def make_cache(self) -> list[ArraysCache]:
        return [ArraysCache(1)]

    def __call__(self, tokens: mx.array, cache: list[ArraysCache]) -> mx.array:
        new = tokens[..., None].astype(mx.float32)
        cache[0][0] = new if cache[0][0] is None else mx.concatenate([cache[0][0], new], axis=1)
        return mx.broadcast_to(cache[0][0].sum(), (*tokens.shape, 8))


def test_a_state_that_grows_is_named_and_never_checkpointed() -> None:
    with pytest.raises(UncachedModelError, match=r"ArraysCache with arrays that grow.*runs uncached"):
        Adapter(Remembering())


def test_a_window_that_always_keeps_its_first_tokens_is_named() -> None:
    module = build_tiny(tiny_gemma3())
    module.make_cache = lambda: [RotatingKVCache(max_size=32, keep=4) for _ in module.layers]
    with pytest.raises(UncachedModelError, match=r"RotatingKVCache with keep.*runs uncached"):
        Adapter(module)
