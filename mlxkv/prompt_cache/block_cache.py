"""`BlockCache`: the one door between a model and the block store.

`start` restores what is held for a prompt, all but one token at most; the caller runs the model over the rest with
`sequence.prompt_cache`; `sequence.commit()` publishes full blocks as often as one likes; `sequence.finish()` keeps
the tail, lets go of the pins and writes the request line. After an error `sequence.fail()` does so instead: what a
device failed to compute looks like anything else, so nothing more is published and the last blocks are taken back.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn

from mlxkv.cache.block_log import RequestEvent
from mlxkv.cache.checkpoint import positions
from mlxkv.cache.codec import BlockIdentity, checkpoint_identity
from mlxkv.cache.layout import Layout
from mlxkv.cache.names import (
    BLOCK_TOKENS,
    TOKEN_BYTES,
    BlockName,
    block_name,
    pack,
    root_name,
)
from mlxkv.cache.prefix import Part
from mlxkv.cache.store import BlockStore, Plan, Rate, Reading
from mlxkv.core.config import COLD_BYTES, CacheConfig, default_hot_bytes
from mlxkv.core.errors import ModelError, UsageError
from mlxkv.core.platform import default_cache_dir
from mlxkv.core.units import format_bytes, format_seconds, parse_bytes
from mlxkv.models.computing import computing
from mlxkv.models.fingerprint import module_fields
from mlxkv.prompt_cache.adapter import (
    Adapter,
    Payload,
    PromptCache,
    Source,
    Target,
    UncachedModelError,
    held_bytes,
    leaves,
    plain_prompt_cache,
)

WELL_UNDER = 0.8  # a restore must take at most this share of the time computing takes
START_S = 0.0005  # what a restore costs before the first byte
SLACK_S, UNKNOWN_DEADLINE_S = 0.1, 60.0
MEASURED_TOKENS = 32  # shorter prefills say little about the rate

logger = logging.getLogger("mlxkv")


class Restored(NamedTuple):
    """A prompt cache for mlx-lm, and how many leading tokens of the prompt it holds (at most all but one)."""

    prompt_cache: PromptCache
    tokens: int


class BlockCache:
    """One model's cache. Owner: the thread that owns MLX.

    `uncached` says why a model's cache cannot be cut into blocks; then nothing is held and everything is computed.
    """

    def __init__(
        self, module: nn.Module, fields: Mapping[str, str], store: BlockStore, *, name: str, kv_bits: int | None = None
    ) -> None:
        """Bind a model to a store that others may use too.

        Args:
            fields: what makes this model's KV cache unlike another's, of `fingerprint`; the layout is added here.
            name: the model's name in the log.
        """
        self.store = store
        self.name = name
        self.uncached: str | None = None
        self.prefill_rate = Rate()
        self._module = module
        self._roots: dict[str, BlockName] = {}
        self._failed: WeakSet[Any] = WeakSet()  # caches of a prompt cache that could not be evaluated
        self._adapter: Adapter | None = None
        try:
            self._adapter = Adapter(module, kv_bits=kv_bits)
        except UncachedModelError as error:
            self.uncached = str(error)
        self.fields = {**fields, "kv_bits": str(kv_bits or "none"), "layout": self.layout.to_json()}

    @classmethod
    def open(
        cls,
        model: nn.Module,
        *,
        tokenizer: object = None,
        cache_dir: str | Path | None = None,
        hot: str | int | None = None,
        cold: str | int = COLD_BYTES,
        kv_bits: int | None = None,
        log: str | Path | None = None,
        fields: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> Self:
        """Open a cache for a model that mlx-lm loaded, with a store of its own.

        Args:
            tokenizer: part of the root when given: equal ids then mean equal text.
            cache_dir: root of the cold tier; the platform's cache folder when absent.
            hot, cold: budgets, `2GiB` or bytes; 0 switches a tier off.
            fields: the root's fields when they are known (`mlxkv.load` gives them); else the weights in memory are
                digested, about 0.1 s a GiB.

        Raises:
            CacheRootError: the directory is not safe to use.
            UsageError: a size or `kv_bits` that cannot be.
        """
        directory = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        config = CacheConfig(
            directory=directory,
            hot_bytes=default_hot_bytes() if hot is None else _bytes(hot),
            cold_bytes=_bytes(cold),
            log=Path(log) if log is not None else None,
        )
        found = dict(fields) if fields is not None else module_fields(model, tokenizer)
        return cls(
            model, found, BlockStore(config), name=name or type(model).__module__.rpartition(".")[2], kv_bits=kv_bits
        )

    @property
    def layout(self) -> Layout:
        """The arrays of a block; empty for a model that runs uncached."""
        return self._adapter.layout if self._adapter else Layout(())

    def root(self, salt: str = "") -> BlockName:
        """The root of this model's chains; another salt is another root."""
        if salt not in self._roots:
            fields = {**self.fields, "salt": root_name({"salt": salt}).hex() if salt else ""}
            self._roots[salt] = root_name(fields)
            self.store.register(self._roots[salt], self.layout, fields, model=self.name)
        return self._roots[salt]

    def start(
        self,
        tokens: Sequence[int],
        *,
        salt: str = "",
        marks: Sequence[int] = (),
        keep: bool = True,
        wait: bool = True,
        request: str | None = None,
    ) -> CachedSequence:
        """Match and restore the longest held prefix of `tokens`.

        Args:
            keep: False publishes nothing of this sequence.
            request: its id in the log; one is made up when absent.
            wait: False returns while files are still being read; call `CachedSequence.poll` until it is True.
            marks: lengths of prefixes that other prompts may share, such as the system prompt: a model with states is
                checkpointed there.

        Raises:
            UsageError: `tokens` is empty or holds something that is not a token id.
        """
        if not len(tokens):
            raise UsageError("the prompt has no tokens; give at least one.")
        sequence = CachedSequence(self, pack(tokens), self.root(salt), marks, keep=keep, request=request)
        try:
            while not sequence.poll(wait=wait) and wait:
                pass
        except BaseException:
            sequence.fail()
            raise
        return sequence

    def restore(self, tokens: Sequence[int], *, salt: str = "") -> Restored:
        """A prompt cache for `mlx_lm.stream_generate` with the longest held prefix of `tokens`.

        Raises:
            UsageError: as `start`.
            DeviceError: the GPU failed; says how, and what to change.
        """
        with computing():
            sequence = self.start(tokens, salt=salt)
        self.store.release(sequence.plan)
        return Restored(sequence.prompt_cache, sequence.held)

    def commit(self, tokens: Sequence[int], prompt_cache: PromptCache, *, salt: str = "") -> int:
        """Publish every full block and the tail of a prompt cache that was run over `tokens`.

        `tokens` may be longer than what the cache holds (the last sampled token is not in it), or shorter.
        Returns the tokens that are held now, of both. A window layer can be cut in full only in the prompt cache that
        `restore` gave, which notes what the window forgets; states are kept when they end with a block.

        Nothing is published while an exception is being handled, such as in a `finally` that it runs through, nor
        of a prompt cache whose evaluation failed once: what was being computed then cannot be told from the rest. An
        interrupt is no such exception.

        Raises:
            DeviceError: the GPU failed, now or before; says how, and what to change. Nothing was published.
        """
        if self._adapter is None or not len(tokens):
            return 0
        if isinstance(failure := sys.exception(), Exception):
            logger.warning("nothing of a prompt cache was published: %r was being handled", failure)
            return 0
        parts = [leaf for _, leaf in leaves(prompt_cache)]
        if any(leaf in self._failed for leaf in parts):
            return 0
        source = self._adapter.source(prompt_cache)
        held = source.tokens()
        if held is None:
            return 0
        committer = _Committer(self, self._adapter, self.root(salt), pack(tokens), uuid.uuid4().hex[:12])

        def failed() -> None:
            self._failed.update(parts)
            committer.withdraw()

        with computing(failed=failed):
            committed = committer.commit(source, held, tail=True)
            if self.layout.states and held % BLOCK_TOKENS == 0:
                committer.checkpoint(held, self._adapter.state(source))
        return committed

    @property
    def keeps_blocks(self) -> bool:
        """Whether blocks that one request publishes can be there for another."""
        return self._adapter is not None and (self.store.hot.budget_bytes > 0 or self.store.cold is not None)

    def new_prompt_cache(self) -> PromptCache:
        """An empty prompt cache, as a sequence would begin with."""
        return self._adapter.new_prompt_cache() if self._adapter else plain_prompt_cache(self._module)

    def pin(self, tokens: Sequence[int], *, salt: str = "") -> Callable[[], None]:
        """Keep what is held of `tokens` from being evicted, until the function that is returned is called."""
        plan = self.store.plan(self.root(salt), pack(tokens))
        return lambda: self.store.release(plan)

    def check_integrity(self) -> None:
        """Raise AssertionError when the store breaks an invariant."""
        self.store.check_integrity()

    def close(self) -> int:
        """Write what waits and stop; returns how many hot blocks the SSD lacks. A second call does nothing."""
        return self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # restoring, for CachedSequence

    def _worth(self, plan: Plan) -> None:
        """Shorten a plan to what restores well faster than it computes: the never-slower rule."""
        parts = plan.match.parts
        hot = next((i for i, part in enumerate(parts) if self.store.payload(part) is None), len(parts))
        for count in (len(parts),) if self.layout.states else (len(parts), hot):
            chosen = parts[:count]
            compute_s = self.prefill_rate.seconds(sum(part.tokens for part in chosen))
            restore_s = self._restore_seconds(chosen, plan.checkpoint)
            if compute_s is None or restore_s is None or restore_s <= WELL_UNDER * compute_s:
                if count < len(parts):
                    self.store.shorten(plan, count, "slower than computing")
                return
        self.store.shorten(plan, 0, "slower than computing")

    def _restore_seconds(self, parts: Sequence[Part], checkpoint: Part | None) -> float | None:
        """Predicted seconds, None when a rate was never measured. Of a window layer only its last window counts."""
        if not parts:
            return 0.0
        total = START_S
        copied = read = 0
        tokens = sum(part.tokens for part in parts)
        for part in parts:
            first = part.index * BLOCK_TOKENS
            if self.store.payload(part) is not None:
                copied += self.layout.rows_bytes(first, first + part.tokens, tokens)
            else:
                read += self.layout.rows_bytes(first, first + BLOCK_TOKENS, tokens)
        if checkpoint is not None and self.store.payload(checkpoint) is None:
            read += self.layout.checkpoint_bytes
        for nbytes, rate in ((copied, self.store.hot_rate), (read, self.store.cold_rate)):
            seconds = rate.seconds(nbytes) if nbytes else 0.0
            if seconds is None:
                return None
            total += seconds
        return total

    def _fill(
        self, root: BlockName, plan: Plan, target: Target, request: str
    ) -> Generator[Reading, None, tuple[Target, int]]:
        """Bring the parts of a plan into a target, memory first; returns it or a copy, and how many parts are good."""
        parts = plan.match.parts
        cold: list[int] = []
        started = time.perf_counter()
        copied = 0
        for i, part in enumerate(parts):  # a block on its way to the SSD is in memory and may follow one that is not
            payload = self.store.payload(part)
            if payload is None:
                cold.append(i)
            else:
                copied += target.put(part.index, payload, part.tokens)
        if copied:
            self.store.hot_rate.add(copied, time.perf_counter() - started)
        good = len(parts)
        if cold:
            waiting = [parts[i] for i in cold]
            deadline_s = self._deadline(sum(part.tokens for part in waiting))
            reading = self.store.read(root, waiting, self.layout, target.views, deadline_s, request=request)
            yield reading
            read = reading.finish()
            good = cold[read.parts] if read.parts < len(cold) else len(parts)
            if read.overran:
                target = target.copy_of(sum(part.tokens for part in parts[:good]))
        return target, good

    def _state(self, root: BlockName, plan: Plan, request: str) -> Generator[Reading, None, Payload | None]:
        """The arrays of a plan's checkpoint, none when it needs none; None when it cannot be read."""
        if plan.checkpoint is None:
            return ()
        held = self.store.payload(plan.checkpoint)
        if held is not None:
            # Copies of the handles: a model may put a new array into the one it was given, never into a block's.
            return tuple(mx.array(array) for array in held)
        arrays = tuple(mx.zeros(spec.shape, getattr(mx, spec.dtype)) for spec in self.layout.states)
        mx.eval(arrays)
        views = [memoryview(array).cast("B") for array in arrays]
        everything = list(range(len(views)))
        deadline_s = self._deadline(plan.match.tokens)
        reading = self.store.read(root, [plan.checkpoint], self.layout, lambda _: (views, everything), deadline_s,
                                  request=request)  # fmt: skip
        yield reading
        return arrays if reading.finish().parts else None

    def _deadline(self, tokens: int) -> float:
        """After how long reading `tokens` tokens is given up: when computing them would have been done."""
        compute_s = self.prefill_rate.seconds(tokens)
        return UNKNOWN_DEADLINE_S if compute_s is None else compute_s + SLACK_S


class CachedSequence:
    """One request: what was restored for it, and what it commits. Owner: the thread that owns MLX.

    `source` is where its blocks are cut out of: its own prompt cache, or its row once it joined a batch. When it
    finishes, `describe` makes the outline in its record from the reply's tokens; `text` goes there as it is.
    """

    def __init__(
        self,
        cache: BlockCache,
        packed: bytes,
        root: BlockName,
        marks: Sequence[int],
        *,
        keep: bool,
        request: str | None,
    ) -> None:
        self._started = time.perf_counter()
        self.id = request or uuid.uuid4().hex[:12]
        self.plan = cache.store.plan(root, packed)
        self.prompt_tokens = len(packed) // TOKEN_BYTES
        self.first_token_s: float | None = None
        self.describe: Callable[[Sequence[int]], Mapping[str, object]] | None = None
        self.text: str | None = None
        self._cache = cache
        self._root = root
        self._event: RequestEvent | None = None
        self._reply: list[int] = []
        self._adapter = cache._adapter
        self.held = 0
        self.prompt_cache: PromptCache = []
        self.source: Source
        self._target: Target | None = None
        self.restore_s = 0.0
        self._position = 0
        self._told = False  # by `advance`; else `commit` says that what the cache holds was computed
        self._checkpoints = positions(cache.layout, self.prompt_tokens, marks)
        self._latest: tuple[int, Payload] | None = None
        self._committer = _Committer(cache, self._adapter, root, packed, self.id) if self._adapter and keep else None
        self._restoring: Generator[Reading, None, None] | None = None
        self._reading: Reading | None = None
        if self._adapter is None:
            self.prompt_cache = plain_prompt_cache(cache._module)
            self.plan.reason = cache.uncached
        else:
            self._restoring = self._restore(cache, self._adapter)

    @property
    def held_bytes(self) -> int:
        """Bytes of the arrays it holds, those that are being restored included."""
        return held_bytes(self.prompt_cache) if self._target is None else self._target.nbytes

    def poll(self, *, wait: bool = False) -> bool:
        """Go on restoring; True once `prompt_cache` is there. Without `wait` it returns when it would have to wait."""
        while self._restoring is not None:
            if self._reading is not None and not wait and not self._reading.ready():
                return False
            self._reading = next(self._restoring, None)
            if self._reading is None:
                self._restoring = None
                self.restore_s = time.perf_counter() - self._started
        return True

    def _restore(self, cache: BlockCache, adapter: Adapter) -> Generator[Reading, None, None]:
        store, plan = cache.store, self.plan
        cache._worth(plan)
        target: Target | None = None
        state: Payload = ()
        while plan.match.parts:
            parts = plan.match.parts
            found = yield from cache._state(self._root, plan, self.id)
            if found is None:  # one block less, so that this checkpoint is not chosen again
                assert plan.checkpoint is not None
                store.shorten(plan, len(parts) - 1, store.why_gone(plan.checkpoint.name) or "slower than computing")
                continue
            state = found
            capacity = max(self.prompt_tokens, len(parts) * BLOCK_TOKENS) + 1
            self._target = adapter.target(capacity, plan.match.tokens)
            target, good = yield from cache._fill(self._root, plan, self._target, self.id)
            if good == len(parts):
                break
            store.shorten(plan, good, store.why_gone(parts[good].name) or "slower than computing")
            if not (cache.layout.states or cache.layout.windows):
                break  # what arrived is whole; with a window or a state it would be another target
        self.held = plan.match.tokens
        if target is not None and self.held:
            self.prompt_cache = adapter.build(target, self.held, state)
        else:
            self.prompt_cache = adapter.new_prompt_cache()
        self._target = None
        self.source = adapter.source(self.prompt_cache)
        self._position = self.held
        store.used([*plan.match.parts, *([plan.checkpoint] if plan.checkpoint else [])])
        store.unpin_tail(plan)

    @property
    def position(self) -> int:
        """Tokens that the model has seen."""
        return self._position

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.held

    @property
    def restored_bytes(self) -> int:
        return self._cache.layout.restored_bytes(self.held)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Tell how long computing `tokens` prompt tokens took; the never-slower rule lives on it."""
        if tokens >= MEASURED_TOKENS:
            self._cache.prefill_rate.add(tokens, seconds)

    def first_token(self) -> None:
        """Tell that the first token is there."""
        self.first_token_s = time.perf_counter() - self._started

    def next_stop(self, at: int) -> int:
        """Where a prefill chunk that begins at `at` has to end at the latest, for a checkpoint to be taken there."""
        return next((position for position in self._checkpoints if position > at), self.prompt_tokens)

    def advance(self, tokens: int) -> None:
        """Tell that the model was run over `tokens` more tokens with the prompt cache (evaluated or not)."""
        self._told = True
        self._position += tokens
        decoding = self._position >= self.prompt_tokens
        if self._adapter is not None and self._cache.layout.states and decoding and not self._position % BLOCK_TOKENS:
            self._latest = (self._position, self._adapter.state(self.source))

    def extend(self, token: int) -> None:
        """One more token of the sequence: sampled, and fed to the model next."""
        self._reply.append(token)
        if self._committer is not None:
            self._committer.extend(token)

    def commit(self) -> None:
        """Publish the full blocks of what was computed by now, which is what `advance` told, else all that the prompt
        cache holds. Cheap when there is no new one.
        """
        if self._committer is not None and self._adapter is not None:
            if not self._told:
                self._position = self.source.tokens() or self._position
            self._committer.fresh.clear()
            self._committer.commit(self.source, self._position, tail=False)
            if self._position in self._checkpoints:
                self._committer.checkpoint(self._position, self._adapter.state(self.source))

    def finish(self) -> RequestEvent:
        """Commit what is full, keep the tail, unpin, log the request. A second call returns the same event.

        What the model was run over since the last `advance` or `commit` is not published.
        """
        if self._event is None:
            try:
                # An interrupt inside a forward pass leaves the layers at different tokens. Then there is nothing to
                # add: full blocks went out as they were computed.
                with suppress(ModelError):
                    self._commit_last()
            except BaseException:
                self.fail()
                raise
            self._end()
        assert self._event is not None
        return self._event

    def fail(self) -> RequestEvent:
        """End after an error: publish nothing more, take back what was published last, unpin, log the request.

        A device may tell of an error late, and by then what it failed to compute looks like anything else. What the
        sequence held is let go: its prompt cache is an empty one.
        """
        if self._event is None:
            if self._committer is not None:
                self._committer.withdraw()
            if self._restoring is not None:  # nothing came of the plan
                self._restoring = None
                self._cache.store.shorten(self.plan, 0, "unreadable")
            self.prompt_cache, self._latest = self._cache.new_prompt_cache(), None
            if self._adapter is not None:
                self.source = self._adapter.source(self.prompt_cache)
            self._end()
        assert self._event is not None
        return self._event

    def _end(self) -> None:
        self._cache.store.release(self.plan)
        self._event = self._request_event()
        self._cache.store.log.write(self._event)

    def _commit_last(self) -> None:
        self.poll(wait=True)
        if self._committer is not None:
            self._committer.commit(self.source, self._position, tail=True)
            if self._latest is not None:
                self._committer.checkpoint(*self._latest)

    def _request_event(self) -> RequestEvent:
        found = self.plan.match
        return RequestEvent(
            model=self._cache.name,
            root=self._root,
            request=self.id,
            prompt_tokens=self.prompt_tokens,
            hot_tokens=found.tokens_of("hot"),
            cold_tokens=found.tokens_of("cold"),
            tail_tokens=found.tail_tokens,
            computed_tokens=self.computed_tokens,
            matched_tokens=found.tokens,
            restored_bytes=self.restored_bytes,
            restore_s=round(self.restore_s, 6),
            ttft_s=None if self.first_token_s is None else round(self.first_token_s, 6),
            output_tokens=len(self._reply),
            reason=self.plan.reason,
            outline=self.describe(self._reply) if self.describe else None,
            text=self.text,
        )


class _Committer:
    """Cuts and publishes the blocks of one growing sequence, each once, in prefix order."""

    def __init__(self, cache: BlockCache, adapter: Adapter, root: BlockName, packed: bytes, request: str) -> None:
        self._cache = cache
        self._adapter = adapter
        self._request = request
        self._root = root
        self._packed = bytearray(packed)
        self._names: list[BlockName] = []
        self.fresh: list[BlockName] = []
        """What was published since the last turn, whose work may still turn out to have failed."""

    def extend(self, token: int) -> None:
        self._packed += token.to_bytes(TOKEN_BYTES, "little")

    def commit(self, source: Source, position: int, *, tail: bool) -> int:
        """Publish what is full, and the rest as a tail if asked; returns the tokens seen in both.

        Args:
            position: tokens that were computed; a cache may count those of a step that failed too.
        """
        store = self._cache.store
        held = source.tokens()
        tokens = min(position, position if held is None else held, len(self._packed) // TOKEN_BYTES)
        new: list[BlockIdentity] = []
        while (len(self._names) + 1) * BLOCK_TOKENS <= tokens:
            block = self._next_block()
            if new or not store.holds(block.name, block.parent, first=block.index == 0):
                if source.can_cut(block.index * BLOCK_TOKENS):
                    new.append(block)
                elif not store.is_held(block.name):
                    break  # a window forgot it, and what continues it could never be found
            self._names.append(block.name)
        full = len(self._names) * BLOCK_TOKENS
        spans = [(block.index * BLOCK_TOKENS, (block.index + 1) * BLOCK_TOKENS) for block in new]
        tail = tail and full < tokens < full + BLOCK_TOKENS and not self._cache.layout.states and source.can_cut(full)
        if tail:
            spans.append((full, tokens))
        if spans:
            payloads = self._adapter.cut(source, spans)
            for block, payload in zip(new, payloads, strict=False):
                self.fresh.append(block.name)
                store.commit(block, payload, request=self._request)
            if tail:
                block = self._identity(full, tokens)
                self.fresh.append(block.name)
                store.commit_tail(block, payloads[-1], request=self._request)
        source.forget(tokens // BLOCK_TOKENS * BLOCK_TOKENS)
        return tokens if tail else full

    def checkpoint(self, position: int, state: Payload) -> None:
        """Publish the states after the block that ends at `position`, when that block was published."""
        index = position // BLOCK_TOKENS - 1
        if not 0 <= index < len(self._names):
            return
        block = self._identity(index * BLOCK_TOKENS, position)
        found = checkpoint_identity(block)
        if not self._cache.store.holds(found.name, found.parent, first=False):
            copy = self._adapter.checkpoint(state)
            self.fresh.append(found.name)
            self._cache.store.commit(found, copy, request=self._request)

    def withdraw(self) -> None:
        """Take back what was published since the last turn."""
        if self.fresh:
            self._cache.store.withdraw(self.fresh, request=self._request)
        self.fresh = []

    def _next_block(self) -> BlockIdentity:
        start = len(self._names) * BLOCK_TOKENS
        return self._identity(start, start + BLOCK_TOKENS)

    def _identity(self, start: int, stop: int) -> BlockIdentity:
        """The block or tail of tokens [start, stop)."""
        index = start // BLOCK_TOKENS
        parent = self._names[index - 1] if index else self._root
        tokens = bytes(self._packed[start * TOKEN_BYTES : stop * TOKEN_BYTES])
        return BlockIdentity(self._root, block_name(parent, tokens), parent, index, tokens)


def request_line(event: RequestEvent) -> str:
    """The line a person reads after each reply.

    `prompt 1,024 = hot 896 + cold 64 + computed 64; restored 11.50 MiB in 3 ms; first token 0.21 s; stopped matching
    at token 960: never seen`
    """
    line = (
        f"prompt {event.prompt_tokens:,} = hot {event.hot_tokens:,} + cold {event.cold_tokens:,}"
        f" + computed {event.computed_tokens:,}"
    )
    if event.restored_bytes:
        line += f"; restored {format_bytes(event.restored_bytes)} in {format_seconds(event.restore_s)}"
    if event.ttft_s is not None:
        line += f"; first token {format_seconds(event.ttft_s)}"
    if event.reason is not None:
        reason = event.reason.removesuffix(f" at token {event.matched_tokens}")  # said once is enough
        line += f"; stopped matching at token {event.matched_tokens:,}: {reason}"
    return line


def _bytes(size: str | int) -> int:
    return parse_bytes(size) if isinstance(size, str) else size
