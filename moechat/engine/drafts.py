"""Finds what may follow in an answer: what followed where the text was the same before.

Answers repeat much of what was said before: code that is edited, names, quotations, arguments of tools. Where
the last tokens occurred before, the tokens that followed them then are a draft of what follows now (prompt
lookup: Saxena, 2023; LLMA: Yang et al., 2023, section 3). A pass of the latest token and its draft computes
the logits behind each; a token is drawn from each in turn, for as long as it is the one that was guessed. So
answers are the same with and without drafts, token by token, also where tokens are drawn at random.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

# Tokens that a place has in common with the end of the text, at least, and most that are compared.
LEAST_MATCH, _MOST_MATCH = 2, 32
# Latest places that are compared.
_MOST_PLACES = 16
# Pairs of tokens are in this many classes, at least; a prime number divides them among these.
_LEAST_CLASSES, _FACTOR = 1 << 12, 1_000_003


class Match(NamedTuple):
    """A place in the text that ends as the text does.

    Attributes:
        end: The position behind it.
        length: Tokens in common, at most 32.
    """

    end: int
    length: int


class PromptLookup:
    """Finds where the last tokens of a text occurred before.

    Args:
        tokens: The text so far.
        expected: What it may go on with, or repeat.
    """

    # Invariants: _latest has the last end of all pairs of tokens of a class, for each position but the last
    # ones _before the one before it; 0: there is none. A dictionary of pairs would take ten times the memory.
    def __init__(self, tokens: Sequence[int], expected: Sequence[int] = ()) -> None:
        self._tokens = array("i", [*expected, *tokens])
        classes = max(_LEAST_CLASSES, len(self._tokens))
        self._latest = array("i", bytes(4 << classes.bit_length()))
        self._before = array("i", bytes(4 * LEAST_MATCH))

    def append(self, token: int) -> None:
        """The text goes on with a token."""
        self._tokens.append(token)

    def find(self) -> Match | None:
        """The place with the most tokens in common, the latest of several; ``None``: there is none."""
        tokens, latest, before = self._tokens, self._latest, self._before
        total = len(tokens)
        if total < LEAST_MATCH:
            return None
        mask = len(latest) - 1
        for end in range(len(before), total):
            pair = (tokens[end - 2] * _FACTOR + tokens[end - 1]) & mask
            before.append(latest[pair])
            latest[pair] = end
        best: Match | None = None
        end = latest[(tokens[-2] * _FACTOR + tokens[-1]) & mask]
        for _ in range(_MOST_PLACES):
            if not end:
                break
            length, most = 0, min(end, _MOST_MATCH)
            while length < most and tokens[end - length - 1] == tokens[total - length - 1]:
                length += 1
            if length >= LEAST_MATCH and (best is None or length > best.length):
                best = Match(end, length)
            end = before[end]
        return best

    def draft(self, match: Match, count: int) -> list[int]:
        """The ``count`` tokens that followed a place; where the text ends before, it goes on as its draft."""
        total = len(self._tokens)
        found: list[int] = []
        for at in range(match.end, match.end + count):
            found.append(self._tokens[at] if at < total else found[at - total])
        return found
