"""A request for an answer, and the events that come back to it from the thread that computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moechat.errors import MoechatError

if TYPE_CHECKING:
    from moechat import Engine, Stats, Step


@dataclass(frozen=True)
class Begun:
    """The prompt is encoded and fits; from here on only the computation can fail.

    Attributes:
        model: Name of the model that answers.
        prompt_tokens: Tokens of the prompt.
        prompt_end: Text of the prompt's last tokens, special ones too: a chat template may open a thought.
        token_text: Text of one token, special ones too.
        token_bytes: Bytes of one token.
    """

    model: str
    prompt_tokens: int
    prompt_end: str
    token_text: Callable[[int], str]
    token_bytes: Callable[[int], bytes]


@dataclass(frozen=True)
class Prefilled:
    """A part of the prompt is computed.

    Attributes:
        done: Tokens that are computed or were cached.
        total: Tokens of the prompt.
    """

    done: int
    total: int


@dataclass(frozen=True)
class Drawn:
    """A token.

    Attributes:
        step: The token with its text.
        stats: Of the answer so far; with the last step only.
    """

    step: Step
    stats: Stats | None = None


@dataclass(frozen=True)
class Failed:
    """No answer, or no more of it.

    Attributes:
        error: The reason.
    """

    error: Exception


@dataclass(frozen=True)
class Told:
    """What was asked about a model.

    Attributes:
        value: The answer.
    """

    value: Any


Event = Begun | Prefilled | Drawn | Failed | Told


class ServerBusyError(MoechatError):
    """The queue is full."""


class ServerClosingError(MoechatError):
    """The server ends."""


@dataclass(eq=False)
class Job:
    """One answer that a client waits for.

    Attributes:
        model: The name that the client gave; empty for the model that is loaded, or the first one.
        encode: Makes the token ids of the prompt; called in the thread that computes.
        options: Keyword arguments of ``Engine.generate_in_turns``; the grammar may be a function of
            the engine and the end of the prompt, called in that thread.
        counts_only: Only the number of tokens of the prompt is wanted: there is one event.
        ask: A question about the model instead; called in that thread, and :class:`Told` is the one event.
        arrived: On ``time.monotonic``'s clock.
    """

    model: str
    encode: Callable[[Engine], list[int]]
    options: dict[str, Any] = field(default_factory=dict)
    counts_only: bool = False
    ask: Callable[[Engine], Any] | None = None
    arrived: float = field(default_factory=time.monotonic)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    _cancelled: bool = False

    # ---- in the thread that computes

    @property
    def cancelled(self) -> bool:
        """The client has left."""
        return self._cancelled

    def tell(self, event: Event) -> None:
        """Send an event to the client's task."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._cancelled = True

    # ---- in the client's task

    async def next(self) -> Event:
        """The next event."""
        return await self._events.get()

    def cancel(self) -> None:
        """Nobody wants the answer any more; at most one token more is computed."""
        self._cancelled = True
