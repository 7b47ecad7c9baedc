"""`BlockCache`: the one door between a model and the block store.

`start` restores what is held for a prompt, all but one token at most; the caller runs the model over the rest with
`sequence.prompt_cache`; `sequence.commit()` publishes full blocks as often as one likes; `sequence.finish()` keeps
the tail, lets go of the pins and writes the request line.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import mlx.nn as nn

from mlxkv.cache.block_log import RequestEvent
from mlxkv.cache.codec import BlockIdentity
from mlxkv.cache.layout import Layout
from mlxkv.cache.names import (
    BLOCK_TOKEN_BYTES,
    BLOCK_TOKENS,
    TOKEN_BYTES,
    BlockName,
    block_name,
    pack,
    root_name,
)
from mlxkv.cache.prefix import Part
from mlxkv.cache.store import BlockStore, Plan, Rate
from mlxkv.core.config import COLD_BYTES, CacheConfig, default_hot_bytes
from mlxkv.core.errors import UsageError
from mlxkv.core.platform import default_cache_dir
from mlxkv.core.units import format_bytes, format_seconds, parse_bytes
from mlxkv.models.adapter import Adapter, PromptCache, Target, UncachedModelError, plain_prompt_cache
from mlxkv.models.fingerprint import module_fields

WELL_UNDER = 0.8  # a restore must take at most this share of the time computing takes
START_S = 0.0005  # what a restore costs before the first byte
SLACK_S, UNKNOWN_DEADLINE_S = 0.1, 60.0
MEASURED_TOKENS = 32  # shorter prefills say little about the rate


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

    def start(self, tokens: Sequence[int], *, salt: str = "") -> CachedSequence:
        """Match and restore the longest held prefix of `tokens`.

        Raises:
            UsageError: `tokens` is empty or holds something that is not a token id.
        """
        if not len(tokens):
            raise UsageError("the prompt has no tokens; give at least one.")
        return CachedSequence(self, pack(tokens), self.root(salt))

    def restore(self, tokens: Sequence[int], *, salt: str = "") -> Restored:
        """A prompt cache for `mlx_lm.stream_generate` with the longest held prefix of `tokens`."""
        sequence = self.start(tokens, salt=salt)
        self.store.release(sequence.plan)
        return Restored(sequence.prompt_cache, sequence.held)

    def commit(self, tokens: Sequence[int], prompt_cache: PromptCache, *, salt: str = "") -> int:
        """Publish every full block and the tail of a prompt cache that was run over `tokens`.

        `tokens` may be longer than what the cache holds (the last sampled token is not in it), or shorter.
        Returns the tokens that are held now, of both.
        """
        if self._adapter is None or not len(tokens):
            return 0
        request = uuid.uuid4().hex[:12]
        return _Committer(self, self._adapter, self.root(salt), pack(tokens), request).commit(prompt_cache, tail=True)

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
        for count in (len(parts), hot):
            chosen = parts[:count]
            compute_s = self.prefill_rate.seconds(sum(part.tokens for part in chosen))
            restore_s = self._restore_seconds(chosen)
            if compute_s is None or restore_s is None or restore_s <= WELL_UNDER * compute_s:
                if count < len(parts):
                    self.store.shorten(plan, count, "slower than computing")
                return
        self.store.shorten(plan, 0, "slower than computing")

    def _restore_seconds(self, parts: Sequence[Part]) -> float | None:
        """Predicted seconds, None when a rate was never measured."""
        if not parts:
            return 0.0
        total = START_S
        per_token = self.layout.bytes_per_token
        copied = sum(part.tokens for part in parts if self.store.payload(part) is not None) * per_token
        read = sum(BLOCK_TOKENS for part in parts if self.store.payload(part) is None) * per_token
        for nbytes, rate in ((copied, self.store.hot_rate), (read, self.store.cold_rate)):
            seconds = rate.seconds(nbytes) if nbytes else 0.0
            if seconds is None:
                return None
            total += seconds
        return total

    def _fill(self, root: BlockName, plan: Plan, capacity_tokens: int, request: str) -> tuple[Target, int]:
        """Bring the parts of a plan into a new target, memory first; returns it and how many parts are good."""
        assert self._adapter is not None
        target = self._adapter.target(capacity_tokens)
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
            compute_s = self.prefill_rate.seconds(sum(part.tokens for part in waiting))
            deadline_s = UNKNOWN_DEADLINE_S if compute_s is None else compute_s + SLACK_S
            read = self.store.read(root, waiting, self.layout, target.views, deadline_s, request=request)
            good = cold[read.parts] if read.parts < len(cold) else len(parts)
            if read.overran:
                target = target.copy_of(sum(part.tokens for part in parts[:good]))
        return target, good


class CachedSequence:
    """One request: what was restored for it, and what it commits. Owner: the thread that owns MLX."""

    def __init__(self, cache: BlockCache, packed: bytes, root: BlockName) -> None:
        self._started = time.perf_counter()
        self.id = uuid.uuid4().hex[:12]
        self.plan = cache.store.plan(root, packed)
        self.prompt_tokens = len(packed) // TOKEN_BYTES
        self.first_token_s: float | None = None
        self._cache = cache
        self._root = root
        self._finished = False
        self._output_tokens = 0
        self._adapter = cache._adapter
        self.held = 0
        if self._adapter is None:
            self.prompt_cache: PromptCache = plain_prompt_cache(cache._module)
            self.plan.reason = cache.uncached
        else:
            self._restore(cache, self._adapter)
        self.restore_s = time.perf_counter() - self._started
        self._committer = _Committer(cache, self._adapter, root, packed, self.id) if self._adapter else None

    def _restore(self, cache: BlockCache, adapter: Adapter) -> None:
        planned = self.plan.match
        cache._worth(self.plan)
        parts = self.plan.match.parts
        if not parts:
            self.prompt_cache = adapter.new_prompt_cache()
            return
        target, good = cache._fill(
            self._root, self.plan, max(self.prompt_tokens, len(parts) * BLOCK_TOKENS) + 1, self.id
        )
        if good < len(parts):
            name = parts[good].name
            cache.store.shorten(self.plan, good, cache.store.why_gone(name) or "slower than computing")
        self.held = self.plan.match.tokens
        self.prompt_cache = adapter.build(target, self.held) if self.held else adapter.new_prompt_cache()
        cache.store.used(self.plan.match.parts)
        cache.store.unpin_tail(self.plan)
        assert self.held <= planned.tokens

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.held

    @property
    def restored_bytes(self) -> int:
        return self.held * self._cache.layout.bytes_per_token

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Tell how long computing `tokens` prompt tokens took; the never-slower rule lives on it."""
        if tokens >= MEASURED_TOKENS:
            self._cache.prefill_rate.add(tokens, seconds)

    def first_token(self) -> None:
        """Tell that the first token is there."""
        self.first_token_s = time.perf_counter() - self._started

    def extend(self, token: int) -> None:
        """One more token of the sequence: sampled, and fed to the model next."""
        self._output_tokens += 1
        if self._committer is not None:
            self._committer.extend(token)

    def commit(self) -> None:
        """Publish the full blocks that the prompt cache holds by now. Cheap when there is no new one."""
        if self._committer is not None:
            self._committer.commit(self.prompt_cache, tail=False)

    def finish(self) -> RequestEvent:
        """Commit what is full, keep the tail, unpin, log the request. A second call returns the same event."""
        if not self._finished:
            self._finished = True
            if self._committer is not None:
                self._committer.commit(self.prompt_cache, tail=True)
            self._cache.store.release(self.plan)
            self._event = self._request_event()
            self._cache.store.log.write(self._event)
        return self._event

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
            output_tokens=self._output_tokens,
            reason=self.plan.reason,
        )


class _Committer:
    """Cuts and publishes the blocks of one growing sequence, each once, in prefix order."""

    def __init__(self, cache: BlockCache, adapter: Adapter, root: BlockName, packed: bytes, request: str) -> None:
        self._cache = cache
        self._adapter = adapter
        self._request = request
        self._root = root
        self._packed = bytearray(packed)
        self._parent = root
        self._index = 0

    def extend(self, token: int) -> None:
        self._packed += token.to_bytes(TOKEN_BYTES, "little")

    def commit(self, prompt_cache: PromptCache, *, tail: bool) -> int:
        """Publish what is full, and the rest as a tail if asked; returns the tokens seen in both."""
        store = self._cache.store
        tokens = min(self._adapter.offset(prompt_cache), len(self._packed) // TOKEN_BYTES)
        new: list[BlockIdentity] = []
        while (self._index + 1) * BLOCK_TOKENS <= tokens:
            start = self._index * BLOCK_TOKEN_BYTES
            part = bytes(self._packed[start : start + BLOCK_TOKEN_BYTES])
            name = block_name(self._parent, part)
            block = BlockIdentity(self._root, name, self._parent, self._index, part)
            if new or not store.holds(name, self._parent, first=self._index == 0):
                new.append(block)
            self._parent = name
            self._index += 1
        spans = [(block.index * BLOCK_TOKENS, (block.index + 1) * BLOCK_TOKENS) for block in new]
        rest = tokens - self._index * BLOCK_TOKENS
        if tail and rest:
            spans.append((self._index * BLOCK_TOKENS, tokens))
        if not spans:
            return tokens
        payloads = self._adapter.cut(prompt_cache, spans)
        for block, payload in zip(new, payloads, strict=False):
            store.commit(block, payload, request=self._request)
        if tail and rest:
            part = bytes(self._packed[self._index * BLOCK_TOKEN_BYTES : tokens * TOKEN_BYTES])
            identity = BlockIdentity(self._root, block_name(self._parent, part), self._parent, self._index, part)
            store.commit_tail(identity, payloads[-1], request=self._request)
        return tokens


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
        line += f"; stopped matching at token {event.matched_tokens:,}: {event.reason}"
    return line


def _bytes(size: str | int) -> int:
    return parse_bytes(size) if isinstance(size, str) else size
