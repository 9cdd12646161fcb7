"""Follows one answer: from the worker's events to pieces of text, thinking and calls of tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from moechat.engine import FinishReason, Stats, Step
from moechat.reply_formats import (
    CallBroken,
    CallEnd,
    ReplyFormat,
    ReplyParser,
    Text,
    Tool,
    WholeReply,
    whole_reply,
)
from moechat.reply_formats import Event as ReplyEvent
from moechat.reply_formats.thinking import opens_thought
from moechat.serve.jobs import Begun, Drawn, Failed, Job, Prefilled

# Seconds between signs of life in a stream that has nothing to send.
_SIGN_OF_LIFE_S = 10.0


@dataclass(frozen=True)
class Piece:
    """What one token added to a reply.

    Attributes:
        events: Text, thinking and calls that became certain; may be empty.
        step: The token.
    """

    events: tuple[ReplyEvent, ...]
    step: Step


@dataclass(frozen=True)
class Waiting:
    """Nothing new for some seconds.

    Attributes:
        done: Tokens of the prompt that are computed.
        total: Tokens of the prompt.
    """

    done: int
    total: int


@dataclass
class Reply:
    """One answer, as it is read from the worker. Closing the iterator of :meth:`pieces` cancels it.

    Attributes:
        job: The request.
        begun: Facts about the prompt.
        parser: Separates thinking and calls; ``None``: all is text.
        finish_reason: The engine's; ``None`` until the end.
        stop: The stop text that ended it.
        stats: At the end.
        thought_tokens: Tokens of thinking, its marks included.
        in_thought: The last text was thinking; at the beginning: the prompt ends inside a thought.
    """

    job: Job
    begun: Begun
    parser: ReplyParser | None = None
    finish_reason: FinishReason | None = None
    stop: str | None = None
    stats: Stats | None = None
    thought_tokens: int = 0
    in_thought: bool = False
    _seen: list[ReplyEvent] = field(default_factory=list)

    async def pieces(self) -> AsyncIterator[Piece | Waiting]:
        """The pieces of the reply, to its end.

        Raises:
            Exception: The computation failed.
        """
        done, total = 0, self.begun.prompt_tokens
        try:
            while True:
                try:
                    event = await asyncio.wait_for(self.job.next(), _SIGN_OF_LIFE_S)
                except TimeoutError:
                    yield Waiting(done, total)
                    continue
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Prefilled):
                    done = event.done
                elif isinstance(event, Drawn):
                    yield self._piece(event)
                    if event.stats is not None:
                        return
        finally:
            if self.finish_reason is None:
                self.job.cancel()

    async def whole(self) -> tuple[WholeReply, list[Step]]:
        """Wait for the end.

        Raises:
            Exception: The computation failed.
        """
        steps = [piece.step async for piece in self.pieces() if isinstance(piece, Piece)]
        return whole_reply(self._seen), steps

    def _piece(self, drawn: Drawn) -> Piece:
        step = drawn.step
        events: list[ReplyEvent] = []
        if self.parser is None:
            events = [Text(step.text)] if step.text else []
        elif step.text:
            events = self.parser.feed(step.text)
        elif not step.stop:
            events = self.parser.special(self.begun.token_text(step.token_id))
        if drawn.stats is not None:
            if self.parser is not None:
                cut = step.finish_reason == "length"
                last = self.parser.end(cut=cut)
                events += _cut(last) if cut else last
            self.finish_reason, self.stop, self.stats = step.finish_reason, step.stop, drawn.stats
        self._seen += events
        if events:
            self.in_thought = any(isinstance(event, Text) and event.thought for event in events)
        self.thought_tokens += self.in_thought
        return Piece(tuple(events), step)


def _cut(events: list[ReplyEvent]) -> list[ReplyEvent]:
    """The last events of a reply that the limit has cut: a call that began ends there.

    A stream has sent its beginning and cannot take it back, so it is not told again as text.
    """
    for place, event in enumerate(events):
        if isinstance(event, CallBroken):
            return [*events[:place], CallEnd(event.index)]
    return events


def reply_of(job: Job, begun: Begun, format: ReplyFormat, tools: Sequence[Tool]) -> Reply:
    """The reply to messages; its thinking and its calls are separated."""
    thinking = opens_thought(begun.prompt_end, format)
    return Reply(job, begun, ReplyParser(format, tools, thinking=thinking), in_thought=thinking)
