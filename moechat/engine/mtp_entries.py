"""What one answer gives to a head for multi-token prediction, and gets from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from moechat.models.mtp_head import MtpHead

# Hidden states that wait for a guess, at most; then they become entries without one.
_MOST_WAITING = 256
# Of so many latest tokens of the text, at most this share may be rare if only frequent ones are guessed.
_LATEST, _MOST_RARE = 256, 0.05


class MtpEntries:
    """The entries of an answer in the attention cache of a head: tokens, each with the model's hidden states
    for the token before it.

    Entries are missing where hidden states were not kept: for the last tokens of an earlier answer, for
    answers without drafts or that were computed together, and for conversations that were copied or loaded.
    Guesses are a little worse then.

    REQUIRES: inference mode for all that computes.

    Args:
        head: The head.
        cache: Its attention cache, of :meth:`MtpHead.new_cache`.
        position: Tokens of the text whose entries it has, or never will have.
        bias: Added to the logits of tokens.
    """

    # Invariant: _rows, [1, n, hidden], are the model's hidden states for the n positions from _position on,
    # if there are any. Their entries are not in the cache yet, those before are, as far as they exist.
    def __init__(self, head: MtpHead, cache: Any, position: int, bias: Mapping[int, float]) -> None:
        self._head = head
        self._bias = bias
        self._cache = cache
        self._position = position
        self._rows: torch.Tensor | None = None

    def computed(self, position: int, rows: torch.Tensor, known: Sequence[int]) -> None:
        """Take the hidden states of a pass.

        Args:
            position: Of its first token.
            rows: ``[1, tokens, hidden]``.
            known: The text so far.
        """
        seen = self._position - position
        if seen > 0:
            rows, position = rows[:, seen:], self._position
        if rows.shape[1] == 0:
            return
        before = position - self._position
        if before and (self._rows is None or self._rows.shape[1] < before):
            self._position = position
        elif before and self._rows is not None:
            rows = torch.cat([self._rows[:, :before], rows], dim=1)
        self._rows = rows
        if rows.shape[1] >= _MOST_WAITING:
            self._feed(known, keep=1)

    def forget(self, position: int) -> None:
        """Tokens from a position on are not part of the text."""
        if self._rows is not None:
            self._rows = self._rows[:, : max(0, position - self._position)]

    def guess(self, known: Sequence[int], count: int) -> list[int]:
        """Guess the tokens that follow a text; none if the hidden states of its last pass are missing.

        Args:
            known: The text; its last token is not computed yet.
            count: Tokens to guess.
        """
        rows = self._rows
        if rows is None or rows.shape[1] == 0 or self._position + rows.shape[1] != len(known) - 1:
            return []
        self._feed(known, keep=self._head.most)
        rows = self._rows
        assert rows is not None
        tokens = known[self._position + 1 :]
        self._rows = None
        self._position += len(tokens)
        latest = known[-_LATEST:]
        rare = sum(token >= self._head.frequent for token in latest)
        among: Literal["all", "frequent"] = "all" if rare > _MOST_RARE * len(latest) else "frequent"
        return self._head.guess(self._cache, tokens, rows, count, self._bias, among)

    def _feed(self, known: Sequence[int], keep: int) -> None:
        """Make entries of all hidden states whose next token is known, but for the last ones."""
        assert self._rows is not None
        count = min(self._rows.shape[1], len(known) - 1 - self._position) - keep
        if count > 0:
            tokens = known[self._position + 1 : self._position + 1 + count]
            rows, self._rows = self._rows[:, :count], self._rows[:, count:]
            self._position += count
            self._head.feed(self._cache, tokens, rows)
