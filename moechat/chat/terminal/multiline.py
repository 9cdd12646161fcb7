"""Prompts of the chat, and the triple quotes around a message of several lines."""

from __future__ import annotations

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'


def is_unfinished(text: str) -> bool:
    """Whether a message has opening triple quotes without closing ones."""
    text = text.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


def is_quoted(text: str) -> bool:
    """Whether a message is enclosed in triple quotes."""
    return text.strip().startswith(QUOTES) and not is_unfinished(text)


def without_quotes(text: str) -> str:
    """The message without enclosing triple quotes, if it has them."""
    if is_quoted(text):
        return text.strip()[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text
