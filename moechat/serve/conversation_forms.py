"""Saved conversations in requests and answers of ``/moechat/conversations``."""

from __future__ import annotations

from typing import Any, cast

from moechat.history.conversation import MARKS, Conversation, Mark, Turn, title_of, utc_time
from moechat.history.session_database import Sessions, Summary
from moechat.serve.fields import Fields

HIGHEST_KEY = (1 << 63) - 1  # of SQLite's integers
_MOST_TEXT = 8 << 20
_MOST_TURNS = 1000


def keep(sessions: Sessions, conversation: Conversation) -> dict[str, Any]:
    """Store a conversation.

    Returns:
        It without its texts, as the database has it then.

    Raises:
        SessionNotFoundError: It was deleted meanwhile, and has no new turns.
        SessionsUnavailableError: The database cannot be used.
    """
    new = sum(turn.key is None for turn in conversation.turns)
    sessions.keep(conversation)
    key = conversation.key
    assert key is not None
    found = to_json(sessions, key)
    return {
        **{name: value for name, value in found.items() if name not in ("turns", "system")},
        "turns": len(found["turns"]),
        "added_ids": [turn.key for turn in conversation.turns[len(conversation.turns) - new :]],
        "turn_ids": [turn["id"] for turn in found["turns"]],
    }


def to_json(sessions: Sessions, key: int) -> dict[str, Any]:
    """One conversation with its turns.

    Raises:
        SessionNotFoundError: There is none with this key.
        SessionsUnavailableError: The database cannot be used.
    """
    conversation = sessions.get(key)
    return {
        **summary_json(sessions.summary(key)),
        "system": conversation.system,
        "turns": [
            {
                "id": turn.key,
                "question": turn.question,
                "answer": turn.answer,
                "thinking": turn.thinking,
                "mark": turn.mark,
                "model": turn.model,
                "created": _time(turn.created),
            }
            for turn in conversation.turns
        ],
    }


def summary_json(summary: Summary) -> dict[str, Any]:
    """One conversation of a list."""
    return {
        "id": summary.key,
        "title": summary.title,
        "model": summary.model,
        "created": _time(summary.created),
        "updated": _time(summary.updated),
        "turns": summary.turns,
        **({"found": summary.found} if summary.found else {}),
    }


def _time(seconds: float) -> float | None:
    """The time as it is; ``None`` where a damaged row has something else, which JSON may not hold."""
    return None if utc_time(seconds) is None else float(seconds)


def text_of(fields: Fields, name: str) -> str:
    """A text of a conversation; empty if it is missing.

    Raises:
        ApiError: It is no text, or too long.
    """
    return fields.text(name, most=_MOST_TEXT)


def title_in(fields: Fields) -> str | None:
    """``title`` as titles are kept; ``None`` if it is missing.

    Raises:
        ApiError: It is no text, or too long.
    """
    return title_of(text_of(fields, "title")) if fields.has("title") else None


def keys_in(fields: Fields, name: str) -> list[int]:
    """A list of keys; empty if it is missing.

    Raises:
        ApiError: It is no list of keys.
    """
    values = fields.items(name, most=_MOST_TURNS) or []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= HIGHEST_KEY:
            raise fields.error(name, f"{name} must hold ids of turns")
    return values


def turns_in(fields: Fields) -> list[Turn]:
    """``turns``, not stored yet; empty if they are missing.

    Raises:
        ApiError: One of them has no question or answer, or a field is wrong.
    """
    turns = []
    for place, value in enumerate(fields.items("turns", most=_MOST_TURNS) or []):
        if not isinstance(value, dict):
            raise fields.error(f"turns[{place}]", f"turns[{place}] must be an object")
        turn = Fields(value, f"turns[{place}].")
        texts = {name: text_of(turn, name) for name in ("question", "answer", "thinking", "model")}
        for name in ("question", "answer"):
            if not texts[name]:
                raise turn.error(name, f"turns[{place}].{name} is empty; a turn is a question and its answer")
        mark = cast(Mark, turn.choice("mark", ["", *MARKS], "") or "")
        question, answer, thinking, model = texts.values()
        turns.append(Turn(question, answer, thinking, mark, model))
    return turns
