"""Finds the stored conversation that a loaded file is a copy of."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from moechat.history.conversation import Conversation, Turn, utc_time

if TYPE_CHECKING:
    from moechat.history.session_database import Sessions

_Content = tuple[str, str, str]


def find_stored(sessions: Sessions, loaded: Conversation) -> Conversation | None:
    """The stored conversation that goes on with a loaded file; ``None`` if the file is a new one.

    That is one with the same turns and system prompt, or one that was begun at the same time and has the
    first turns of the file. A stored conversation with more turns than the file is left as it is.

    Args:
        sessions: The database.
        loaded: The conversation of the file.

    Returns:
        It with its keys, and with the turns that only the file has.

    Raises:
        SessionsUnavailableError: The database cannot be read.
    """
    if not loaded.turns:
        return None
    wanted = [_content(turn) for turn in loaded.turns]
    equal: Conversation | None = None
    for key in sessions.beginning_with(loaded.turns[0]):
        stored = sessions.get(key)
        have = [_content(turn) for turn in stored.turns]
        if stored.system != loaded.system or have != wanted[: len(have)]:
            continue
        if _second(stored) == _second(loaded):
            return replace(stored, turns=[*stored.turns, *loaded.turns[len(have) :]])
        if len(have) == len(wanted):
            equal = equal or stored
    return equal


def _second(conversation: Conversation) -> datetime | None:
    """When it was begun, as exactly as files tell."""
    then = utc_time(conversation.created)
    return None if then is None else then.replace(microsecond=0)


def _content(turn: Turn) -> _Content:
    return turn.question, turn.answer, turn.thinking
