"""The engine: one thread that owns MLX, the model and the block cache, and runs many requests at once.

Each turn of its loop takes what was asked, goes on with restores, prefills a chunk's worth of tokens, and decodes one
token for every running row. A long prompt therefore stops the others for no longer than a chunk. An exception in one
request ends that request, one in a step all its rows, and nothing that was being computed is published (a device may
tell of an error late); one outside of all requests ends them all, and the engine begins anew, once. After an error of
the device, what else it has to tell is heard and memory is let go before anything else is computed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import mlx.core as mx

from mlxkv.attention.dispatch import Dispatch
from mlxkv.cache.block_log import RequestEvent
from mlxkv.cache.names import BLOCK_TOKENS, BlockName, chain, pack
from mlxkv.core.device import device_error, is_device_error
from mlxkv.core.errors import BudgetError, DeviceError, MlxkvError
from mlxkv.engine.advice import advice
from mlxkv.engine.chunks import Chunks
from mlxkv.engine.request import Emit, Failed, Finished, Piece, Prefilled, Request, Started
from mlxkv.engine.sampling import RowSampler, Sampled, sample_rows
from mlxkv.engine.scheduler import Limits, Scheduler
from mlxkv.engine.text import ReplyText
from mlxkv.engine.wiring import UNWIRED, Wiring
from mlxkv.models.computing import LOADING, computing, let_go
from mlxkv.models.loader import LoadedModel, on_cpu
from mlxkv.prompt_cache.batch import DecodeBatch
from mlxkv.prompt_cache.block_cache import BlockCache, CachedSequence

RESTORING_S = 0.001
CLEAR_EVERY_STEPS = 256
RESTART_S = 1.0
RESTARTS = 1

logger = logging.getLogger("mlxkv")
T = TypeVar("T")


class QueueFullError(MlxkvError):
    """Too many requests wait already."""

    http_status = 429


class EngineStoppedError(MlxkvError):
    """The engine is not running: it loads, ended, or is being started again."""

    http_status = 503


@dataclass(frozen=True)
class Opened:
    """A loaded model with its cache, and how much may run at once."""

    model: LoadedModel
    cache: BlockCache
    limits: Limits
    chunks: Chunks
    wiring: Wiring = UNWIRED


@dataclass(frozen=True)
class Running:
    """A request that has left the queue, as seen from outside. `phase` is `restore`, `prefill` or `decode`."""

    request: str
    phase: str
    prompt_tokens: int
    done_tokens: int
    held_tokens: int
    output_tokens: int
    since: float


@dataclass(frozen=True)
class Status:
    """What the engine was doing at the end of a turn; any thread may read it. Times are seconds since 1970.

    `live_bytes` are those of the arrays that running sequences hold, padding and reserve included.
    `saved_bytes` is what running sequences would take more if each kept its own copy of a prefix they share.
    """

    queued: int = 0
    running: tuple[Running, ...] = ()
    live_bytes: int = 0
    saved_bytes: int = 0
    steps: int = 0


@dataclass(frozen=True)
class _Asked:
    """A request in the queue and the names of its full blocks, which nobody else may be computing when it starts."""

    request: Request
    emit: Emit
    names: tuple[BlockName, ...]


@dataclass(eq=False)
class _Live:
    """A request from the moment it leaves the queue. Owner: the engine's thread."""

    asked: _Asked
    need_bytes: int
    sequence: CachedSequence
    text: ReplyText
    sampler: RowSampler
    at: int = 0
    started: bool = False
    given: bool = False  # its sampled token was handed out already
    ended: bool = False
    prefill_s: float = 0.0
    since: float = field(default_factory=time.time)

    @property
    def request(self) -> Request:
        return self.asked.request

    @property
    def prompt_tokens(self) -> int:
        return len(self.asked.request.prompt)

    @property
    def output(self) -> list[int]:
        return self.sampler.output

    def pending(self) -> tuple[BlockName, ...]:
        """Names of the blocks that its prefill will publish."""
        return self.asked.names[self.sequence.position // BLOCK_TOKENS :] if self.request.store else ()

    def status(self, phase: str) -> Running:
        return Running(
            self.request.id, phase, self.prompt_tokens, self.at, self.sequence.held, len(self.output), self.since
        )


def _awaits(expected: set[BlockName], asked: _Asked) -> bool:
    """Whether a running prefill is about to publish a block that this request would compute."""
    return not expected.isdisjoint(asked.names)


class Engine:
    """Owner of everything MLX, on a thread of its own; the public methods may be called from any other thread."""

    def __init__(
        self,
        open_model: Callable[[], Opened],
        *,
        lookahead: bool | None = None,
        on_request: Callable[[RequestEvent], None] | None = None,
    ) -> None:
        """Prepare; `start` begins.

        Args:
            open_model: loads the model and opens its cache; called on the engine's thread.
            lookahead: queue a step before the tokens of the last are read, so that a GPU never waits for Python. On a
                CPU, queueing waits for most of the step before, so there it is off by default.
            on_request: called with the event of every request that ended, on the engine's thread.
        """
        self.status = Status()
        self.error: BaseException | None = None
        self._open_model = open_model
        self._chosen_lookahead = lookahead
        self._on_request = on_request
        self._opened: Opened | None = None
        self._ready = threading.Event()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._ended = False
        self._closing = False
        self._deadline: float | None = None
        self._lost = 0
        self._steps = 0
        self._pins: list[tuple[float, Callable[[], None]]] = []
        self._thread = threading.Thread(target=self._main, name="mlxkv-engine", daemon=True)
        self._begin_anew(Limits())

    def _begin_anew(self, limits: Limits) -> None:
        self._scheduler: Scheduler[_Asked] = Scheduler(limits)
        self._prefilling: deque[_Live] = deque()
        self._rows: list[_Live] = []
        self._batch: DecodeBatch
        self._sampled: Sampled | None = None
        self._cancelled: set[str] = set()
        self._failure: DeviceError | None = None

    # from any thread

    def start(self, timeout_s: float | None = None) -> None:
        """Start the thread and wait until the model is there.

        Raises:
            Exception: what opening the model raised.
        """
        self._thread.start()
        self._ready.wait(timeout_s)
        if self.error is not None:
            raise self.error

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._opened is not None and self._thread.is_alive() and self.error is None and not self._closing

    @property
    def opened(self) -> Opened:
        """The model and its cache, whose store may only be touched on the engine's thread, see `call`.

        Raises:
            EngineStoppedError: the model is not loaded yet.
        """
        if self._opened is None:
            raise EngineStoppedError("the model is not loaded yet; try again in a moment.")
        return self._opened

    @property
    def model(self) -> LoadedModel:
        return self.opened.model

    @property
    def cache(self) -> BlockCache:
        return self.opened.cache

    @property
    def limits(self) -> Limits:
        return self.opened.limits

    def submit(self, request: Request, emit: Emit) -> None:
        """Queue a request; its events come through `emit`, on the engine's thread, and end in Finished or Failed.

        Raises:
            BudgetError: it can never fit; says the numbers.
            QueueFullError: too many wait.
            EngineStoppedError: the engine is closing or dead.
        """
        if not self.alive:
            raise EngineStoppedError("the engine is not running; try again in a moment.")
        refused = self._scheduler.refuse(self.need_bytes(request))
        if refused:
            raise BudgetError(refused)
        with self._lock:
            if self._ended:
                raise EngineStoppedError("the engine is not running; try again in a moment.")
            if self._waiting >= self.limits.queue:
                raise QueueFullError(f"{self._waiting} requests are waiting already; try again in a moment.")
            self._waiting += 1
            self._inbox.put(lambda: self._enqueue(request, emit))

    def cancel(self, request_id: str) -> None:
        """End a request within one chunk or step; what it computed stays in the cache."""
        self._inbox.put(lambda: self._cancelled.add(request_id))

    def call(self, work: Callable[[], T], timeout_s: float = 30.0) -> T:
        """Run `work` on the engine's thread between two turns and return what it returns.

        Raises:
            EngineStoppedError: the engine is not running, or too busy to answer in time.
        """
        if not self.alive:
            raise EngineStoppedError("the engine is not running; try again in a moment.")
        done: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((work(), None))
            except Exception as error:  # noqa: BLE001 - handed to the caller
                done.put((None, error))

        self._inbox.put(run)
        try:
            value, error = done.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineStoppedError("the engine did not answer in time; try again in a moment.") from None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def need_bytes(self, request: Request) -> int:
        """Bytes of keys, values and states that a request may come to hold by itself."""
        return self.cache.layout.live_bytes(len(request.prompt) + request.max_tokens, self.opened.chunks.longest)

    def refuse(self) -> None:
        """Take no more requests; what was taken goes on."""
        self._closing = True

    def close(self, *, drain_s: float = 30.0) -> int:
        """Finish what runs within the time, end the rest, close the cache; returns blocks that the SSD lacks."""
        self._closing = True
        deadline = time.monotonic() + drain_s
        self._inbox.put(lambda: self._drain_until(deadline))
        if self._thread.is_alive():
            self._thread.join()
        return self._lost

    # the engine's thread

    def _main(self) -> None:
        try:
            opened = self._open_model()
            _warm_up(opened)
            self._hook = Dispatch(opened.model.module)
            self._begin_anew(opened.limits)
            self._batch = self._new_batch(opened)
            self._opened = opened
        except BaseException as error:  # noqa: BLE001 - `start` raises it where somebody can answer it
            self.error = error
            self._ready.set()
            return
        mx.random.seed(time.time_ns() % 2**32)
        self._ready.set()
        restarts = 0
        while True:
            try:
                while self._turn():
                    pass
                break
            except BaseException as error:  # whatever it was, its requests must hear of it
                logger.exception("the engine stopped")
                self.error = error
                self._fail_all(EngineStoppedError(f"the engine stopped ({error}); send the request again."))
                restarts += 1
                if restarts > RESTARTS or self._closing:
                    break
                time.sleep(RESTART_S)
                self._begin_anew(self.limits)
                self._batch = self._new_batch(self.opened)
                self.error = None
        self._hook.close()
        self._refuse_rest()
        self._lost = self.cache.close()
        mx.clear_streams()  # or MLX may abort the process at its end: "terminate called without an active exception"

    def _new_batch(self, opened: Opened) -> DecodeBatch:
        return DecodeBatch(self._hook, opened.cache.layout)

    def _refuse_rest(self) -> None:
        """Answer what came too late for a last turn; nothing can come after it."""
        with self._lock:
            self._ended = True
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                break
            except BaseException:  # what ends an engine cannot end it twice
                logger.exception("asked of an engine that has ended")
        self._fail_all(EngineStoppedError("the engine has stopped; send the request again."))

    def _turn(self) -> bool:
        """One turn of the loop; False when it is time to end."""
        self._take()
        self._end_cancelled()
        self._admit()
        if self._prefilling:
            self._prefill()
        self._recover()
        if self._rows:
            self._decode()
        self._recover()
        self._expire_pins()
        self._tell_status()
        if self._deadline is not None:
            if not (self._prefilling or self._rows or self._scheduler.queue):
                return False
            if time.monotonic() >= self._deadline:
                self._fail_all(EngineStoppedError("the server is stopping; send the request again."), publish=True)
                return False
        return True

    def _take(self) -> None:
        """Do what other threads asked for; where there is nothing else to do, wait for it or for a pin to expire."""
        idle = not (self._prefilling or self._rows or self._scheduler.queue)
        try:
            if idle and self._deadline is None:
                self._inbox.get(timeout=self._until_a_pin_expires())()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _until_a_pin_expires(self) -> float | None:
        first = min((until for until, _ in self._pins), default=None)
        return None if first is None else max(first - time.monotonic(), 0.0)

    def _drain_until(self, deadline: float) -> None:
        self._deadline = deadline

    def _enqueue(self, request: Request, emit: Emit) -> None:
        full = (len(request.prompt) - 1) // BLOCK_TOKENS  # the last token is always computed: its block helps nobody
        try:
            names = tuple(chain(self.cache.root(request.salt), pack(request.prompt[: full * BLOCK_TOKENS])))
        except Exception as error:  # noqa: BLE001 - ends this request alone
            with self._lock:
                self._waiting -= 1
            emit(Failed(error))
            return
        self._scheduler.add(_Asked(request, emit, names), self.need_bytes(request))

    def _admit(self) -> None:
        while True:
            publish = self._prefilling if self.cache.keeps_blocks else ()
            expected = {name for live in publish for name in live.pending()}
            asked = self._scheduler.next(partial(_awaits, expected), extra_bytes=self._batch.extra_bytes)
            if asked is None:
                return
            with self._lock:
                self._waiting -= 1
            try:
                self._prefilling.append(self._begin(asked))
            except Exception as error:  # noqa: BLE001 - ends this request alone
                self._scheduler.ended(self.need_bytes(asked.request))
                asked.emit(Failed(self._told(error, at=0)))

    def _begin(self, asked: _Asked) -> _Live:
        request = asked.request
        sampler = RowSampler(request)
        text = ReplyText(self.model.tokenizer, request.stop, initial=request.initial, tools=request.tools)
        sequence = self.cache.start(
            request.prompt, salt=request.salt, marks=request.marks, keep=request.store, wait=False, request=request.id
        )
        if request.record is not None:
            sequence.describe, sequence.text = request.record.outline, request.record.text
        return _Live(asked, self.need_bytes(request), sequence, text, sampler)

    def _prefill(self) -> None:
        """A chunk's worth of tokens of the prefilling requests that are restored; they take turns."""
        self._settle()
        left = longest = self.opened.chunks.longest
        for _ in range(len(self._prefilling)):
            live = self._prefilling[0]
            self._prefilling.rotate(-1)
            try:
                if not live.sequence.poll():
                    continue
                if not live.started:
                    live.started, live.at = True, live.sequence.held
                    live.asked.emit(Started(live.at, live.prompt_tokens))
                stop = self._chunk_end(live)
                if stop - live.at > left:
                    self._prefilling.rotate(1)
                    return
                left -= stop - live.at
                self._chunk(live, stop)
            except Exception as error:  # noqa: BLE001 - ends this request alone
                if live in self._prefilling:
                    self._prefilling.remove(live)
                self._end(live, error=error)
                if self._failure is not None:
                    return
        if left == longest and not self._rows:
            time.sleep(RESTORING_S)  # every one of them waits for the SSD

    def _settle(self) -> None:
        """Hear now of what went wrong in a step that is still on its way: it would be told to somebody else."""
        if self._rows:
            self._hear()

    def _hear(self) -> None:
        try:
            mx.synchronize()
        except Exception as error:  # noqa: BLE001 - a step is one for all rows: it ends them, and nothing else
            self._end_rows(error)

    def _told(self, error: Exception, *, at: int | None) -> Exception:
        """What a request hears of an error: one of the device comes with the setting to change.

        Args:
            at: where in its prompt it was; None when it was decoded with the others.
        """
        chunk = None if at is None else self.opened.chunks.at(at)
        known = advice(self.limits, hot_bytes=self.cache.store.hot.budget_bytes, chunk_tokens=chunk)
        failure = device_error(error, known)
        if failure is None:
            return error
        failure.__cause__ = error
        self._failure = failure
        return failure

    def _recover(self) -> None:
        """After the device failed: let memory go, and hear what else went wrong before somebody else is told of it."""
        while self._failure is not None:
            failure, self._failure = self._failure, None
            logger.warning("%s", failure)
            let_go(failure)
            self._hear()

    def _chunk_end(self, live: _Live) -> int:
        """Where the next chunk of a prompt ends: its last token is left for the decode step that all rows share."""
        last = live.prompt_tokens - 1
        return min(self.opened.chunks.end(live.at), last, max(live.sequence.next_stop(live.at), live.at))

    def _chunk(self, live: _Live, stop: int) -> None:
        """Compute a prompt up to `stop`; after the last chunk it is decoded with the others."""
        sequence, prompt, last = live.sequence, live.request.prompt, live.prompt_tokens - 1
        if live.at < stop:
            began = time.perf_counter()
            self.model.module(mx.array(prompt[live.at : stop])[None], cache=sequence.prompt_cache)
            mx.eval([cache.state for cache in sequence.prompt_cache])
            mx.synchronize()
            sequence.advance(stop - live.at)
            live.at = stop
            sequence.commit()
            if not on_cpu():
                mx.clear_cache()
            live.prefill_s += time.perf_counter() - began
            live.asked.emit(Prefilled(live.at, live.prompt_tokens))
        if live.at == last:
            sequence.prefilled(last - sequence.held, live.prefill_s)
            self._prefilling.remove(live)
            self._join(live)

    def _join(self, live: _Live) -> None:
        """Decode a sequence with the others from now on, beginning with the last token of its prompt."""
        live.given = True
        token = mx.array(live.request.prompt[-1:], mx.uint32)
        try:
            room = self._scheduler.room_bytes(self._batch.extra_bytes)
            self._batch.join(live.sequence.prompt_cache, live.at, live.asked.names, room_bytes=room)
        except Exception as error:  # what the others have may be half changed
            self._end_rows(error)
            raise
        live.sequence.prompt_cache = []
        live.at = live.prompt_tokens
        self._rows.append(live)
        before = self._sampled or Sampled(mx.zeros((0,), mx.uint32), [])
        self._sampled = Sampled(mx.concatenate([before.tokens, token]), [*before.logprobs, None])
        self._tell_sources()

    def _tell_sources(self) -> None:
        """Tell every row where its blocks are now."""
        for live, source in zip(self._rows, self._batch.sources(), strict=True):
            if source is not None:
                live.sequence.source = source

    @property
    def _looks_ahead(self) -> bool:
        return not on_cpu() if self._chosen_lookahead is None else self._chosen_lookahead

    def _decode(self) -> None:
        """One token for every row.

        With nothing to prefill, a GPU is given the next step before the tokens of the last are read. Otherwise a step
        is read at once, so that no token waits behind a chunk.
        """
        ahead: Sampled | None = None
        looks_ahead = self._looks_ahead and not self._prefilling
        try:
            if looks_ahead and any(map(self._goes_on, self._rows)):
                assert self._sampled is not None
                ahead = self._step(self._sampled.tokens)
            self._hand_out(ahead)
            if ahead is None and self._rows:
                assert self._sampled is not None
                self._sampled = self._step(self._sampled.tokens, told=True)
                for live in self._rows:
                    live.given = False
                if not looks_ahead:
                    self._hand_out(None)
        except Exception as error:  # noqa: BLE001 - a step is one for all rows: it ends them, and nothing else
            self._end_rows(error)

    def _hand_out(self, ahead: Sampled | None) -> None:
        """Read the tokens that were sampled and give those that were not given yet; rows that end leave.

        Args:
            ahead: what was sampled after them already, which takes their place.
        """
        sampled = self._sampled
        assert sampled is not None
        ended = set()
        if not all(live.given for live in self._rows):
            for row, (live, value) in enumerate(zip(self._rows, sampled.tokens.tolist(), strict=True)):
                if not live.given and self._handed_out(live, value, sampled.logprobs[row]):
                    ended.add(row)
        for live in self._rows:
            live.given = ahead is None
        self._sampled = ahead or sampled
        self._leave(ended)

    def _handed_out(self, live: _Live, token: int, logprobs: mx.array | None) -> bool:
        """Give a row its token and publish what is full; True when that was its end.

        Raises what the device says of the step when blocks are cut: that is about all rows.
        """
        try:
            if not live.output:
                live.sequence.first_token()
            complete = self._give(live, token, logprobs)
        except Exception as error:
            if is_device_error(error):
                raise
            self._end(live, error=error)  # ends this request alone
            return True
        if not complete:
            live.sequence.commit()
        elif (failure := self._end(live)) is not None:
            raise failure
        return complete

    def _goes_on(self, live: _Live) -> bool:
        return len(live.output) + (not live.given) < live.request.max_tokens

    def _step(self, tokens: mx.array, *, told: bool = False) -> Sampled:
        """Queue a forward pass of every row's token and the sampling of the next; `told`: all were handed out."""
        logits = self._batch.step(self.model.module, tokens)
        last = [None if told or live.given else tokens[i : i + 1] for i, live in enumerate(self._rows)]
        for live in self._rows:
            live.sequence.advance(1)
        sampled = sample_rows([live.sampler for live in self._rows], logits, last)
        mx.async_eval(sampled.tokens)
        self._steps += 1
        if self._steps % CLEAR_EVERY_STEPS == 0 and not on_cpu():
            mx.clear_cache()
        return sampled

    def _end_rows(self, error: Exception) -> None:
        rows, self._rows, self._sampled, self._batch = self._rows, [], None, self._new_batch(self.opened)
        for live in rows:
            self._end(live, error=error)

    def _leave(self, rows: set[int]) -> None:
        if not rows:
            return
        kept = [row for row in range(len(self._rows)) if row not in rows]
        self._batch.leave(rows)
        self._rows = [self._rows[row] for row in kept]
        if kept and self._sampled is not None:
            logprobs = [self._sampled.logprobs[row] for row in kept]
            self._sampled = Sampled(self._sampled.tokens[mx.array(kept)], logprobs)
        else:
            self._sampled = None
        self._tell_sources()

    def _give(self, live: _Live, token: int, logprobs: mx.array | None) -> bool:
        """Hand a token to the client; True when the reply is complete."""
        if live.sampler.error is not None:
            raise live.sampler.error
        live.sequence.extend(token)
        live.sampler.output.append(token)
        if token in self.model.tokenizer.eos_token_ids:
            return True
        segments = live.text.add(token)
        live.asked.emit(Piece(tuple(segments), token, live.sampler.told(token, logprobs)))
        return live.text.stopped or len(live.output) >= live.request.max_tokens

    def _end(
        self, live: _Live, *, error: Exception | None = None, publish: bool = False, cancelled: bool = False
    ) -> Exception | None:
        """Commit, free the place, say how it ended. A second call does nothing.

        Args:
            publish: commit although there is an error, for it has nothing to do with what was computed.

        Returns why it could not be committed; whoever shared a step with it has heard nothing of that.
        """
        if live.ended:
            return None
        live.ended = True
        self._scheduler.ended(live.need_bytes)
        failure: Exception | None = None
        if error is None or publish:
            try:
                event = live.sequence.finish()
            except Exception as its:  # noqa: BLE001 - returned, and the client must hear of the end, whatever it was
                error = failure = its
        if error is not None:
            event = live.sequence.fail()
        live.sequence.prompt_cache = []
        if live.request.pin_s and live.request.store and error is None:
            unpin = self.cache.pin((*live.request.prompt, *live.output), salt=live.request.salt)
            self._pins.append((time.monotonic() + live.request.pin_s, unpin))
        if self._on_request is not None:
            self._on_request(event)
        if error is not None:
            live.asked.emit(Failed(self._told(error, at=live.at if live.at < live.prompt_tokens else None)))
            return failure
        stopped = bool(live.output) and live.output[-1] in self.model.tokenizer.eos_token_ids
        if rest := live.text.finish():
            live.asked.emit(Piece(tuple(rest), None))
        live.asked.emit(
            Finished(
                reason="cancelled" if cancelled else "stop" if stopped or live.text.stopped else "length",
                stopped_by=live.text.stopped_by,
                prompt_tokens=live.prompt_tokens,
                cached_tokens=live.sequence.held,
                output_tokens=len(live.output),
                event=event,
            )
        )
        return None

    def _end_cancelled(self) -> None:
        if not self._cancelled:
            return
        gone, self._cancelled = self._cancelled, set()
        queued = [waiting.item for waiting in self._scheduler.queue if waiting.item.request.id in gone]
        self._scheduler.drop(queued)
        with self._lock:
            self._waiting -= len(queued)
        for asked in queued:
            asked.emit(Failed(EngineStoppedError("the request was cancelled while it waited.")))
        self._settle()
        for live in [live for live in self._prefilling if live.request.id in gone]:
            self._prefilling.remove(live)
            self._end(live, cancelled=True)
        rows = {row for row, live in enumerate(self._rows) if live.request.id in gone}
        failures = [self._end(self._rows[row], cancelled=True) for row in rows]
        if failure := next(filter(None, failures), None):
            self._end_rows(failure)
        else:
            self._leave(rows)

    def _fail_all(self, error: Exception, *, publish: bool = False) -> None:
        live, queued = [*self._prefilling, *self._rows], [waiting.item for waiting in self._scheduler.queue]
        self._prefilling.clear()
        self._rows, self._sampled = [], None
        self._scheduler.queue.clear()
        with self._lock:
            self._waiting -= len(queued)
        for item in live:
            self._end(item, error=error, publish=publish)
        for asked in queued:
            asked.emit(Failed(error))

    def _expire_pins(self) -> None:
        now = time.monotonic()
        for until, unpin in self._pins:
            if until <= now:
                unpin()
        self._pins = [pin for pin in self._pins if pin[0] > now]

    def _tell_status(self) -> None:
        prefilling = [live.status("prefill" if live.started else "restore") for live in self._prefilling]
        decoding = [live.status("decode") for live in self._rows]
        self.status = Status(
            queued=len(self._scheduler.queue),
            running=(*prefilling, *decoding),
            live_bytes=self._batch.held_bytes + sum(live.sequence.held_bytes for live in self._prefilling),
            saved_bytes=self._batch.saved_bytes,
            steps=self._steps,
        )


def _warm_up(opened: Opened) -> None:
    """Run one token, so that the first request does not wait for what is only done once."""
    with computing(LOADING):
        mx.eval(opened.model.module(mx.zeros((1, 1), mx.int32), cache=opened.cache.new_prompt_cache()))
