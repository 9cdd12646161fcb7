"""Shows one answer: the waiting line, the thinking, and the answer itself."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass

from moechat.chat.terminal.output import NullSink, PlainAnswer, Sink, Thoughts
from moechat.chat.terminal.waiting_line import WaitingLine
from moechat.errors import MoechatError


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

    Attributes:
        waiting: The line before the first text.
        answer: Sink for the answer.
        thoughts: Sink for the thinking.
    """

    def __init__(self, view: View) -> None:
        self.waiting = WaitingLine(
            sys.stderr, shown=view.waits and view.animated, busy="thinking" if view.answer else "answering"
        )
        thoughts: Sink = NullSink()
        if view.thoughts:
            thoughts = self.waiting.before(Thoughts(sys.stderr, dim=view.animated))
        self.thoughts = thoughts
        self.answer = self.waiting.before(_answer_sink(view)) if view.answer else NullSink()

    def end(self) -> None:
        """End the answer; may be called again.

        Raises:
            BrokenPipeError: The reader of stdout is gone.
            MoechatError: stdout cannot be written.
        """
        self.waiting.remove()
        self.answer.end()

    def end_quietly(self) -> None:
        """Like :meth:`end` after another error: errors of the output are ignored."""
        with suppress(MoechatError, OSError):
            self.end()


def _answer_sink(view: View) -> Sink:
    if not view.rendered:
        return PlainAnswer(sys.stdout)
    from moechat.chat.terminal.live_answer import MarkdownAnswer

    return MarkdownAnswer(sys.stdout)
