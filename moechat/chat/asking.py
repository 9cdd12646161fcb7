"""Asks the model: what of the conversation it is told, and how one answer is taken."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from moechat.chat.reply import opens_thought
from moechat.errors import PromptTooLongError

if TYPE_CHECKING:
    from types import FrameType

    from moechat import Engine, Step
    from moechat.chat.conversation import Conversation
    from moechat.chat.settings import Generation

# What an answer needs to be worth reading; a long conversation loses its oldest turns before it gets less.
ANSWER_TOKENS = 256


class Asked(NamedTuple):
    """An answer that can begin.

    Attributes:
        steps: The engine's.
        thinking: The prompt has opened a thought.
        told_from: The first turn of the conversation that the model is told.
    """

    steps: Iterator[Step]
    thinking: bool
    told_from: int


def ask(engine: Engine, conversation: Conversation, question: str, generation: Generation) -> Asked:
    """Start an answer; without the oldest turns when the conversation leaves too little room for it.

    The question alone may take all but one token of the context.

    Raises:
        PromptTooLongError: The question alone is too long.
        UsageError: The chat template refuses the messages, or a setting is out of range.
    """
    wanted = int(generation.value("max_tokens") or ANSWER_TOKENS)
    reserve = max(1, min(wanted, engine.context_length // 4))
    opening = conversation.opening()
    asked = {"role": "user", "content": question}
    for told_from in range(conversation.told_from, len(conversation.turns) + 1):
        told = [
            message
            for turn in conversation.turns[told_from:]
            for message in (
                {"role": "user", "content": turn.question},
                {"role": "assistant", "content": turn.answer},
            )
        ]
        alone = told_from == len(conversation.turns)
        prompt = engine.encode([*opening, *told, asked])
        try:
            steps = engine.generate(prompt, reserve=1 if alone else reserve, **generation.arguments)
        except PromptTooLongError:
            if alone:
                raise  # it is the question itself; the conversation stays as it is
            continue
        return Asked(steps, opens_thought(engine, prompt), told_from)
    raise AssertionError("the last try is with the question alone")


class OneInterrupt:
    """Lets the first Ctrl-C interrupt; what follows it is short, and comes out whole."""

    def over(self) -> None:
        """From now on none interrupts: nothing is left that takes long."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.over()
        raise KeyboardInterrupt

    @contextmanager
    def watching(self) -> Iterator[OneInterrupt]:
        """For as long as an answer and what belongs to it take."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self._first)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)
