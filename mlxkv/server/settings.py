"""What a server may be told; checked before anything is loaded."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from mlxkv.core.errors import UsageError
from mlxkv.core.units import MIB

DEFAULT_PORT = 8080
MOST_BODY_BYTES = 32 * MIB
MOST_HEADER_BYTES = 65_536
READ_DEADLINE_S = 30.0
FIRST_PING_S, PING_S = 0.8, 4.0
MOST_CHOICES = 16


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A server's settings.

    Args:
        names: what a request may call the model, besides its own name.
        api_keys: one of them must come with every request; none is asked for when empty.
        allow_hosts: more names this server may be called by, in the Host header.
        allow_origins: pages of these origins may call it from a browser.
        max_tokens: most tokens of a reply that does not say.
        temperature: of a request that does not say.
        log_text: put the prompts' text into the block log and into `/v1/cache/requests`.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    max_tokens: int = 2048
    temperature: float = 0.0
    log_text: bool = False
    read_deadline_s: float = READ_DEADLINE_S
    most_body_bytes: int = MOST_BODY_BYTES

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.api_keys:
            raise UsageError(
                f"--host {self.host} can be reached by other machines; add --api-key KEY, or leave --host out."
            )
        if any(not key.strip() or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise UsageError("an API key is empty or has characters no header can carry; choose printable ASCII.")
        if self.max_tokens < 1:
            raise UsageError(f"--max-tokens is {self.max_tokens}; it is at least 1.")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
