"""`generate`: mlx-lm's own tokens, and every full block published as soon as it is there."""

import json
import math

import mlx.core as mx
import pytest
from driving import some_tokens
from mlx_lm.generate import generate_step
from tiny import ALL_TINY, build_tiny

from mlxkv.cache.names import pack
from mlxkv.cache.store import BlockStore
from mlxkv.core.config import CacheConfig
from mlxkv.core.errors import UsageError
from mlxkv.core.units import MIB
from mlxkv.engine.generate import generate
from mlxkv.prompt_cache import block_cache
from mlxkv.prompt_cache.block_cache import BlockCache

CHUNK_TOKENS = 128
BLOCK_BYTES = 64 * 4 * 2 * 2 * 16 * 4  # of the tiny llama: layers, sides, heads, dim, float32


def greedy(logprobs):
    return mx.argmax(logprobs, axis=-1)


def run(cache, prompt, max_tokens=1, **options):
    """A whole request; returns its tokens and its event."""
    options = {"sampler": greedy, "chunk_tokens": CHUNK_TOKENS, **options}
    generation = generate(cache.module, cache, prompt, max_tokens=max_tokens, **options)
    return list(generation), generation.close()


def reference(module, prompt, max_tokens):
    """What mlx-lm generates, cut where ours is."""
    steps = generate_step(
        mx.array(prompt), module, max_tokens=max_tokens, sampler=greedy, prefill_step_size=CHUNK_TOKENS
    )
    return [token for token, _ in steps]


@pytest.fixture
def open_cache(tmp_path, monkeypatch):
    """Opens caches of tiny models. Behind every test: nothing is pinned, and every invariant holds.

    Computing is never thought to be faster than restoring: a tiny model's rates say the opposite.
    """
    monkeypatch.setattr(block_cache, "MEASURED_TOKENS", math.inf)
    opened = []

    def opener(name="llama", *, hot_bytes=64 * MIB, cold_bytes=64 * MIB, log=None):
        module = build_tiny(ALL_TINY[name]())
        config = CacheConfig(
            directory=tmp_path / "blocks", hot_bytes=hot_bytes, cold_bytes=cold_bytes, floor_bytes=0, log=log
        )
        cache = BlockCache(module, {"model": name}, BlockStore(config), name=name)
        cache.module = module
        opened.append(cache)
        return cache

    yield opener
    for cache in opened:
        cache.check_integrity()
        assert cache.store.pins() == 0
        cache.close()


@pytest.fixture
def cache(open_cache):
    return open_cache()


def held_tokens(cache, prompt):
    """How many leading tokens of `prompt` a request would find now."""
    plan = cache.store.plan(cache.root(), pack(prompt))
    cache.store.release(plan)
    return plan.match.tokens


@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 128, 129, 200])
@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3"])
def test_greedy_tokens_are_mlx_lm_s_cold_and_resent(open_cache, name, tokens):
    cache, prompt = open_cache(name), some_tokens(tokens, seed=tokens)
    expected = reference(cache.module, prompt, 24)
    cold, hot = run(cache, prompt, 24), run(cache, prompt, 24)
    assert cold[0] == expected
    assert hot[0] == expected
    assert (cold[1].hot_tokens, cold[1].computed_tokens) == (0, tokens)
    assert (hot[1].hot_tokens, hot[1].computed_tokens) == (tokens - 1, 1)


def test_greedy_tokens_are_mlx_lm_s_after_a_restart(open_cache):
    first, prompt = open_cache(), some_tokens(200, seed=1)
    expected, _ = run(first, prompt, 24)
    first.close()
    found, event = run(open_cache(), prompt, 24)
    assert found == expected
    assert (event.hot_tokens, event.cold_tokens, event.computed_tokens) == (0, 192, 8)


@pytest.mark.parametrize(
    ("held", "cuts"),
    [
        (0, [0, 128, 256, 384, 399, 400]),
        (100, [100, 128, 256, 384, 399, 400]),
        (128, [128, 256, 384, 399, 400]),
        (390, [390, 399, 400]),
        (399, [399, 400]),
    ],
)
def test_chunks_are_cut_at_absolute_multiples_whatever_was_held(cache, held, cuts):
    prompt = some_tokens(400, seed=2)
    if held:
        run(cache, [*prompt[:held], 127])
    seen = []
    run(cache, prompt, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 400) for done in cuts]


def test_without_a_wish_chunks_are_those_of_the_device(cache):
    prompt, seen = some_tokens(1100, seed=3), []
    run(cache, prompt, chunk_tokens=None, on_progress=lambda done, _: seen.append(done))
    cuts = seen[1:-2]  # without where it starts, the last token's chunk, and the end
    assert cuts == list(range(cuts[0], 1099, cuts[0]))
    assert cuts[0] % 64 == 0


def test_full_blocks_are_published_during_the_prefill(cache):
    prompt, seen = some_tokens(400, seed=4), []
    run(cache, prompt, on_progress=lambda done, _: seen.append((done, held_tokens(cache, prompt))))
    assert seen[:-2] == [(0, 0), (128, 128), (256, 256), (384, 384)]


def test_a_request_given_up_during_the_prefill_leaves_its_work(cache):
    prompt = some_tokens(400, seed=5)

    def give_up(done, _total):
        if done == 256:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(cache, prompt, on_progress=give_up)
    assert cache.store.pins() == 0
    found, event = run(cache, prompt, 8)
    assert event.hot_tokens == 256
    assert found == reference(cache.module, prompt, 8)


def test_a_killed_process_leaves_its_work_too(open_cache):
    """Nothing of a request is called after its last chunk, as when the process dies there."""
    first, prompt = open_cache(hot_bytes=0), some_tokens(400, seed=6)

    def die(done, _total):
        if done == 384:
            first.store.flush()
            first.store.release(generation.sequence.plan)
            generation.sequence.finish = lambda: None
            raise KeyboardInterrupt

    generation = generate(
        first.module, first, prompt, max_tokens=1, sampler=greedy, chunk_tokens=CHUNK_TOKENS, on_progress=die
    )
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    _, event = run(open_cache(), prompt)
    assert event.cold_tokens == 384


@pytest.mark.parametrize("said", [1, 2, 40])
def test_leaving_the_loop_unpins_and_keeps_full_blocks_and_tail(cache, said):
    prompt = some_tokens(100, seed=7)
    generation = generate(cache.module, cache, prompt, max_tokens=60, sampler=greedy)
    tokens = []
    for token in generation:
        tokens.append(token)
        if len(tokens) == said:
            break
    assert generation.event is not None
    assert cache.store.pins() == 0
    assert held_tokens(cache, [*prompt, *tokens, 1, 2, 3]) in {100 + said - 1, 100 + said}
    assert tokens == reference(cache.module, prompt, said)


def test_closing_a_request_that_never_began_computes_nothing(cache):
    prompt = some_tokens(100, seed=8)
    run(cache, prompt)
    generation = generate(cache.module, cache, prompt, max_tokens=4, sampler=greedy)
    assert cache.store.pins() > 0
    event = generation.close()
    assert cache.store.pins() == 0
    assert (event.hot_tokens, event.ttft_s, event.output_tokens) == (99, None, 0)
    assert generation.close() is event


def test_a_stop_token_ends_the_reply_and_is_not_yielded(cache):
    prompt = some_tokens(50, seed=9)
    expected = reference(cache.module, prompt, 12)
    stop = next(token for i, token in enumerate(expected) if i > 3 and token not in expected[:i])
    found, event = run(cache, prompt, 12, stop_tokens=frozenset({stop}))
    assert found == expected[: expected.index(stop)]
    assert event.ttft_s > 0


def test_a_stop_token_at_once_is_an_empty_reply(cache):
    prompt = some_tokens(50, seed=10)
    found, event = run(cache, prompt, 12, stop_tokens=frozenset(reference(cache.module, prompt, 1)))
    assert found == []
    assert event.ttft_s > 0


def test_max_tokens_1_is_exactly_one(cache):
    prompt = some_tokens(70, seed=11)
    found, event = run(cache, prompt, 1)
    assert found == reference(cache.module, prompt, 1)
    assert event.output_tokens == 1


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_max_tokens_below_1_is_wrong_usage_and_nothing_is_held(cache, max_tokens):
    with pytest.raises(UsageError, match=f"max tokens is {max_tokens}; ask for at least 1"):
        generate(cache.module, cache, [1, 2, 3], max_tokens=max_tokens, sampler=greedy)
    assert len(cache.store.hot) == 0


def test_an_empty_prompt_is_wrong_usage(cache):
    with pytest.raises(UsageError, match="no tokens"):
        generate(cache.module, cache, [], max_tokens=1, sampler=greedy)


def test_decode_publishes_a_block_as_it_fills(cache):
    prompt = some_tokens(60, seed=12)
    generation = generate(cache.module, cache, prompt, max_tokens=140, sampler=greedy)
    blocks = []
    for count, _ in enumerate(generation, start=1):
        blocks.append(len(cache.store.hot))
        # All tokens but this one are in the prompt cache; one step more may be, whose token is not known yet.
        assert blocks[-1] in {(60 + count - 2) // 64, (60 + count - 1) // 64, (60 + count) // 64}
    assert blocks[-1] == 3


def test_a_seed_repeats_a_sampled_reply(cache):
    prompt = some_tokens(80, seed=13)
    replies = []
    for seed in (1, 1, 2):
        mx.random.seed(seed)
        replies.append(run(cache, prompt, 20, sampler=mx.random.categorical)[0])
    assert replies[0] == replies[1] != replies[2]


def test_another_salt_finds_nothing(cache):
    prompt = some_tokens(200, seed=14)
    run(cache, prompt, salt="one")
    _, event = run(cache, prompt, salt="two")
    assert (event.hot_tokens, event.reason) == (0, "other salt")


def test_the_request_s_line_is_in_the_log_however_it_ended(open_cache, tmp_path):
    cache = open_cache(log=tmp_path / "log.jsonl")
    prompt = some_tokens(200, seed=15)
    run(cache, prompt, 4)
    for _ in generate(cache.module, cache, prompt, max_tokens=4, sampler=greedy):
        break
    cache.close()
    lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    events = [line for line in lines if line["event"] == "request"]
    assert [(e["hot_tokens"], e["computed_tokens"], e["output_tokens"]) for e in events] == [(0, 200, 4), (199, 1, 1)]
    assert events[0]["request"] != events[1]["request"]
    assert all(0 < e["restore_s"] <= e["ttft_s"] for e in events)


def test_a_model_of_states_resumes_at_its_checkpoint(open_cache):
    cache, prompt = open_cache("mamba2"), some_tokens(100, seed=16)
    for held in (0, 64):
        found, event = run(cache, prompt, 8)
        assert found == reference(cache.module, prompt, 8)
        assert (event.hot_tokens, event.cold_tokens, event.computed_tokens) == (held, 0, 100 - held)


def test_a_hot_tier_of_two_blocks_serves_what_it_can(open_cache):
    cache, prompt = open_cache(hot_bytes=2 * BLOCK_BYTES), some_tokens(300, seed=17)
    expected = reference(cache.module, prompt, 8)
    assert run(cache, prompt, 8)[0] == expected
    found, event = run(cache, prompt, 8)
    assert found == expected
    assert event.hot_tokens == 128
    assert event.hot_tokens + event.cold_tokens == 256


def test_without_a_hot_tier_restored_blocks_are_not_cut_again(open_cache, monkeypatch):
    cache, prompt = open_cache(hot_bytes=0), some_tokens(300, seed=18)
    run(cache, prompt)
    cache.store.flush()
    cuts = []
    cut = cache._adapter.cut
    monkeypatch.setattr(cache._adapter, "cut", lambda held, spans: cuts.extend(spans) or cut(held, spans))
    _, event = run(cache, prompt)
    assert event.cold_tokens == 256
    assert cuts == [(256, 300)]  # the tail, which has no place to go
