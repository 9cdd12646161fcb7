"""Receives what a reader finds out about calls, and emits events."""

from __future__ import annotations

from collections.abc import Callable

from moechat.reply_formats.events import CallArguments, CallBegin, CallBroken, CallEnd, Event, Text
from moechat.reply_formats.source import Source


class CallSink:
    """Numbers calls, and remembers the text of the one that is being read.

    Args:
        source: Of the reply.
        emit: Receives events.
        began: Called when a call begins.
        hold: Emit a call only when it is complete.

    Attributes:
        start: Where the call that is being read begins, or the text behind the last complete one.
        complete: Calls that are complete since :meth:`attempt`.
        open: A call has begun.
    """

    def __init__(
        self, source: Source, emit: Callable[[Event], None], began: Callable[[], None], *, hold: bool
    ) -> None:
        self._source = source
        self._emit = emit
        self._began = began
        self._hold = hold
        self._held: list[Event] = []
        self._index = 0
        self._prefix = ""
        self.start = 0
        self.complete = 0
        self.open = False

    def attempt(self, start: int, prefix: str) -> None:
        """Calls may follow.

        Args:
            start: Where the mark that begins them stands.
            prefix: Text before it that belongs to the first call.
        """
        self.start, self._prefix, self.complete = start, prefix, 0

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call begins; everything before its arguments is well-formed."""
        self.open = True
        self._began()
        self._pass(CallBegin(self._index, name, call_id))

    def arguments(self, text: str) -> None:
        """A piece of the arguments."""
        if text:
            self._pass(CallArguments(self._index, text))

    def end(self) -> None:
        """The call is complete up to the position of the source."""
        self._pass(CallEnd(self._index))
        for event in self._held:
            self._emit(event)
        self._close()
        self.complete += 1
        self._index += 1

    def broken(self) -> None:
        """The call that began goes no further than the position of the source."""
        source = self._prefix + self._source.raw(self.start, self._source.at)
        if self._hold:
            if not self._source.cut_short:
                self._emit(Text(source))
        else:
            self._emit(CallBroken(self._index, source))
            self._index += 1
        self._close()

    def _close(self) -> None:
        self._held.clear()
        self.open = False
        self.start, self._prefix = self._source.at, ""

    def _pass(self, event: Event) -> None:
        if self._hold:
            self._held.append(event)
        else:
            self._emit(event)
