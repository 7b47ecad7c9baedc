"""The cache itself: what it holds, in bytes, and what each operation leaves behind."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from attention_oracle import assert_is_attention
from driving import some_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from tiny import build_tiny, tiny_gpt_oss, tiny_llama

from mlxkv.attention.dispatch import Dispatch
from mlxkv.attention.shared_prefix import LONE_STEPS, SharedPrefixCache, begin, branch, cache_of, extend
from mlxkv.core.errors import UsageError

HEADS, DIM = 2, 16
TOKEN_BYTES = 2 * HEADS * DIM * 4  # of one layer


def pair(tokens, seed=0, batch=1):
    rng = np.random.default_rng(seed)
    return [mx.array(rng.standard_normal((batch, HEADS, tokens, DIM)).astype(np.float32)) for _ in range(2)]


def sequence(tokens, seed=0) -> SharedPrefixCache:
    """One layer of a batch of one sequence."""
    return begin([cache_of(*pair(tokens, seed))], hooked=True)[0]


def queries(batch, seed=9):
    return mx.array(np.random.default_rng(seed).standard_normal((batch, 4, 1, DIM)).astype(np.float32))


def grow(cache, steps, seed=0):
    for step in range(steps):
        cache.update_and_fetch(*pair(1, seed + step, len(cache._table.rows)))
        mx.eval(cache.state)


@pytest.fixture(scope="module")
def llama():
    return build_tiny(tiny_llama())


# bytes


def test_one_long_sequence_beside_seven_short_ones_stays_near_the_sum():
    cache = sequence(4000)
    for seed in range(7):
        cache.extend(sequence(100, seed + 1))
    own = [4000] + 7 * [100]
    for _ in range(4):
        assert [cache.tokens(row) for row in range(8)] == own
        assert sum(own) * TOKEN_BYTES <= cache.nbytes <= 1.15 * sum(own) * TOKEN_BYTES
        grow(cache, 40)
        own = [tokens + 40 for tokens in own]


@pytest.mark.parametrize("count", [1, 2, 8, 16])
@pytest.mark.parametrize(("prefix", "suffix"), [(1024, 1), (1000, 64), (4096, 200)])
def test_a_batch_holds_the_prefix_once(count, prefix, suffix):
    holder = sequence(prefix)
    cache = holder.branch(0)
    cache.update_and_fetch(*pair(suffix, 1))
    for seed in range(1, count):
        joining = holder.branch(0)
        joining.update_and_fetch(*pair(suffix, seed + 1))
        cache.extend(joining)
    grow(cache, LONE_STEPS + 2)  # a sequence by itself is plain by then
    assert cache.alone == (count == 1)
    suffix += LONE_STEPS + 2
    assert cache.nbytes <= (prefix + count * (suffix + 256)) * TOKEN_BYTES
    assert cache.nbytes >= (prefix + count * suffix) * TOKEN_BYTES
    assert cache.saved_bytes == (count - 1) * prefix * TOKEN_BYTES
    assert cache.nbytes == sum(array.nbytes for array in cache.state)


def test_the_arrays_of_a_prefix_are_the_same_for_all():
    holder = sequence(100)
    one, other = holder.branch(0), holder.branch(0)
    before = mx.get_active_memory()
    for cache in (one, other):
        cache.update_and_fetch(*pair(8))
        mx.eval(cache.state)
    one.extend(other)
    mx.eval(one.state)
    assert len(one._table.prefixes) == 1
    assert mx.get_active_memory() - before < 100 * TOKEN_BYTES * 3  # two blocks and the holder's spare, no prefix


def test_a_prefill_behind_a_prefix_leaves_only_its_own_tokens(llama):
    with Dispatch(llama) as hook:
        caches = make_prompt_cache(llama)
        llama(mx.array(some_tokens(1024, 1))[None], cache=caches)
        holder = hook.begin(caches)
        joining = branch(holder, 0)
        mx.eval([cache.state for cache in holder])
        before = mx.get_active_memory()
        mx.eval(llama(mx.array(some_tokens(64, 2))[None], cache=joining), [cache.state for cache in joining])
        gc.collect()
        held = mx.get_active_memory() - before
    layers = len(joining)
    assert sum(cache.nbytes for cache in joining) == layers * (1024 + 64) * TOKEN_BYTES
    assert held < layers * 256 * TOKEN_BYTES  # a copy of the prefix would be 1,024 tokens more


def test_leaving_gives_the_blocks_and_the_prefix_back():
    holder = sequence(512)
    cache = holder.branch(0)
    cache.update_and_fetch(*pair(100))
    cache.extend(sequence(300, 1))
    cache.extend(sequence(70, 2))
    cache.filter([1, 2])
    assert cache._prefixes == {}
    assert cache.nbytes == (5 + 2) * 64 * TOKEN_BYTES
    cache.check_integrity()


# what is held


def test_a_settled_row_is_plain_and_takes_others_in_again():
    first, second = pair(130, 1), pair(130, 2)
    prefix = pair(100)
    holder = begin([cache_of(*prefix)], hooked=True)[0]
    one, other = holder.branch(0), holder.branch(0)
    one.update_and_fetch(*first)
    other.update_and_fetch(*second)
    one.extend(other)
    one.filter([1])
    assert (one.alone, one.prefix_tokens(0)) == (False, 100)
    one.settle()
    assert one.alone
    assert one.offset == 230
    assert (one.prefix_tokens(0), one.saved_bytes) == (0, 0)
    expected = mx.concatenate([prefix[0], second[0]], axis=2)
    assert mx.array_equal(one.extract(0).keys, expected)
    third = holder.branch(0)
    third.update_and_fetch(*first)
    one.extend(third)
    one.check_integrity()
    assert (one.prefix_tokens(0), one.prefix_tokens(1)) == (100, 100)
    assert one.state[0] is holder.state[0]  # one copy again, also beside the holder's
    assert mx.array_equal(one.extract(0).keys, expected)
    assert mx.array_equal(one.extract(1).values, mx.concatenate([prefix[1], first[1]], axis=2))


def test_a_sequence_that_decodes_by_itself_becomes_plain_after_some_steps(llama):
    prompt, tokens = some_tokens(150, 4), some_tokens(LONE_STEPS + 4, 5)
    alone = make_prompt_cache(llama)
    llama(mx.array(prompt)[None], cache=alone)
    with Dispatch(llama) as hook:
        caches = make_prompt_cache(llama)
        llama(mx.array(prompt[:100])[None], cache=caches)
        batch = branch(hook.begin(caches), 0)
        llama(mx.array(prompt[100:])[None], cache=batch)
        plain = []
        for token in tokens:
            found = llama(mx.array([[token]]), cache=batch)
            expected = llama(mx.array([[token]]), cache=alone)
            assert np.abs(np.array(found - expected)).max() < 1e-4
            plain.append(batch[0].alone)
    assert plain == [False] * LONE_STEPS + [True] * 4
    assert {cache.alone for cache in batch} == {True}


def test_a_sequence_that_somebody_joins_keeps_its_prefix_for_some_steps():
    cache = sequence(300)
    grow(cache, LONE_STEPS + 5)
    assert cache.alone
    joining = cache.branch(0, 256)
    grow(cache, LONE_STEPS)
    assert (cache.alone, cache.prefix_tokens(0)) == (False, 256)
    grow(cache, 1)
    assert (cache.alone, cache.tokens(0)) == (True, 300 + 2 * LONE_STEPS + 6)
    cache.branch(0, 256)
    joining.update_and_fetch(*pair(3))
    cache.extend(joining)
    assert len(cache._table.prefixes) == 1  # it is the same prefix again
    cache.check_integrity()


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 64), (64, 128), (90, 110), (100, 164), (130, 230), (0, 230)])
def test_any_tokens_of_a_row_can_be_read(start, stop):
    prefix, own = pair(100), pair(130, 1)
    cache = begin([cache_of(*prefix)], hooked=True)[0].branch(0)
    cache.update_and_fetch(*own)
    cache.extend(sequence(10, 3))
    for found, ahead, behind in zip(cache.rows(0, start, stop), prefix, own, strict=True):
        assert mx.array_equal(found, mx.concatenate([ahead, behind], axis=2)[:, :, start:stop])
    with pytest.raises(UsageError, match="has 230 tokens"):
        cache.rows(0, 0, 231)


def test_an_extracted_row_is_mlx_lm_own_cache_and_goes_on(llama):
    prompt = some_tokens(150, 3)
    alone = make_prompt_cache(llama)
    expected = llama(mx.array(prompt)[None], cache=alone)[0, -1]
    with Dispatch(llama) as hook:
        caches = make_prompt_cache(llama)
        llama(mx.array(prompt[:100])[None], cache=caches)
        joining = branch(hook.begin(caches), 0)
        llama(mx.array(prompt[100:])[None], cache=joining)
        taken = [cache.extract(0) for cache in joining]
    assert {type(cache) for cache in taken} == {KVCache}
    for theirs, ours in zip(alone, taken, strict=True):
        assert np.abs(np.array(theirs.keys_and_values()[0] - ours.keys_and_values()[0])).max() < 1e-5
    assert expected.shape == (128,)
    after = [llama(mx.array([[5]]), cache=caches)[0, -1] for caches in (alone, taken)]
    assert np.abs(np.array(after[0] - after[1])).max() < 1e-4


def test_a_right_padded_prompt_keeps_only_real_tokens(llama):
    prefix, prompts = some_tokens(70, 1), [some_tokens(n, n) for n in (5, 33, 20)]
    for served in (True, False):
        with Dispatch(llama) as hook:
            caches = make_prompt_cache(llama)
            llama(mx.array(prefix)[None], cache=caches)
            holder = (hook.begin if served else begin)(caches)
            batch = branch(holder, 0)
            for _ in prompts[1:]:
                extend(batch, branch(holder, 0))
            lengths = [len(prompt) for prompt in prompts]
            padding = [max(lengths) - n for n in lengths]
            for cache in batch:
                cache.prepare(lengths=lengths, right_padding=padding)
            padded = mx.array([prompt + [0] * more for prompt, more in zip(prompts, padding, strict=True)])
            first = llama(padded[:, :16], cache=batch)
            second = llama(padded[:, 16:], cache=batch)
            for cache in batch:
                cache.finalize()
                cache.check_integrity()
            logits = mx.concatenate([first, second], axis=1)
            then = llama(mx.array([[1]] * 3), cache=batch)
        assert [batch[0].tokens(row) for row in range(3)] == [76, 104, 91]
        for row, prompt in enumerate(prompts):
            alone = make_prompt_cache(llama)
            expected = llama(mx.array(prefix + prompt)[None], cache=alone)[0, -1]
            assert np.abs(np.array(logits[row, len(prompt) - 1] - expected)).max() < 1e-4
            assert np.abs(np.array(then[row, 0] - llama(mx.array([[1]]), cache=alone)[0, 0])).max() < 1e-4


def test_rows_with_and_without_a_prefix_go_in_any_order():
    holder = sequence(100)
    cache = sequence(30, 1)
    for seed in (2, 3):
        joining = holder.branch(0)
        joining.update_and_fetch(*pair(5 * seed, seed))
        cache.extend(joining)
    cache.extend(sequence(90, 4))
    cache.filter([1, 0, 3, 2])
    new = pair(1, 5, batch=4)
    cache.update_and_fetch(*new)
    q = queries(4)
    found = cache.attend(q, scale=0.25)
    for row in range(4):
        k, v = cache.rows(row, 0, cache.tokens(row))
        assert mx.array_equal(k[:, :, -1], new[0][row : row + 1, :, -1])
        expected = mx.fast.scaled_dot_product_attention(q[row : row + 1], k, v, scale=0.25)
        assert np.abs(np.array(found[row : row + 1] - expected)).max() < 2e-6


def test_several_batches_merge_to_one():
    cache = SharedPrefixCache.merge([sequence(n, n) for n in (10, 70, 3)])
    assert [cache.tokens(row) for row in range(3)] == [10, 70, 3]
    assert mx.array_equal(cache.extract(1).keys, pair(70, 70)[0])
    assert (cache.size(), cache.empty(), cache.is_trimmable()) == (70, False, False)


def test_a_prefix_may_come_as_blocks():
    keys, values = pair(192)
    blocks = [[side[:, :, at : at + 64] for at in (0, 64, 128)] for side in (keys, values)]
    assert mx.array_equal(cache_of(*blocks).keys, keys)
    assert cache_of(*blocks).offset == 192


def test_a_running_row_gives_full_blocks_as_a_prefix():
    cache = sequence(200)
    cache.extend(sequence(50, 1))
    joining = cache.branch(0, 128)
    assert (cache.prefix_tokens(0), joining.tokens(0)) == (128, 128)
    assert mx.array_equal(joining.extract(0).keys, pair(200)[0][:, :, :128])
    assert mx.array_equal(cache.extract(0).keys, pair(200)[0])
    assert mx.array_equal(cache.extract(1).keys, pair(50, 1)[0])
    cache.check_integrity()


# what cannot be


def test_what_cannot_be_shared_is_said():
    with pytest.raises(UsageError, match="QuantizedKVCache"):
        begin([KVCache(), QuantizedKVCache()])
    for nothing_to_share in ([], [RotatingKVCache(8)]):
        with pytest.raises(UsageError, match="no KVCache"):
            begin(nothing_to_share)
    with pytest.raises(UsageError, match="101 tokens of a row of 100"):
        sequence(100).branch(0, 101)
    holder = sequence(100)
    holder.branch(0, 64)
    with pytest.raises(UsageError, match="shares its first 64 tokens already"):
        holder.branch(0, 80)
    holder.extend(sequence(5, 1))
    with pytest.raises(UsageError, match="cannot be alone"):
        holder.settle()
    with pytest.raises(UsageError, match="needs the lengths"):
        holder.prepare(right_padding=[0, 3])
    with pytest.raises(UsageError, match="nothing was appended"):
        holder.attend(queries(2), scale=1.0)


def test_windows_cannot_go_back():
    module = build_tiny(tiny_gpt_oss())
    caches = make_prompt_cache(module)
    module(mx.array(some_tokens(100, 1))[None], cache=caches)
    holder = begin(caches)
    with pytest.raises(UsageError, match="cannot go back to token 64 of 100"):
        branch(holder, 0, 64)
    batch = branch(holder, 0)
    extend(batch, branch(holder, 0, 100))
    with pytest.raises(UsageError, match="window or a state"):
        branch(batch, 0)


# together with mlx-lm


def test_mlx_lm_own_batch_generator_runs_on_it(llama):
    prefix, owns = some_tokens(90, 1), [some_tokens(n, n) for n in (5, 40, 17, 3)]

    def said(generator, count, caches, prompts):
        uids = generator.insert(prompts, max_tokens=[4 + 3 * i for i in range(count)], caches=caches)
        texts, left = {uid: [] for uid in uids}, count
        while left:
            for response in generator.next()[1]:
                texts[response.uid].append(response.token)
                left -= response.finish_reason is not None
        return list(texts.values())

    plain = BatchGenerator(llama, prefill_batch_size=2, prefill_step_size=8)
    expected = said(plain, 4, None, [prefix + own for own in owns])
    with Dispatch(llama) as hook:
        caches = make_prompt_cache(llama)
        llama(mx.array(prefix)[None], cache=caches)
        holder = hook.begin(caches)
        generator = BatchGenerator(llama, prefill_batch_size=2, prefill_step_size=8)
        found = said(generator, 4, [branch(holder, 0) for _ in owns], owns)
    assert found == expected


@given(
    prefixes=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), min_size=2, max_size=9),
    ratio=st.sampled_from([1, 3, 8]),
    dim=st.sampled_from([16, 64, 80, 128, 256]),
    dtype=st.sampled_from([mx.float32, mx.float32, mx.float16, mx.bfloat16]),
    length=st.sampled_from([1, 1, 1, 7]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_a_step_is_attention_of_each_row_over_its_own_tokens(prefixes, rows, ratio, dim, dtype, length, seed):
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

    holders = [begin([cache_of(drawn(1, 2, n, dim), drawn(1, 2, n, dim))], hooked=True)[0] for n in prefixes]
    made = []
    for group, own in rows:
        empty = begin([KVCache()], hooked=True)[0]
        row = holders[group].branch(0) if group < len(holders) else empty
        if own:
            row.update_and_fetch(drawn(1, 2, own, dim), drawn(1, 2, own, dim))
        made.append(row)
    cache = SharedPrefixCache.merge(made)
    cache.update_and_fetch(drawn(len(rows), 2, length, dim), drawn(len(rows), 2, length, dim))
    cache.check_integrity()
    q = drawn(len(rows), 2 * ratio, length, dim)
    found = cache.attend(q, scale=dim**-0.5)
    for i in range(len(rows)):
        k, v = cache.rows(i, 0, cache.tokens(i))
        mask = mx.array(np.tril(np.ones((length, k.shape[2]), bool), k.shape[2] - length))
        spread = 1.0 if dtype == mx.float32 else 4.0
        assert_is_attention(found[i : i + 1], q[i : i + 1], k, v, mask, spread=spread)
