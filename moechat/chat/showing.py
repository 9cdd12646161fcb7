"""Where one answer is shown: the answer, its thoughts, and what is awaited before either."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass

from moechat.chat.output import Answer, Nowhere, Sink, Thoughts
from moechat.chat.waiting import Waiting
from moechat.errors import MoechatError


@dataclass(frozen=True)
class View:
    """What of an answer is shown, and how.

    Attributes:
        answer: The answer itself; else it is only collected.
        rendered: Its markdown is rendered: stdout is a terminal that can move its cursor.
        thoughts: What the model thinks first, on stderr.
        animated: stderr is a terminal that can redraw a line, and dim.
        waits: Where it can, it says what is awaited.
    """

    answer: bool = True
    rendered: bool = False
    thoughts: bool = True
    animated: bool = False
    waits: bool = False


class Showing:
    """One answer as it is shown.

    Attributes:
        waiting: The line before it.
        answer: Where the answer goes.
        thoughts: Where thoughts go.
    """

    def __init__(self, view: View) -> None:
        self.waiting = Waiting(
            sys.stderr, shown=view.waits and view.animated, then="thinking" if view.answer else "answering"
        )
        thoughts: Sink = Nowhere()
        if view.thoughts:
            thoughts = self.waiting.before(Thoughts(sys.stderr, dim=view.animated))
        self.thoughts = thoughts
        self.answer = self.waiting.before(_sink(view)) if view.answer else Nowhere()

    def end(self) -> None:
        """The answer has ended; harmless when repeated.

        Raises:
            BrokenPipeError: Nobody reads it any more.
            MoechatError: It cannot be written.
        """
        self.waiting.over()
        self.answer.end()

    def end_somehow(self) -> None:
        """The same where something else went wrong already, and is told."""
        with suppress(MoechatError, OSError):
            self.end()


def _sink(view: View) -> Sink:
    if not view.rendered:
        return Answer(sys.stdout)
    from moechat.chat.live import MarkdownAnswer

    return MarkdownAnswer(sys.stdout)
