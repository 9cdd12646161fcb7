"""Tokens to text, piece by piece, never showing half a character."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A UTF-8 sequence has at most 4 bytes: more tokens than that without a whole character are no half of one.
_MOST_PENDING = 4


class TextStream:
    """Turns a growing list of tokens into text increments.

    A token may hold a part of a UTF-8 sequence, and tokenizers may join neighbours (leading spaces, combining
    marks), so a token cannot be decoded alone. The stream decodes a short window twice — without and with the
    new token — and yields the difference once it no longer ends in an incomplete character.

    Args:
        tokenizer: A transformers tokenizer.
    """

    # Invariant: text of tokens[:shown] has been yielded; tokens[start:] is the window, start <= shown.
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """Text that became complete with ``token``; empty while a character is incomplete."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._shown])
        after = self._decode(self._tokens[self._start :])
        pending = len(self._tokens) - self._shown
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and pending < _MOST_PENDING):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left when no token will follow; an incomplete character becomes U+FFFD."""
        before = self._decode(self._tokens[self._start : self._shown])
        after = self._decode(self._tokens[self._start :])
        self._start = self._shown = len(self._tokens)
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
