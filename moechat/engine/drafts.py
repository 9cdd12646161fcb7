"""Guesses the next tokens of an answer from the text so far, so that one pass verifies several of them.

Answers repeat much of what was said before: code that is edited, names, quotations, arguments of tools. Where
the last tokens occurred before, the tokens that followed them then are a draft of what follows now (prompt
lookup: Saxena, 2023; LLMA: Yang et al., 2023, section 3). A pass of the latest token and its draft computes
the logits behind each; a token is drawn from each in turn, for as long as it is the one that was guessed. So
answers are the same with and without drafts, token by token, also where tokens are drawn at random.

A pass of several tokens takes longer, above all because they choose different experts. How much longer, and
how often guesses are right, is measured while answers are given, and decides how long a draft is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from moechat.steps import MOST_DRAFT

# Tokens that a place has in common with the end of the text, at least, and most that are compared.
_LEAST_MATCH, _MOST_MATCH = 2, 32
# Latest places that are compared.
_MOST_PLACES = 16
# Pairs of tokens are in this many classes, at least; a prime number divides them among these.
_LEAST_CLASSES, _FACTOR = 1 << 12, 1_000_003
# Sizes of passes that are tried, ascending, and how much longer they take than a pass of one token, until
# that is measured: experts of Qwen3-30B-A3B, chosen at random, in memory.
_FIRST_COSTS = {2: 1.35, 4: 2.0, 8: 3.2, 1 + MOST_DRAFT: 5.2}
# By the least number of tokens in common: the share of guesses that are right, until it is known.
_FIRST_SHARES = {_LEAST_MATCH: 0.3, 3: 0.4, 4: 0.5, 5: 0.6, 7: 0.75, 10: 0.85, 17: 0.9}
# As many guesses as the first shares count for, and how fast later ones outweigh earlier ones.
_FIRST_WEIGHT, _DECAY = 8.0, 0.98
_SMOOTHING = 0.2
# A time beyond this many times the expected one is an interruption.
_OUTLIER = 4.0
# How fast times go back to the first ones with each pass of one token, so that a size that was slow is tried
# again.
_FADING = 0.005
# How much faster than no draft one must be expected to be: shares and costs are estimates.
_LEAST_GAIN = 1.15


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
        self._before = array("i", bytes(4 * _LEAST_MATCH))

    def append(self, token: int) -> None:
        """The text goes on with a token."""
        self._tokens.append(token)

    def find(self) -> Match | None:
        """The place with the most tokens in common, the latest of several; ``None``: there is none."""
        tokens, latest, before = self._tokens, self._latest, self._before
        total = len(tokens)
        if total < _LEAST_MATCH:
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
            if length >= _LEAST_MATCH and (best is None or length > best.length):
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


class DraftLengths:
    """Chooses how many tokens are guessed, from what was measured in the answers of one model."""

    def __init__(self) -> None:
        self._costs = dict(_FIRST_COSTS)
        self._alone = 0.0  # seconds of a pass of one token; 0: not known
        self._right = {least: share * _FIRST_WEIGHT for least, share in _FIRST_SHARES.items()}
        self._tried = dict.fromkeys(_FIRST_SHARES, _FIRST_WEIGHT)

    def choose(self, length: int, most: int, behind: int = 1, *, again: bool = False) -> int:
        """Number of tokens to guess; 0: none.

        Args:
            length: Of the match.
            most: Most tokens of the pass.
            behind: Tokens of the pass that are known: the latest one, and those before it that have to be
                computed again.
            again: Where a guess is wrong, the next pass computes those that were right again.
        """
        share = self.share(length)
        best, found = _LEAST_GAIN / self.cost(behind), 0
        for size in _FIRST_COSTS:
            guesses = size - behind
            if guesses < 1 or size > most:
                continue
            rate = self._rate(size, guesses, share, again=again)
            if rate > best:
                best, found = rate, guesses
        return found

    def share(self, length: int) -> float:
        """Share of guesses that are right behind a match of this length."""
        least = _class(length)
        return self._right[least] / self._tried[least]

    def cost(self, size: int) -> float:
        """How many times as long a pass of so many tokens takes as one of one token."""
        if size <= 1:
            return 1.0
        return next(cost for most, cost in self._costs.items() if most >= size)

    def passed(self, size: int, seconds: float) -> None:
        """A pass of so many tokens took so long."""
        if size == 1:
            alone = self._alone or seconds
            self._alone = alone + _SMOOTHING * (min(seconds, _OUTLIER * alone) - alone)
            for each, first in _FIRST_COSTS.items():
                self._costs[each] += _FADING * (first - self._costs[each])
        elif size in self._costs and self._alone:
            before, found = self._costs[size], max(1.0, seconds / self._alone)
            if found < _OUTLIER * before:
                self._costs[size] = before + _SMOOTHING * (found - before)

    def verified(self, length: int, guesses: int, right: int) -> None:
        """Of some guesses the first ``right`` were right, and the next one, if there is any, was not."""
        least, tried = _class(length), min(guesses, right + 1)
        fade: float = _DECAY**tried
        self._right[least] = fade * self._right[least] + right
        self._tried[least] = fade * self._tried[least] + tried

    def _rate(self, size: int, guesses: int, share: float, *, again: bool) -> float:
        """Expected tokens of a pass in the time of a pass of one token.

        Args:
            size: Tokens of the pass.
            guesses: Those of them that are guessed.
            share: Of the guesses that are right.
            again: As for :meth:`choose`.
        """
        expected = 1.0 + guesses if share >= 1 else (1 - share ** (guesses + 1)) / (1 - share)
        time = self.cost(size)
        if again:
            time += (1 - share**guesses) * (self.cost(round(expected)) - 1)
        return expected / time


def _class(length: int) -> int:
    return max(least for least in _FIRST_SHARES if least <= length)
