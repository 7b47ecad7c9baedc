"""What every API that generates stands on: the engine and its model, the settings, and the calls they queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxkv.blocklog.outline import Outliner, load_key
from mlxkv.engine.engine import Engine
from mlxkv.engine.request import Request
from mlxkv.models.loader import LoadedModel
from mlxkv.server.generation.call import Call
from mlxkv.server.generation.prepare import chat_requests, count_tokens, text_requests, warm_up
from mlxkv.server.generation.wish import Wish
from mlxkv.server.http.errors import RequestError
from mlxkv.server.settings import Settings


class Service:
    """Owner: the event loop; only `Engine`'s own methods reach the engine's thread."""

    def __init__(self, engine: Engine, settings: Settings, between_tokens: Callable[[float], None]) -> None:
        """Serve an engine that has started.

        Args:
            between_tokens: hears of the seconds between two tokens of a reply.
        """
        self.settings = settings
        self.started = time.time()
        self._engine = engine
        self._between_tokens = between_tokens
        self._outliner = Outliner(engine.model.tokenizer, key=load_key())
        warm_up(engine.model, settings, self._outliner)

    @property
    def model(self) -> LoadedModel:
        return self._engine.model

    @property
    def keeps_blocks(self) -> bool:
        """Whether what a request computes is kept where it does not say."""
        return self._engine.cache.keeps_blocks

    def check_model(self, name: str | None) -> None:
        """Raise unless a name is one of the served model's; nothing is ever looked up or loaded for it."""
        own = self.model.name
        known = {own, *self.settings.names}
        if name and name.rstrip("/").casefold() not in {one.rstrip("/").casefold() for one in known}:
            raise RequestError(
                f"this server has {own} and no model {name[:80]!r}; leave `model` out, or use that name.",
                field="model", code="model_not_found", status=404,
            )  # fmt: skip

    def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template: Mapping[str, Any],
        wish: Wish,
    ) -> list[Request]:
        """The requests of a conversation; raises as `chat_requests`."""
        return chat_requests(self.model, self.settings, messages, tools, template, wish, self._outliner)

    def of_prompts(self, prompts: Sequence[str | Sequence[int]], wish: Wish) -> list[Request]:
        """The requests of plain prompts; raises as `text_requests`."""
        return text_requests(self.model, self.settings, prompts, wish)

    def count_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template: Mapping[str, Any],
    ) -> int:
        """Tokens of a conversation as `of_chat` would send it."""
        return count_tokens(self.model, messages, tools, template)

    def queue(self, requests: Sequence[Request]) -> Call:
        """Queue the choices of one HTTP request.

        Raises:
            MlxkvError: the engine takes none of them.
        """
        return Call(self._engine, requests, self._between_tokens)
