"""Tokens to text, piece by piece, never showing half a character."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# An unfinished UTF-8 sequence has at most 3 bytes; tokenizers decode it to one replacement character or to
# one a byte. More of them than that are not the beginning of anything.
_MOST_HELD = 3
# Text that never ends cleanly must not make every step decode all of it.
_LONGEST_WINDOW = 256


class TextStream:
    """Turns a growing list of tokens into text increments.

    A token may hold a part of a UTF-8 sequence, and tokenizers may join neighbours (leading spaces, combining
    marks), so a token cannot be decoded alone. The stream decodes a short window of tokens and yields what
    has been added to its text, holding back a tail that may be the beginning of a character. The pieces add
    up to what decoding all tokens at once gives.

    Args:
        tokenizer: A transformers tokenizer.
    """

    # Invariant: _window[:_context] was shown whole and ends in a whole character; of the text of _window,
    # _shown characters have been yielded.
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._window: list[int] = []
        self._context = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """Text that became complete with ``token``; empty while a character is incomplete."""
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        held = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MOST_HELD)
        piece = text[self._shown : len(text) - held]
        self._shown += len(piece)
        if (held == 0 and piece) or len(self._window) > _LONGEST_WINDOW:
            # What was shown before this piece has served as context and goes; this piece becomes the context.
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._shown = len(self._decode(self._window)) - held
        return piece

    def flush(self) -> str:
        """What is left when no token will follow; an incomplete character becomes U+FFFD."""
        piece = self._decode(self._window)[self._shown :]
        self._shown += len(piece)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
