"""Incremental conversion of tokens to text, in whole characters."""

from __future__ import annotations

from typing import Any

from moechat.confined.tokenising import panics_reported

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# An incomplete UTF-8 sequence has at most 3 bytes; tokenizers decode it to one replacement character or to
# one per byte. More replacement characters cannot become a character.
_MOST_HELD = 3
# Limits the cost of each step for text that never ends in a whole character.
_LONGEST_WINDOW = 256


class TextStream:
    """Turns a growing list of tokens into text increments.

    A token may hold a part of a UTF-8 sequence, and tokenizers may join neighbours (leading spaces, combining
    marks), so tokens cannot be decoded one by one. The stream decodes a short window of tokens and returns
    the text added to it, except for a tail that may be an incomplete character. The joined pieces equal the
    text of all tokens decoded at once.

    Args:
        tokenizer: A transformers tokenizer.
    """

    # Invariant: the text of _window[:_context] was returned and ends in a whole character; the first _shown
    # characters of the text of _window were returned.
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._window: list[int] = []
        self._context = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """Add a token; returns the text completed by it, empty while a character is incomplete."""
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        held = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MOST_HELD)
        piece = text[self._shown : len(text) - held]
        self._shown += len(piece)
        if (held == 0 and piece) or len(self._window) > _LONGEST_WINDOW:
            # Drop the old context; the tokens of this piece become the new one.
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._shown = len(self._decode(self._window)) - held
        return piece

    def flush(self) -> str:
        """Return the remaining text after the last token; an incomplete character becomes U+FFFD."""
        piece = self._decode(self._window)[self._shown :]
        self._shown += len(piece)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        with panics_reported("this model"):
            text: str = self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text
