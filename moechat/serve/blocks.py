"""A reply as a row of blocks: thinking, text, and calls of tools. Two of the protocols are made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from moechat.reply_formats import CallArguments, CallBegin, CallBroken, CallEnd, Event, Text
from moechat.serve.identifiers import new_id
from moechat.serve.replies import Piece, Reply

Kind = Literal["thinking", "text", "call"]


@dataclass
class Block:
    """One block.

    Attributes:
        kind: What it is.
        index: Its number in the reply, from 0.
        name: Of the tool.
        call_id: Of the call.
        pieces: The text, or the arguments as JSON text.
    """

    kind: Kind
    index: int
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; white space around thinking is no part of it."""
        text = "".join(self.pieces)
        return text.strip() if self.kind == "thinking" else text


@dataclass(frozen=True)
class Change:
    """What happens to a block.

    Attributes:
        what: It begins, grows, or is complete.
        block: The block after that.
        text: The piece that was added.
    """

    what: Literal["begin", "add", "end"]
    block: Block
    text: str = ""


class Blocks:
    """Makes blocks of the events of a reply.

    Attributes:
        all: The blocks so far; those without text are not kept.
    """

    # Invariant: at most the last block is open.
    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def feed(self, events: Iterable[Event]) -> list[Change]:
        """Add events; returns the changes in order."""
        changes: list[Change] = []
        for event in events:
            if isinstance(event, Text):
                self._add(changes, "thinking" if event.thought else "text", event.text)
            elif isinstance(event, CallBegin):
                self._close(changes)
                self._begin(
                    changes, Block("call", len(self.all), event.name, event.call_id or new_id("call"))
                )
            elif isinstance(event, CallArguments):
                assert self._open is not None
                self._open.pieces.append(event.text)
                changes.append(Change("add", self._open, event.text))
            elif isinstance(event, CallEnd):
                self._close(changes)
            elif isinstance(event, CallBroken):
                # The client has seen its beginning; what the model wrote follows as text.
                self._close(changes)
                self._add(changes, "text", event.source)
        return changes

    async def follow(self, reply: Reply) -> None:
        """Add all of a reply.

        Raises:
            Exception: The computation failed.
        """
        async for piece in reply.pieces():
            if isinstance(piece, Piece):
                self.feed(piece.events)
        self.end()

    def end(self) -> list[Change]:
        """The reply is complete."""
        changes: list[Change] = []
        self._close(changes)
        return changes

    def _add(self, changes: list[Change], kind: Kind, text: str) -> None:
        if self._open is None or self._open.kind != kind:
            self._close(changes)
            if not text.strip() and kind == "thinking":
                return
            self._begin(changes, Block(kind, len(self.all)))
        assert self._open is not None
        self._open.pieces.append(text)
        changes.append(Change("add", self._open, text))

    def _begin(self, changes: list[Change], block: Block) -> None:
        self.all.append(block)
        self._open = block
        changes.append(Change("begin", block))

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Change("end", self._open))
            self._open = None
