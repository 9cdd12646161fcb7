"""Conversations for tests."""

from __future__ import annotations

from moechat.history.conversation import Conversation, Turn


def conversation(*turns: tuple[str, str], model: str = "demo") -> Conversation:
    """A conversation with these questions and answers."""
    made = Conversation()
    for question, answer in turns:
        made.add(Turn(question, answer, model=model, created=1.5))
    return made
