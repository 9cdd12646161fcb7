"""Splits a reply, while it arrives, into answer, thinking and calls of tools."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence

from moechat.reply_formats.call_sink import CallSink
from moechat.reply_formats.channels import CHANNEL, CHANNEL_MARKS, END, START, read_messages
from moechat.reply_formats.events import Event, Text
from moechat.reply_formats.known_marks import THINK
from moechat.reply_formats.notations import ReplyFormat
from moechat.reply_formats.readers import read_calls
from moechat.reply_formats.source import LEAST_PART, SPACE, MalformedError, Marks, Reading, Source
from moechat.reply_formats.tools import Tool

# What a call begins with up to its first mark or bracket; a name is one word.
_HEAD = re.compile(r"""[^<\[({|｜"'=>`]*""")
# The name in a call without a mark, and what ends it.
_BARE_NAME = re.compile(r"""(?:"(?:tool_)?name"\s*:\s*"|^\s*\[\s*)([\w.-]+)(["(]?)""")


class ReplyParser:
    """Turns the text of one reply, in pieces of any size, into events.

    The events do not depend on where the pieces end, except for how text and arguments are cut
    (:func:`moechat.reply_formats.merged` joins them). Text is emitted as soon as it is certain.

    - The answer loses white space after a thought and around calls; chat templates write it again.
    - A call that is malformed stays text, as the model wrote it; the calls behind it are read. If that turns
      out after its ``CallBegin``, there is a ``CallBroken`` instead of a ``CallEnd``.
    - A call whose arguments are certainly complete at the end of the reply is complete, even without its last
      mark: behind JSON it is not needed, behind tags it is. A part of the mark there is dropped.
    - A name that none of the tools has is still a call: the client decides. The exception are calls without
      any mark (Llama): an answer may be JSON too, so it is a call only if it names a tool.
    - A call within a thought ends the thought: models forget the mark that does.
    - A thought of white space alone is none: some models write an empty one if they do not think.
    - If the limit of tokens cuts a call before its arguments begin, its beginning is dropped: it is neither a
      call nor text. So is a cut mark of calls. A mark that other words follow stays text.

    Args:
        format: How the model writes.
        tools: The request's tools. Without any, calls are left in the text.
        thinking: The prompt ends inside a thought.
        hold_calls: Emit a call only when it is complete. Then there is never a ``CallBroken``, and every
            malformed call stays text; but arguments come late.
    """

    def __init__(
        self,
        format: ReplyFormat,
        tools: Sequence[Tool] = (),
        *,
        thinking: bool = False,
        hold_calls: bool = False,
    ) -> None:
        self._thoughts = format.thoughts or (THINK if thinking else ())
        self._calls = format.calls if tools else None
        self._tools = {tool.name: tool for tool in tools}
        self._source = Source()
        self._events: list[Event] = []
        self._sink = CallSink(self._source, self._events.append, self._begin_call, hold=hold_calls)
        # Closing marks of the thought that is open. If the prompt has opened it, any of the format's.
        self._closes = frozenset(thought.close for thought in self._thoughts if thinking)
        self._pending = ""  # white space and frames of calls: emitted if text follows, not if a call does
        self._thinks = False  # the thought that is open has text
        self._answer = format.answer
        self._in_answer = False  # the answer stands between marks, and the first has been read
        self._cut_off: frozenset[str] = frozenset()  # closing marks of a thought that a call ended
        self._follows: str = ""  # "thought" or "call": white space is dropped
        calls = self._calls
        opens = tuple(thought.open for thought in self._thoughts)
        closes = tuple(thought.close for thought in self._thoughts)
        self._thought_marks = frozenset(opens + closes)
        searched = opens + closes + self._answer[1:]
        if calls is not None:
            searched += calls.begins + calls.frames + calls.closers
        self._marks = Marks(searched)
        self._call_marks = Marks(() if calls is None else calls.begins + calls.frames + calls.closers)
        # Where the prompt ends within the header of a message, the reply may go on with its recipient.
        self._channels = (
            (CHANNEL, START, "to=") if calls is not None else (CHANNEL, START)
        ) * format.channels
        inner = calls.inner if calls is not None else ()
        self._known = frozenset(searched + self._answer + inner + (CHANNEL, START) * format.channels)
        self._run: Generator[None, None, None] | None = self._reply()
        self._advance()

    def feed(self, text: str) -> list[Event]:
        """Add text; returns the events that are now certain."""
        self._source.add(text)
        return self._advance()

    def special(self, mark: str) -> list[Event]:
        """Add a special token, which tokenizers leave out of text; ignored if the format does not use it."""
        if mark in self._known:
            self._source.add(mark, special=True)
        return self._advance()

    def end(self, *, cut: bool = False) -> list[Event]:
        """The events that were held back, at the end of the reply; nothing may be added afterwards.

        Args:
            cut: A limit of tokens has ended the reply.
        """
        self._source.ended, self._source.cut = True, cut
        return self._advance()

    def _advance(self) -> list[Event]:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None
        events = self._events[:]
        self._events.clear()
        return events

    def _reply(self) -> Generator[None, None, None]:
        if (yield from self._beginning()):
            return
        while mark := (yield from self._source.pass_to(self._marks, self._text, forget=True)):
            yield from self._at_mark(mark)
        if self._source.cut and self._frame_is_pending():  # a call was to follow
            self._pending = ""
        self._flush()

    def _beginning(self) -> Reading[bool]:
        """A thought, a call without a mark, or messages in channels; returns whether all has been read."""
        source = self._source
        yield from source.space()
        opens = [thought.open for thought in self._thoughts]
        mark = (yield from source.take(*opens, *self._channels)) if opens or self._channels else ""
        if mark in self._channels or (self._channels and not opens):
            if not mark:
                source.at = 0
            self._known |= frozenset(CHANNEL_MARKS)
            with_calls = self._calls is not None
            yield from read_messages(
                source, self._sink, self._message_text, mark or END, with_calls=with_calls
            )
            return True
        self._known -= frozenset(self._channels)  # other models end an answer with such a mark
        if mark:  # where the prompt has opened the thought already, the model repeats the mark
            yield from self._open_thought(mark)
        elif self._closes:
            source.at = 0
        else:
            self._pending = source.raw(0, source.at)
            yield from self._begin_answer()
        return False

    def _at_mark(self, mark: str) -> Reading[None]:
        source, calls = self._source, self._calls
        if mark in self._closes:
            if self._pending.strip():
                self._flush()
            self._pending = ""
            self._closes, self._follows = frozenset(), "thought"
            yield from source.space()
            yield from self._begin_answer()
        elif self._in_answer and mark == self._answer[-1]:
            self._pending, self._in_answer, self._follows = "", False, "call"
        elif mark in self._cut_off:
            self._cut_off = frozenset()
        elif calls is not None and mark in calls.begins:
            yield from self._call(mark)
        elif calls is not None and mark in calls.frames:
            self._pending += mark
            self._follows = ""
        elif calls is not None and mark in calls.closers and self._follows == "call":
            pass
        elif mark not in self._thought_marks or not source.is_special(source.at - len(mark), source.at):
            self._text(mark)
        elif not self._closes and any(
            thought.anywhere and mark == thought.open for thought in self._thoughts
        ):
            yield from self._open_thought(mark)

    def _open_thought(self, mark: str) -> Reading[None]:
        thought = next(thought for thought in self._thoughts if thought.open == mark)
        if thought.label:
            yield from self._source.take(thought.label)
        self._flush()
        self._closes, self._thinks = frozenset({thought.close}), False

    def _begin_answer(self) -> Reading[None]:
        """The mark of the answer's beginning, or a call without a mark."""
        if self._answer and (yield from self._source.take(self._answer[0])):
            self._pending, self._in_answer, self._follows = "", True, "thought"
        if self._calls is not None and self._calls.bare_begin:
            first = yield from self._source.peek()
            if first and first in self._calls.bare_begin:
                yield from self._call("")

    def _call(self, mark: str) -> Reading[None]:
        """Read the calls behind a mark; a malformed one becomes text."""
        source, sink, calls = self._source, self._sink, self._calls
        assert calls is not None
        begin = source.at - len(mark)
        sink.attempt(begin, self._pending)
        source.ran_out = False
        try:
            yield from read_calls(source, sink, calls, mark, self._tools)
        except MalformedError:
            if sink.open:
                if source.cut_short:
                    source.skip_rest()
                sink.broken()
                self._follows = ""
            elif source.cut_short and self._began_call(source.rest(begin + len(mark)), mark):
                self._pending = ""
                source.skip_rest()
            elif sink.complete:
                source.at = sink.start
            else:
                source.at = begin + len(mark)
                self._text(mark)

    def _began_call(self, written: str, mark: str) -> bool:
        """Whether the text behind a mark is the beginning of a call, not of other words.

        Args:
            written: The text, to the end of the reply.
            mark: The mark; empty at the beginning of a reply.
        """
        if mark or self._sink.complete:
            head = _HEAD.match(written.strip(SPACE))
            return head is None or len(head.group().split()) <= 1
        name = _BARE_NAME.search(written)
        if name is None:
            return False
        if name[2]:
            return name[1] in self._tools
        return len(name[1]) >= LEAST_PART and any(tool.startswith(name[1]) for tool in self._tools)

    def _begin_call(self) -> None:
        """A call has begun: the white space before it is dropped, and it ends a thought."""
        self._cut_off |= self._closes
        self._pending, self._closes, self._follows = "", frozenset(), "call"

    def _text(self, piece: str) -> None:
        """Emit text; white space at its end waits until it is known what follows."""
        if self._source.cut:  # where a call is likely, any part of a mark is one
            least = 1 if self._follows == "call" or self._frame_is_pending() else LEAST_PART
            piece = self._source.without_part(piece, self._call_marks, least)
        if self._closes:
            if not piece.strip(SPACE) and (self._pending or not self._thinks):
                self._pending += piece
            else:
                self._emit(self._pending + piece)
                self._pending, self._thinks = "", True
            return
        if self._follows:
            if self._cuts_closer(piece):
                return
            piece = piece.lstrip(SPACE)
        body = piece.rstrip(SPACE)
        if body:
            self._follows = ""
            self._emit(self._pending + body)
            self._pending = piece[len(body) :]
        elif not self._follows:
            self._pending += piece

    def _frame_is_pending(self) -> bool:
        return self._calls is not None and any(frame in self._pending for frame in self._calls.frames)

    def _cuts_closer(self, piece: str) -> bool:
        """Whether the text, behind a call and at the end of the reply, is a part of the mark behind it."""
        source, mark = self._source, piece.strip(SPACE)
        if self._calls is None or self._follows != "call" or not source.ended:
            return False
        begin = source.at
        source.at += piece.find(mark)
        cut = source.ends_within(self._calls.closers)
        source.at = begin
        return cut

    def _message_text(self, text: str, thought: bool) -> None:
        self._events.append(Text(text, thought))

    def _flush(self) -> None:
        self._emit(self._pending)
        self._pending = ""

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(Text(text, thought=bool(self._closes)))
