"""A conversation: its turns, and the messages sent to the model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

from moechat.history.attachments import without_files
from moechat.safe_text import one_line

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
        thinking: The model's thinking before the answer; it is never sent back.
        mark: Why the answer is incomplete; empty if it is complete.
        model: Name of the model that answered.
        created: Seconds since 1970.
        key: Row in the database; ``None`` while not stored.
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
    """Turns and a system prompt.

    Attributes:
        turns: In order.
        system: The system prompt.
        first_sent: Index of the first turn sent to the model; older ones no longer fit its context.
        key: Number in the database; ``None`` before the first turn is stored.
        title: The beginning of the first question, or the title from a file.
        model: Name of the model that answered last.
        undone: Keys of stored turns that were undone since.
        kept: Title and system prompt in the database when last stored or read; empty before.
    """

    turns: list[Turn] = field(default_factory=list)
    system: str | None = None
    first_sent: int = 0
    key: int | None = None
    title: str = ""
    model: str = ""
    created: float = field(default_factory=time.time)
    undone: list[int] = field(default_factory=list)
    kept: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)
    # The model before any turn is added: turns from files may name none.
    _model_before: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._model_before = self.model

    def messages(self, first_sent: int | None = None) -> list[dict[str, str]]:
        """The messages for the model: the system prompt, then pairs of user and assistant.

        Args:
            first_sent: Index of the first turn; ``None`` takes that of this conversation.
        """
        messages = self.opening()
        for turn in self.turns[self.first_sent if first_sent is None else first_sent :]:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def opening(self) -> list[dict[str, str]]:
        """The messages before the first turn."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def add(self, turn: Turn) -> None:
        """Append a turn; the first one sets the title."""
        self.turns.append(turn)
        self.title = self.title or title_of(turn.question)
        self.model = turn.model or self.model

    def undo(self) -> Turn | None:
        """Remove the last turn; ``None`` if there is none.

        A title that came from it is cleared, and the model becomes that of the remaining turns.
        """
        return self._remove(len(self.turns) - 1) if self.turns else None

    def roll_back(self, key: int) -> Turn | None:
        """Like :meth:`undo`, for the stored turn with this key; ``None`` if it is not here.

        Another process may have added turns behind it; they stay.
        """
        for place, turn in enumerate(self.turns):
            if turn.key == key:
                return self._remove(place)
        return None

    def copy(self, through: int | None = None) -> Conversation:
        """A new conversation with the same turns, title and system prompt.

        Args:
            through: Key of the last turn to copy; ``None`` copies all. An unknown key copies none.
        """
        turns = self.turns
        if through is not None:
            count = next((place for place, turn in enumerate(turns, 1) if turn.key == through), 0)
            turns = turns[:count]
        copied = Conversation([], self.system, title=self.title, model=self.model)
        for turn in turns:
            copied.add(replace(turn, key=None))
        return copied

    def _remove(self, place: int) -> Turn:
        turn = self.turns.pop(place)
        self.first_sent = min(self.first_sent, len(self.turns))
        if turn.key is not None:
            self.undone.append(turn.key)
        if self.title == title_of(turn.question) and all(
            self.title != title_of(other.question) for other in self.turns
        ):
            self.title = ""
        self.model = next((other.model for other in reversed(self.turns) if other.model), self._model_before)
        return turn


def turns_of(conversation: Conversation) -> str:
    """``1 turn``, ``2 turns``."""
    count = len(conversation.turns)
    return f"{count} turn{'s'[: count != 1]}"


def title_of(question: str) -> str:
    """A title for a conversation: the beginning of its first message, without files, on one line."""
    words = " ".join(one_line(" ".join(without_files(question).split())).split())
    if len(words) <= _TITLE_CHARACTERS:
        return words
    return words[: _TITLE_CHARACTERS - 1].rsplit(" ", 1)[0].rstrip() + "…"


def describe_mark(mark: str) -> str:
    """A mark in words; marks of newer versions are returned unchanged."""
    return MARKS.get(mark, one_line(str(mark)))


def utc_time(seconds: float) -> datetime | None:
    """The time in UTC; ``None`` if the value, which may come from a file, is no valid time.

    Args:
        seconds: Since 1970.
    """
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None
