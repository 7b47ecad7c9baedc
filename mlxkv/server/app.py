"""The application: routes, and how a request becomes an answer. `create_app` is all that a caller needs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mlxkv.blocklog.outline import Outliner, load_key
from mlxkv.core.errors import MlxkvError
from mlxkv.engine.engine import Engine
from mlxkv.engine.request import Finished, Piece, Started, TokenLogprob
from mlxkv.engine.request import Request as EngineRequest
from mlxkv.server import anthropic, openai
from mlxkv.server.generation.call import Call, ClientGoneError, EventStream
from mlxkv.server.generation.prepare import chat_requests, count_tokens, text_requests, warm_up
from mlxkv.server.http.errors import (
    RETRY_AFTER_S,
    RequestError,
    describe,
    error_body,
    from_validation,
    headers_of,
    is_unforeseen,
)
from mlxkv.server.http.guard import SALT, BodyError, Guard
from mlxkv.server.monitoring.blocks import cold_use, held_blocks, hot_blocks, hot_use
from mlxkv.server.monitoring.metrics import Metrics
from mlxkv.server.settings import Settings

DASHBOARD = Path(__file__).parent / "monitoring" / "dashboard"
MOST_LISTED_BLOCKS = 20_000
_DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"
_CLIENT_GONE = 499
_POLICY = "default-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
_NOT_STALE = {"cache-control": "no-cache"}
"""A browser asks each time whether a file is still the same: page and scripts are then of one version."""

logger = logging.getLogger("mlxkv")
B = TypeVar("B", bound=BaseModel)


def create_app(engine: Engine, settings: Settings, metrics: Metrics) -> Guard:
    """The ASGI application over a running engine, with its guard in front.

    Args:
        metrics: hears every event of the engine's block log.
    """
    app = FastAPI(title="mlxkv", version=version("mlxkv"), docs_url=None, redoc_url=None)
    routes = _Routes(engine, settings, metrics)
    post, get = app.post, app.get
    post("/v1/chat/completions", openapi_extra=_takes(openai.ChatBody))(routes.chat)
    post("/v1/completions", openapi_extra=_takes(openai.CompletionBody))(routes.completions)
    post("/v1/messages", openapi_extra=_takes(anthropic.MessagesBody))(routes.messages)
    post("/v1/messages/count_tokens", openapi_extra=_takes(anthropic.CountBody))(routes.count)
    get("/v1/models")(routes.models)
    get("/v1/models/{name:path}")(routes.model)
    get("/v1/cache")(routes.cache)
    get("/v1/cache/blocks")(routes.blocks)
    get("/v1/cache/requests")(routes.requests)
    get("/health")(routes.health)
    get("/ready")(routes.ready)
    get("/metrics", response_class=Response)(routes.metrics_page)
    if DASHBOARD.is_dir():
        get("/", include_in_schema=False)(routes.dashboard)
        app.mount("/static", _Static(directory=DASHBOARD), name="static")
    app.add_exception_handler(HTTPException, _http_failed)
    app.add_exception_handler(Exception, _failed)  # answered as well, and raised again for the log
    for known in (MlxkvError, BodyError, ClientGoneError, ClientDisconnect, RequestValidationError):
        app.add_exception_handler(known, _failed)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return Guard(app, settings)


class _Routes:
    """What every path does. Owner: the event loop; only `Engine`'s own methods reach the engine's thread."""

    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._started = time.time()
        self._outliner = Outliner(engine.model.tokenizer, key=load_key())
        warm_up(engine.model, settings, self._outliner)

    # OpenAI

    async def chat(self, request: Request) -> Response:
        """A chat, as OpenAI's API has it."""
        body = await _read(request, openai.ChatBody)
        self._check_model(body.model)
        model = self._engine.model
        tools = openai.tools_of(body)
        messages = openai.messages_of(body)
        wish = await to_thread.run_sync(openai.chat_wish, body, self._settings, model, request.scope.get(SALT))
        template = body.chat_template_kwargs or {}
        requests = await to_thread.run_sync(
            chat_requests, model, self._settings, messages, tools, template, wish, self._outliner
        )  # fmt: skip
        call = Call(self._engine, requests, self._metrics)
        choices = [
            _ChatChoice(self._engine, i, openai.ToolCalls(model, tools, one_only=body.parallel_tool_calls is False))
            for i in range(len(requests))
        ]
        if body.stream:
            return EventStream(call, self._guarded(request, self._chat_stream(body, call, choices)))
        finished = await self._collect(request, call, choices)
        answer = openai.envelope("chat.completion", "chatcmpl", model.name)
        return JSONResponse(
            {**answer, "choices": [choice.answer() for choice in choices], "usage": openai.usage(finished)}
        )

    async def _chat_stream(
        self, body: openai.ChatBody, call: Call, choices: Sequence[_ChatChoice]
    ) -> AsyncIterator[bytes]:
        head = openai.envelope("chat.completion.chunk", "chatcmpl", self._engine.model.name)
        finished: dict[int, Finished] = {}
        for choice in choices:
            yield _data({**head, "choices": [choice.chunk({"role": "assistant", "content": ""})]})
        async for found in call.events():
            if found is None:
                yield _PING
                continue
            index, event = found
            for delta, logprobs in choices[index].take(event):
                chunk = choices[index].chunk(delta, logprobs)
                yield _data({**head, "choices": [chunk]})
            if isinstance(event, Finished):
                finished[index] = event
                yield _data({**head, "choices": [choices[index].chunk({}, reason=choices[index].reason)]})
        if body.wants_usage:
            yield _data({**head, "choices": [], "usage": openai.usage([finished[i] for i in sorted(finished)])})
        yield _DONE

    async def completions(self, request: Request) -> Response:
        """A completion of plain text or token ids, as OpenAI's API has it."""
        body = await _read(request, openai.CompletionBody)
        self._check_model(body.model)
        model = self._engine.model
        wish = openai.completion_wish(body, self._settings, model, request.scope.get(SALT))
        prompts = openai.prompts_of(body, model)
        requests = await to_thread.run_sync(text_requests, model, self._settings, prompts, wish)
        call = Call(self._engine, requests, self._metrics)
        choices = [_TextChoice(self._engine, i) for i in range(len(requests))]
        if body.stream:
            return EventStream(call, self._guarded(request, self._text_stream(body, call, choices)))
        finished = await self._collect(request, call, choices)
        answer = openai.envelope("text_completion", "cmpl", model.name)
        return JSONResponse(
            {**answer, "choices": [choice.answer() for choice in choices], "usage": _usage_of_prompts(body, finished)}
        )

    async def _text_stream(
        self, body: openai.CompletionBody, call: Call, choices: Sequence[_TextChoice]
    ) -> AsyncIterator[bytes]:
        head = openai.envelope("text_completion", "cmpl", self._engine.model.name)
        finished: dict[int, Finished] = {}
        async for found in call.events():
            if found is None:
                yield _PING
                continue
            index, event = found
            for text, logprobs in choices[index].take(event):
                yield _data({**head, "choices": [choices[index].chunk(text, logprobs)]})
            if isinstance(event, Finished):
                finished[index] = event
                yield _data({**head, "choices": [choices[index].chunk("", [], reason=choices[index].reason)]})
        if body.wants_usage:
            told = _usage_of_prompts(body, [finished[i] for i in sorted(finished)])
            yield _data({**head, "choices": [], "usage": told})
        yield _DONE

    async def models(self) -> JSONResponse:
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def model(self, name: str) -> JSONResponse:
        """The model of that name, when it is the one that is served."""
        self._check_model(name)
        return JSONResponse(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        model = self._engine.model
        return {
            "id": model.name,
            "object": "model",
            "created": int(self._started),
            "owned_by": "mlxkv",
            "context_length": model.context_tokens,
        }

    def _check_model(self, name: str | None) -> None:
        """Raise unless a name is one of the served model's; nothing is ever looked up or loaded for it."""
        own = self._engine.model.name
        known = {own, *self._settings.names}
        if name and name.rstrip("/").casefold() not in {one.rstrip("/").casefold() for one in known}:
            raise RequestError(
                f"this server has {own} and no model {name[:80]!r}; leave `model` out, or use that name.",
                field="model", code="model_not_found", status=404,
            )  # fmt: skip

    # Anthropic

    async def messages(self, request: Request) -> Response:
        """A message, as Anthropic's API has it."""
        body = await _read(request, anthropic.MessagesBody)
        self._check_model(body.model)
        model = self._engine.model
        tools = anthropic.tools_of(body)
        wish = anthropic.wish_of(body, self._settings, model, request.scope.get(SALT))
        (one,) = await to_thread.run_sync(
            chat_requests, model, self._settings, anthropic.messages_of(body), tools, anthropic.template_of(body), wish,
            self._outliner,
        )  # fmt: skip
        one_only = body.tool_choice is not None and bool(body.tool_choice.disable_parallel_tool_use)
        calls = openai.ToolCalls(model, tools, one_only=one_only)
        call = Call(self._engine, [one], self._metrics)
        if body.stream:
            return EventStream(call, self._guarded(request, self._message_stream(one, call, calls)))
        content = anthropic.ContentBlocks()
        finished: Finished | None = None
        async for _, event in call.collect(request):
            if isinstance(event, Piece):
                _add_blocks(content, calls, event)
            elif isinstance(event, Finished):
                finished = event
        assert finished is not None
        held, output = finished.cached_tokens, finished.output_tokens
        return JSONResponse(
            {
                **self._message_head(one, held),
                "content": content.content,
                **_stop_reason(content, finished),
                "usage": anthropic.usage(one, held, output, stores=self._stores),
            }
        )

    async def _message_stream(self, one: EngineRequest, call: Call, calls: openai.ToolCalls) -> AsyncIterator[bytes]:
        content = anthropic.ContentBlocks()
        began = False
        async for found in call.events():
            if found is None:
                yield anthropic.frame("ping")
                continue
            event = found[1]
            if isinstance(event, Started):
                began = True
                yield anthropic.frame("message_start", message=self._message_head(one, event.held_tokens))
            elif isinstance(event, Piece):
                for frame in _add_blocks(content, calls, event):
                    yield frame
            elif isinstance(event, Finished):
                if not began:
                    yield anthropic.frame("message_start", message=self._message_head(one, event.cached_tokens))
                for frame in content.close():
                    yield frame
                told = anthropic.usage(one, event.cached_tokens, event.output_tokens, stores=self._stores)
                yield anthropic.frame("message_delta", delta=_stop_reason(content, event), usage=told)
                yield anthropic.frame("message_stop")

    def _message_head(self, one: EngineRequest, held: int) -> dict[str, Any]:
        return {
            "id": anthropic.new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": self._engine.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": anthropic.usage(one, held, 0, stores=self._stores),
        }

    async def count(self, request: Request) -> JSONResponse:
        """How many tokens a message would have."""
        body = await _read(request, anthropic.CountBody)
        self._check_model(body.model)
        messages, tools = anthropic.messages_of(body), anthropic.tools_of(body)
        template = anthropic.template_of(body)
        tokens = await to_thread.run_sync(count_tokens, self._engine.model, messages, tools, template)
        return JSONResponse({"input_tokens": tokens})

    @property
    def _stores(self) -> bool:
        return self._engine.cache.keeps_blocks

    # the cache and the process

    async def cache(self) -> JSONResponse:
        """The tiers against their budgets, tokens by source, what runs, and how it went lately."""
        engine, metrics = self._engine, self._metrics
        status, layout = engine.status, engine.cache.layout
        store = engine.cache.store
        return JSONResponse(
            {
                "model": engine.model.name,
                "version": version("mlxkv"),
                "ready": engine.alive,
                "uncached": engine.cache.uncached,
                "block_bytes": layout.block_bytes,
                "checkpoint_bytes": layout.checkpoint_bytes,
                "hot": hot_use(store),
                "cold": cold_use(store),
                "tokens": asdict(metrics.tokens),
                "requests": {
                    "running": len(status.running),
                    "queued": status.queued,
                    "finished": metrics.finished,
                    "limit": engine.limits.sequences,
                },
                "live_bytes": status.live_bytes,
                "saved_bytes": status.saved_bytes,
                "live_budget_bytes": engine.limits.memory_bytes,
                "wired": asdict(engine.opened.wiring),
                "evicted": dict(metrics.evicted),
                "quarantined": metrics.quarantined,
                "history": list(metrics.history),
                "started": self._started,
                "time": time.time(),
            }
        )

    async def blocks(self, limit: int = MOST_LISTED_BLOCKS) -> JSONResponse:
        """The blocks and checkpoints that the tiers hold, the last used first."""
        return await to_thread.run_sync(self._blocks, max(0, min(limit, MOST_LISTED_BLOCKS)))

    def _blocks(self, most: int) -> JSONResponse:
        cache = self._engine.cache
        hot, root = self._engine.call(lambda: (hot_blocks(cache.store), cache.root()))
        return JSONResponse({**held_blocks(cache.store, hot, most), "root": root.hex()})

    async def requests(self) -> JSONResponse:
        """What runs now, and the last requests with their lines, newest first."""
        running = [asdict(one) for one in self._engine.status.running]
        return JSONResponse({"running": running, "requests": list(self._metrics.requests)})

    async def health(self) -> JSONResponse:
        """The process is alive."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> JSONResponse:
        """The engine runs and its model is loaded."""
        if self._engine.alive:
            return JSONResponse({"status": "ready", "model": self._engine.model.name})
        reason = "the engine stopped" if self._engine.error else "the server is stopping"
        return JSONResponse({"status": reason}, 503, {"retry-after": str(RETRY_AFTER_S)})

    async def metrics_page(self) -> Response:
        """Counters and gauges for Prometheus."""
        engine, store, status = self._engine, self._engine.cache.store, self._engine.status
        tiers = {"hot": (store.hot.used_bytes, store.hot.budget_bytes)}
        if store.cold is not None:
            tiers["cold"] = (store.cold.used_bytes, store.cold.budget_bytes)
        text = self._metrics.text(tiers, status.queued, len(status.running), engine.status.live_bytes)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def dashboard(self) -> FileResponse:
        """The dashboard."""
        return FileResponse(DASHBOARD / "index.html", headers={"content-security-policy": _POLICY, **_NOT_STALE})

    async def _collect(self, request: Request, call: Call, choices: Sequence[_Choice]) -> list[Finished]:
        finished: dict[int, Finished] = {}
        async for index, event in call.collect(request):
            choices[index].take(event)
            if isinstance(event, Finished):
                finished[index] = event
        return [finished[i] for i in sorted(finished)]

    async def _guarded(self, request: Request, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """An error after the headers becomes an event; it can have no status any more."""
        try:
            async for frame in frames:
                yield frame
        except Exception as error:  # whatever ended the request, its client hears of it
            status, message, code, field = describe(error)
            if is_unforeseen(error):
                logger.exception("a request failed")
            told = error_body(request.url.path, status, message, code=code, field=field)
            if "type" in told:
                yield anthropic.frame("error", error=told["error"])
            else:
                yield _data(told)


class _Static(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_NOT_STALE)
        return response


class _Choice:
    """One choice of an answer, streamed or not."""

    def __init__(self, engine: Engine, index: int) -> None:
        self._model = engine.model
        self._index = index
        self._logprobs: list[TokenLogprob] = []
        self.reason: str | None = None

    def take(self, event: object) -> list[Any]:
        raise NotImplementedError


class _ChatChoice(_Choice):
    def __init__(self, engine: Engine, index: int, calls: openai.ToolCalls) -> None:
        super().__init__(engine, index)
        self._calls = calls
        self._texts = {"content": "", "reasoning_content": ""}
        self._tool_calls: list[dict[str, Any]] = []

    def take(self, event: object) -> list[tuple[dict[str, Any], list[TokenLogprob]]]:
        """The deltas of an event; what they say is kept for the whole answer as well."""
        if isinstance(event, Finished):
            self.reason = "tool_calls" if self._tool_calls and event.reason == "stop" else event.reason
        if not isinstance(event, Piece):
            return []
        deltas: list[dict[str, Any]] = []
        for kind, text, written in event.segments:
            calls = self._calls.parse(text) if kind == "tool" else None
            if calls is not None:
                self._tool_calls += calls
                deltas += [{"tool_calls": [call]} for call in calls]
            else:
                field = "reasoning_content" if kind == "reasoning" else "content"
                self._texts[field] += written or text
                deltas.append({field: written or text})
        told = [] if event.logprob is None else [event.logprob]
        self._logprobs += told
        if told and not deltas:
            deltas = [{"content": ""}]
        return [(delta, told if i == 0 else []) for i, delta in enumerate(deltas)]

    def chunk(
        self, delta: dict[str, Any], logprobs: Sequence[TokenLogprob] = (), *, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": self._told(logprobs), "finish_reason": reason}

    def answer(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._texts["content"]}
        if self._texts["reasoning_content"]:
            message["reasoning_content"] = self._texts["reasoning_content"]
        if self._tool_calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in self._tool_calls]
            message["content"] = self._texts["content"] or None
        logprobs = self._told(self._logprobs)
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self.reason}

    def _told(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not entries:
            return None
        return {"content": [openai.chat_logprob(self._model, entry) for entry in entries]}


class _TextChoice(_Choice):
    def __init__(self, engine: Engine, index: int) -> None:
        super().__init__(engine, index)
        self._text = ""
        self._told_characters = 0

    def take(self, event: object) -> list[tuple[str, list[TokenLogprob]]]:
        """The text of an event and its log-probabilities; kept for the whole answer as well."""
        if isinstance(event, Finished):
            self.reason = event.reason
        if not isinstance(event, Piece):
            return []
        text = "".join(segment.text for segment in event.segments)
        told = [] if event.logprob is None else [event.logprob]
        self._text += text
        self._logprobs += told
        return [(text, told)] if text or told else []

    def chunk(self, text: str, logprobs: Sequence[TokenLogprob], *, reason: str | None = None) -> dict[str, Any]:
        told = self._told(logprobs, self._told_characters)
        self._told_characters += sum(map(len, told["tokens"])) if told else 0
        return {"index": self._index, "text": text, "logprobs": told, "finish_reason": reason}

    def answer(self) -> dict[str, Any]:
        logprobs = self._told(self._logprobs, 0)
        return {"index": self._index, "text": self._text, "logprobs": logprobs, "finish_reason": self.reason}

    def _told(self, entries: Sequence[TokenLogprob], at: int) -> dict[str, Any] | None:
        return openai.completion_logprobs(self._model, entries, at) if entries else None


def _add_blocks(content: anthropic.ContentBlocks, calls: openai.ToolCalls, piece: Piece) -> list[bytes]:
    frames: list[bytes] = []
    for kind, text, written in piece.segments:
        parsed = calls.parse(text) if kind == "tool" else None
        if parsed is None:
            frames += content.add(kind, written or text)
        for call in parsed or []:
            frames += content.add_call(call)
    return frames


def _stop_reason(content: anthropic.ContentBlocks, finished: Finished) -> dict[str, str | None]:
    if finished.stopped_by is not None:
        reason = "stop_sequence"
    elif content.used_tools and finished.reason == "stop":
        reason = "tool_use"
    else:
        reason = anthropic.STOP_REASONS[finished.reason]
    return {"stop_reason": reason, "stop_sequence": finished.stopped_by}


def _usage_of_prompts(body: openai.CompletionBody, finished: Sequence[Finished]) -> dict[str, Any]:
    """Usage over several prompts, each counted once however many choices it has."""
    each = [openai.usage(finished[i : i + (body.n or 1)]) for i in range(0, len(finished), body.n or 1)]
    total = {key: sum(one[key] for one in each) for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in each)
    return {**total, "prompt_tokens_details": {"cached_tokens": cached}}


async def _read(request: Request, body: type[B]) -> B:
    """The body, checked.

    Raises:
        RequestError: what is wrong and in which field.
    """
    try:
        return body.model_validate_json(await request.body())
    except ValidationError as error:
        raise from_validation(error) from error


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, (ClientGoneError, ClientDisconnect)):
        return Response(status_code=_CLIENT_GONE)
    path = request.url.path
    if isinstance(error, BodyError):
        return JSONResponse(
            error_body(path, error.status, str(error), code=error.code), error.status, {"connection": "close"}
        )
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        error = RequestError(f"{first['loc'][-1]}: {first['msg']}.", field=str(first["loc"][-1]))
    status, message, code, field = describe(error)
    if is_unforeseen(error):
        logger.error("a request failed", exc_info=error)
    return JSONResponse(error_body(path, status, message, code=code, field=field), status, headers_of(error))


async def _http_failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "there is nothing at this path; /openapi.json lists them.", 405: "this path takes another method."}
    message = said.get(error.status_code, str(error.detail))
    return JSONResponse(error_body(request.url.path, error.status_code, message), error.status_code, error.headers)


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The routes with the schemas of their bodies, which are read by `_read` and not by FastAPI."""
    if app.openapi_schema is None:
        bodies = (openai.ChatBody, openai.CompletionBody, anthropic.MessagesBody, anthropic.CountBody)
        _, schemas = models_json_schema(
            [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
        )
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        found.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        app.openapi_schema = found
    return app.openapi_schema
