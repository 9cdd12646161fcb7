"""A conversation: its turns, and what of them the model is told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from moechat.chat.neutral import one_line

Mark = Literal["", "stopped", "cut", "failed"]
MARKS: dict[str, str] = {
    "stopped": "stopped by the user",
    "cut": "cut off by a limit",
    "failed": "ended by an error",
}
_TITLE_CHARACTERS = 60


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        thinking: What the model thought before the answer; it is not told again.
        mark: Why the answer is not whole; empty if it is.
        model: Who answered.
        created: Seconds since 1970.
        key: Its number where conversations are kept; ``None`` before it is.
    """

    question: str
    answer: str
    thinking: str = ""
    mark: Mark = ""
    model: str = ""
    created: float = 0.0
    key: int | None = None


@dataclass
class Conversation:
    """Turns under a system prompt.

    Attributes:
        turns: In their order.
        system: What the model is told first.
        told_from: The first turn that the model is still told; older ones no longer fit its context.
        key: Its number where conversations are kept; ``None`` before its first turn is.
        title: How the first question begins, or what a file said.
        model: Who answered last.
        taken_back: Keys of turns that were taken back since they were kept.
        kept: Title and system prompt as they were when it was last kept or read; empty before.
    """

    turns: list[Turn] = field(default_factory=list)
    system: str | None = None
    told_from: int = 0
    key: int | None = None
    title: str = ""
    model: str = ""
    created: float = field(default_factory=time.time)
    taken_back: list[int] = field(default_factory=list)
    kept: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)
    # The model before the turns that are added; turns of files need not say who answered.
    _model_before: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._model_before = self.model

    def messages(self, told_from: int | None = None) -> list[dict[str, str]]:
        """What the model is told, in pairs of user and assistant after the system prompt.

        Args:
            told_from: The first turn; ``None`` is that of this conversation.
        """
        messages = self.opening()
        for turn in self.turns[self.told_from if told_from is None else told_from :]:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def opening(self) -> list[dict[str, str]]:
        """The messages before the first turn."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def add(self, turn: Turn) -> None:
        """Append a turn; the first gives the title."""
        self.turns.append(turn)
        self.title = self.title or title_of(turn.question)
        self.model = turn.model or self.model

    def take_back(self) -> Turn | None:
        """Remove the last turn; ``None`` if there is none.

        A title that came from it goes too, and the model is again that of the turns that are left.
        """
        if not self.turns:
            return None
        turn = self.turns.pop()
        self.told_from = min(self.told_from, len(self.turns))
        if turn.key is not None:
            self.taken_back.append(turn.key)
        if self.title == title_of(turn.question) and all(
            self.title != title_of(left.question) for left in self.turns
        ):
            self.title = ""
        self.model = next((left.model for left in reversed(self.turns) if left.model), self._model_before)
        return turn


def turns_of(conversation: Conversation) -> str:
    """``1 turn``, ``2 turns``."""
    count = len(conversation.turns)
    return f"{count} turn{'s'[: count != 1]}"


def title_of(question: str) -> str:
    """A line that tells a conversation from others: how its first message begins."""
    words = " ".join(one_line(" ".join(question.split())).split())
    if len(words) <= _TITLE_CHARACTERS:
        return words
    return words[: _TITLE_CHARACTERS - 1].rsplit(" ", 1)[0].rstrip() + "…"


def described(mark: str) -> str:
    """A mark in words; one that this version does not know as it is."""
    return MARKS.get(mark, one_line(str(mark)))


def moment(seconds: float) -> datetime | None:
    """A time in UTC; ``None`` for what a database or a file may hold that is no time.

    Args:
        seconds: Since 1970.
    """
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None
