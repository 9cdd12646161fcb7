"""Shows one answer: the waiting line, the thinking, and the answer itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from moechat.chat.terminal.output import NullSink, PlainAnswer, Sink, Thoughts
from moechat.chat.terminal.waiting_line import WaitingLine
from moechat.errors import MoechatError

if TYPE_CHECKING:
    from moechat.chat.terminal.live_map import LiveMap
    from moechat.steps import Step


@dataclass(frozen=True)
class View:
    """How an answer is shown.

    Attributes:
        answer: Show the answer; otherwise it is only collected.
        rendered: Render markdown; stdout must be a terminal that can move its cursor.
        thoughts: Show the thinking on stderr.
        animated: stderr is a terminal that can redraw and dim a line.
        waits: Show a waiting line before the first text, if animated.
    """

    answer: bool = True
    rendered: bool = False
    thoughts: bool = True
    animated: bool = False
    waits: bool = False


class AnswerDisplay:
    """The outputs of one answer.

    Args:
        view: How it is shown.
        live: A map below it; ``None``: no map.

    Attributes:
        waiting: The line before the first text.
        answer: Sink for the answer.
        thoughts: Sink for the thinking.
    """

    def __init__(self, view: View, live: LiveMap | None = None) -> None:
        self._live = live
        self.waiting = WaitingLine(
            sys.stderr, shown=view.waits and view.animated, busy="thinking" if view.answer else "answering"
        )
        thoughts: Sink = NullSink()
        if view.thoughts:
            stream, wrap = _place(sys.stderr, live)
            thoughts = self.waiting.before(Thoughts(stream, dim=view.animated, wrap=wrap))
        self.thoughts = thoughts
        self.answer = self.waiting.before(_answer_sink(view, live)) if view.answer else NullSink()

    def following(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps of the answer; the map, if there is one, is refreshed between them."""
        return steps if self._live is None else self._live.following(steps)

    def moved(self) -> None:
        """Another program wrote to the terminal: the cursor is now at the beginning of a row."""
        self.answer.moved()
        if self._live is not None:
            self._live.moved()

    def end(self) -> None:
        """End the answer; may be called again.

        Raises:
            BrokenPipeError: The reader of stdout is gone.
            MoechatError: stdout cannot be written.
        """
        self.waiting.remove()
        try:
            self.answer.end()
        finally:
            if self._live is not None:
                self._live.end()

    def end_quietly(self) -> None:
        """Like :meth:`end` after another error: errors of the output are ignored."""
        with suppress(MoechatError, OSError):
            self.end()


def _answer_sink(view: View, live: LiveMap | None) -> Sink:
    stream, wrap = _place(sys.stdout, live)
    if not view.rendered:
        return PlainAnswer(stream, wrap)
    from moechat.chat.terminal.live_answer import MarkdownAnswer

    return MarkdownAnswer(stream, None if live is None else live.size)


def _place(stream: TextIO, live: LiveMap | None) -> tuple[TextIO, Callable[[str], str] | None]:
    """The stream for text, and how its lines are broken, where there may be a map below it."""
    if live is None:
        return stream, None
    above = live.over(stream)
    if above is stream:  # a pipe
        return stream, None
    from moechat.chat.terminal.live_answer import wrapping

    return above, wrapping(live.size)
