"""`mlxkv serve MODEL`: an OpenAI- and Anthropic-compatible server with a line for every request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from mlxkv_cli.caching import cache_config, warnings_on
from mlxkv_cli.options import CacheDir, Cold, Hot, KvBits, Log, LogText, NoCold, size
from mlxkv_cli.output import Output

if TYPE_CHECKING:
    from mlxkv.cache.block_log import RequestEvent
    from mlxkv.engine.engine import Engine

LONG_PREFILL_S = 1.0
LOOK_S = 0.25

Memory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        parser=size,
        help="Most that running sequences may hold together. Without it, what the model and the hot tier leave.",
    ),
]


def serve(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, a hub id, or smollm2-135m.")],
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8080,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="MLXKV_API_KEY",
            help="Ask every request for it; may be given again. Needed for a --host that others can reach.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="NAME", help="Another name this server is called by.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", metavar="ORIGIN", help="Pages of this origin may call, from a browser."),
    ] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", metavar="DIR", help="A LoRA adapter of mlx-lm.")] = None,
    sequences: Annotated[int, typer.Option("--sequences", metavar="N", min=1, help="Most that run at once.")] = 8,
    queue: Annotated[int, typer.Option("--queue", metavar="N", min=1, help="Most that wait; more get a 429.")] = 64,
    memory: Memory = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            "--prefill-chunk",
            metavar="TOKENS",
            min=64,
            help="Prompt tokens a step, at most: fewer deep in a long prompt. Default: 2,048; 256 on a CPU.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Most tokens of a reply that does not say.")
    ] = 2048,
    temp: Annotated[float, typer.Option("--temp", metavar="NUMBER", help="Temperature where none is asked for.")] = 0.0,
    drain: Annotated[
        float, typer.Option("--drain", metavar="SECONDS", min=0, help="How long Ctrl-C lets running requests go on.")
    ] = 30.0,
    kv_bits: KvBits = None,
    cache_dir: CacheDir = None,
    hot: Hot = None,
    cold: Cold = None,
    no_cold: NoCold = False,
    log: Log = None,
    log_text: LogText = False,
    tui: Annotated[
        bool, typer.Option("--tui", metavar="", help="Show the tiers and requests, as `mlxkv top` does.")
    ] = False,
) -> None:
    """Serve a model whose prompts are never computed twice, to any OpenAI or Anthropic client.

    The first Ctrl-C lets running requests finish and writes what waits; a second one leaves at once.
    """  # fmt: skip
    from dataclasses import replace

    from mlxkv.cache.store import BlockStore
    from mlxkv.core.units import format_bytes
    from mlxkv.engine.engine import Engine, Opened
    from mlxkv.engine.memory import share_memory
    from mlxkv.engine.scheduler import Limits
    from mlxkv.engine.wiring import wire_weights
    from mlxkv.models.loader import load
    from mlxkv.prompt_cache.block_cache import BlockCache, request_line
    from mlxkv.server.app import create_app
    from mlxkv.server.http.run import bound, serve
    from mlxkv.server.monitoring.metrics import Metrics
    from mlxkv.server.settings import Settings

    output = Output()
    names = (model, model.rstrip("/").rpartition("/")[2], "default", "default_model")
    settings = Settings(
        host=host, port=port, names=names, api_keys=tuple(api_key or ()), allow_hosts=tuple(allow_host or ()),
        allow_origins=tuple(allow_origin or ()), max_tokens=max_tokens, temperature=temp, log_text=log_text,
    )  # fmt: skip
    metrics = Metrics()
    config = cache_config(cache_dir, hot, cold, no_cold, log)

    def open_model() -> Opened:
        loaded = load(model, adapter=adapter)
        shares = share_memory(loaded, hot_bytes=hot, chunk_tokens=prefill_chunk)
        if shares.runtime is not None:
            measured = f"{format_bytes(shares.runtime.bytes)} with {shares.runtime.model}"
            output.say(f"mlxkv: runtime share as measured on this machine: {measured}", "dim")
        wiring = wire_weights()
        store = BlockStore(replace(config, hot_bytes=shares.hot_bytes))
        store.log.listener = metrics.on_event
        cache = BlockCache(loaded.module, loaded.fields, store, name=loaded.name, kv_bits=kv_bits)
        limits = Limits(sequences=sequences, queue=queue, memory_bytes=memory or shares.live_bytes)
        return Opened(loaded, cache, limits, shares.chunks, wiring)

    def told(event: RequestEvent) -> None:
        if not tui:
            saved = engine.status.saved_bytes
            shared = f"; {format_bytes(saved)} saved by sharing prefixes" if saved else ""
            output.say(f"{time.strftime('%H:%M:%S')}  {request_line(event)}{shared}")

    engine = Engine(open_model, on_request=told)
    with bound(settings) as listening, warnings_on(output):
        output.say(f"mlxkv: loading {model} ...", "dim")
        engine.start()
        settings = replace(settings, port=listening.getsockname()[1])
        opened = engine.opened
        if opened.cache.uncached:
            output.warn(opened.cache.uncached)
        output.say(
            f"mlxkv: {opened.model.name}; hot tier {format_bytes(opened.cache.store.hot.budget_bytes)},"
            f" running sequences {format_bytes(opened.limits.memory_bytes or 0)},"
            f" prefill chunk {opened.chunks}; {opened.wiring}",
            "dim",
        )
        address = f"http://{'[' + host + ']' if ':' in host else host}:{settings.port}"
        greeting = _greeting(address, opened.model.name, bool(settings.api_keys))
        with _watched(engine, output, tui=tui, address=address, api_key=api_key[0] if api_key else None):
            lost = serve(
                create_app(engine, settings, metrics),
                engine,
                settings,
                listening,
                drain_s=drain,
                on_listening=lambda: output.result(greeting),
            )
    if lost:
        output.warn(f"{lost} blocks did not reach the SSD and will be computed again")


def _greeting(address: str, model: str, needs_key: bool) -> str:
    key = ' -H "Authorization: Bearer $MLXKV_API_KEY"' if needs_key else ""
    return (
        f"listening on {address}   OpenAI: {address}/v1   Anthropic: {address}   dashboard: {address}/\n\n"
        f"  curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'\n'
    )


@contextmanager
def _watched(engine: Engine, output: Output, *, tui: bool, address: str, api_key: str | None) -> Iterator[None]:
    """A picture of what runs on stderr, while the body does: everything, or only long prefills."""
    from mlxkv_cli.top import show

    stop = threading.Event()
    if tui:
        work = threading.Thread(target=show, args=(output, address, api_key, stop), name="mlxkv-top", daemon=True)
    else:
        work = threading.Thread(target=_show_prefills, args=(engine, output, stop), name="mlxkv-progress", daemon=True)
    work.start()
    try:
        yield
    finally:
        stop.set()
        work.join()


def _show_prefills(engine: Engine, output: Output, stop: threading.Event) -> None:
    with output.prefills() as update:
        while not stop.wait(LOOK_S):
            now = time.time()
            running = engine.status.running
            long = [one for one in running if one.phase == "prefill" and now - one.since > LONG_PREFILL_S]
            update([(one.request, one.done_tokens, one.prompt_tokens) for one in long])
