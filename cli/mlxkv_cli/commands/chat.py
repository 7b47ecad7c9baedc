"""`mlxkv chat MODEL`: a conversation in the terminal, with a line after each reply that says what was reused."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from mlxkv_cli.caching import cache_config, open_cache
from mlxkv_cli.options import CacheDir, Cold, Hot, Json, KvBits, Log, LogText, NoCold
from mlxkv_cli.output import Output

if TYPE_CHECKING:
    from mlxkv.engine.chat import Chat, Sampling


def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A directory, a .gguf file, a hub id, or smollm2-135m.")
    ],
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="Ask this one thing and stop.")] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", metavar="DIR", help="A LoRA adapter of mlx-lm.")] = None,
    temp: Annotated[
        float, typer.Option("--temp", metavar="NUMBER", help="Temperature; 0 takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option("--top-p", metavar="NUMBER", help="Sample from the likeliest tokens that add up to this."),
    ] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Most tokens in a reply.")] = 512,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Makes sampling repeatable.")] = None,
    kv_bits: KvBits = None,
    paranoid: Annotated[
        bool, typer.Option("--paranoid", metavar="", help="Read the weights again to tell whether they changed.")
    ] = False,
    cache_dir: CacheDir = None,
    hot: Hot = None,
    cold: Cold = None,
    no_cold: NoCold = False,
    log: Log = None,
    log_text: LogText = False,
    as_json: Json = False,
) -> None:
    """Chat with a model whose prompts are never computed twice.

    Ctrl-C stops a reply and keeps the conversation; Ctrl-D ends it.
    """
    from mlxkv.core.errors import UsageError
    from mlxkv.engine.chat import Chat, Sampling
    from mlxkv.models.loader import load

    output = Output(json=as_json)
    if as_json and prompt is None:
        raise UsageError("--json needs --prompt: a conversation is not one object; add --prompt TEXT.")
    if prompt is not None and not prompt.strip():
        raise UsageError("--prompt is empty; write what you want to ask.")
    sampling = Sampling(temp, top_p, max_tokens, seed)
    config = cache_config(cache_dir, hot, cold, no_cold, log)
    output.say(f"mlxkv: loading {model} ...", "dim")
    loaded = load(model, adapter=adapter, paranoid=paranoid)
    with open_cache(loaded, config, output, kv_bits=kv_bits) as cache:
        conversation = Chat(loaded, cache, system=system, log_text=log_text)
        if prompt is not None:
            if not _answer(output, conversation, prompt, sampling):
                raise typer.Exit(130)
        else:
            _converse(output, conversation, sampling)


def _converse(output: Output, conversation: Chat, sampling: Sampling) -> None:
    if output.interactive:
        output.say("Ctrl-C stops a reply, Ctrl-D ends the chat.", "dim")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editing and history
    for text in _lines(output):
        _answer(output, conversation, text, sampling)


def _lines(output: Output) -> Iterator[str]:
    """What the user says, a line each, until Ctrl-D; Ctrl-C at the prompt only clears the line."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            output.say("")
            continue
        if text.strip():
            yield text


def _answer(output: Output, conversation: Chat, text: str, sampling: Sampling) -> bool:
    """Show the reply as it comes and the request line after it; False when it was stopped."""
    from mlxkv.cache.block_log import as_fields
    from mlxkv.core.errors import DeviceError, UsageError
    from mlxkv.prompt_cache.block_cache import request_line

    said, whole = "", True
    pieces = conversation.reply(text, sampling)
    try:
        for piece in pieces:
            said += piece
            output.write(piece)
    except KeyboardInterrupt:
        whole = False
        pieces.close()  # type: ignore[attr-defined]
        output.say(" [stopped]", "dim")
    except (UsageError, DeviceError) as error:
        if output.json or not output.interactive:
            raise
        if said:
            output.write("\n")
        output.say(f"mlxkv: {error}")
        return True
    event = conversation.event
    if event is None:
        return whole  # stopped before anything was asked of the model
    output.write("\n")
    if output.json:
        output.result("", text=said, request=as_fields(event))
    else:
        output.say(request_line(event), "dim")
    return whole
