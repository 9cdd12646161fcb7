"""Settings of a server, checked when they are made."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from moechat.errors import UsageError
from moechat.steps import MOST_DRAFT

DEFAULT_PORT = 8080
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of a server.

    Attributes:
        host: Address to listen on.
        port: Port; 0 takes a free one.
        api_key: Clients must send it; empty: they need none.
        origins: Web pages of other origins that may call the server: ``http://localhost:3000``.
        parallel: Answers at a time.
        queue: Requests that may wait.
        draft_tokens: Most tokens that are guessed at a time where a request does not say it.
        keep_alive_s: Seconds without a request after which the model is unloaded; ``None``: never.
        history: Path of the database of conversations, which the page shows and continues; ``None``: none.
        most_body: Bytes of a request's body.
        body_timeout_s: Seconds in which a body has to arrive.

    Raises:
        UsageError: Another address than loopback has no key.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str = ""
    origins: tuple[str, ...] = ()
    parallel: int = 1
    queue: int = 64
    draft_tokens: int = MOST_DRAFT
    keep_alive_s: float | None = None
    history: Path | None = None
    most_body: int = 32 << 20
    body_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.is_local and not self.api_key:
            raise UsageError(
                f"{self.host} can be reached from other machines, and there is no key",
                hint="give a file with one: --api-key-file FILE",
            )
        for origin in self.origins:
            scheme, found, rest = origin.partition("://")
            if scheme not in ("http", "https") or not found or not rest or "/" in rest:
                raise UsageError(f"{origin} is no origin", hint="an example is http://localhost:3000")

    @property
    def is_local(self) -> bool:
        """Only programs of this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def allows_host(self, header: str) -> bool:
        """Whether a ``Host`` header names this server.

        A page of another site can be made to resolve its own name to this address (DNS rebinding). A server
        that asks for a key is safe from that.
        """
        if self.api_key:
            return True
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
        return name.lower() in (*_LOCAL_NAMES, self.host)
