"""How many tokens of an answer are guessed, which follows from what was measured while answers were given.

A pass of several tokens takes longer than one, above all because they choose different experts. How much
longer, and how often guesses are right, decides how long a draft is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moechat.engine.drafts import LEAST_MATCH
from moechat.models.mtp_head import MOST_GUESSES
from moechat.steps import MOST_DRAFT

# Sizes of passes that are tried, ascending, and how much longer they take than a pass of one token, until
# that is measured: experts of Qwen3-30B-A3B, chosen at random, in memory.
_FIRST_COSTS = {2: 1.35, 3: 1.7, 4: 2.0, 8: 3.2, 1 + MOST_DRAFT: 5.2}
# Those that drafts from the text have.
_SIZES = (2, 4, 8, 1 + MOST_DRAFT)
# By the least number of tokens in common: the share of guesses that are right, until it is known.
_FIRST_SHARES = {LEAST_MATCH: 0.3, 3: 0.4, 4: 0.5, 5: 0.6, 7: 0.75, 10: 0.85, 17: 0.9}
# As many guesses as the first shares count for, and how fast later ones outweigh earlier ones.
_FIRST_WEIGHT, _DECAY = 8.0, 0.98
_SMOOTHING = 0.2
# A time beyond this many times the expected one is an interruption, and one time changes what is expected no
# more than one this many times as long: the first ones wait for weights that were not used yet.
_OUTLIER, _SURPRISE = 4.0, 1.25
# How fast times go back to the first ones with each pass of one token, so that a size that was slow is tried
# again.
_FADING = 0.005
# How much faster than no draft one must be expected to be: shares and costs are estimates. Those of a head
# are measured in every pass.
_LEAST_GAIN, _LEAST_MTP_GAIN = 1.15, 1.03
# After so many tokens without guesses of a head, it is tried once, if it may be this fast.
_TRY_AFTER, _TRY_GAIN = 32, 0.8
# Of a head: by the number of guesses before it in a draft, the share of guesses that are right if those
# before are; and the time of the first guess and of each further one, in passes of one token.
_FIRST_MTP_SHARES = (0.75, 0.6, 0.5)[:MOST_GUESSES]
_FIRST_MTP_COSTS = (0.15, 0.12)


class Choice(NamedTuple):
    """How many tokens to guess.

    Attributes:
        guesses: 0: none.
        rate: Tokens to expect in the time of a pass of one token; without guesses, what a draft has to
            exceed.
    """

    guesses: int
    rate: float


class DraftLengths:
    """Chooses how many tokens are guessed, from what was measured in the answers of one model.

    Attributes:
        mtp_costs: Time of the first guess of a head, with what it needs of the tokens before, and of each
            further one in a draft, in passes of one token.
    """

    def __init__(self) -> None:
        self._costs = dict(_FIRST_COSTS)
        self._alone = 0.0  # seconds of a pass of one token; 0: not known
        self._right = {least: share * _FIRST_WEIGHT for least, share in _FIRST_SHARES.items()}
        self._tried = dict.fromkeys(_FIRST_SHARES, _FIRST_WEIGHT)
        self._mtp_right = [share * _FIRST_WEIGHT for share in _FIRST_MTP_SHARES]
        self._mtp_tried = [_FIRST_WEIGHT] * len(_FIRST_MTP_SHARES)
        self.mtp_costs = _FIRST_MTP_COSTS
        self._without_mtp = 0  # passes of one token since its last guess

    def choose(self, length: int, most: int, behind: int = 1, *, kept: int = MOST_DRAFT) -> Choice:
        """How many tokens to guess from what followed a place.

        Args:
            length: Of the match.
            most: Most tokens of the pass.
            behind: Tokens of the pass that are known: the latest one, and those before it that have to be
                computed again.
            kept: Most guesses of a draft where nothing is computed again if some are wrong. Of a longer one
                the next pass computes those that were right again.
        """
        share = self.share(length)
        best = Choice(0, _LEAST_GAIN / self.cost(behind))
        for size in _SIZES:
            guesses = size - behind
            if guesses < 1 or size > most:
                continue
            rate = self._rate(size, [share] * guesses, 0.0, kept=kept)
            if rate > best.rate:
                best = Choice(guesses, rate)
        return best

    def choose_mtp(self, most: int, behind: int = 1, *, kept: int = MOST_DRAFT) -> Choice:
        """How many tokens a head should guess; arguments as for :meth:`choose`."""
        gain = _LEAST_MTP_GAIN if self._without_mtp < _TRY_AFTER else _TRY_GAIN
        best = Choice(0, gain / self.cost(behind))
        shares = [right / tried for right, tried in zip(self._mtp_right, self._mtp_tried, strict=True)]
        first, further = self.mtp_costs
        for guesses in range(1, min(len(shares), most - behind) + 1):
            head = first + further * (guesses - 1)
            rate = self._rate(behind + guesses, shares[:guesses], head, kept=kept)
            if rate > best.rate:
                best = Choice(guesses, rate)
        return best

    def share(self, length: int) -> float:
        """Share of guesses that are right behind a match of this length."""
        least = _class(length)
        return self._right[least] / self._tried[least]

    def cost(self, size: int) -> float:
        """How many times as long a pass of so many tokens takes as one of one token."""
        below, least = 1, 1.0
        for each, cost in self._costs.items():
            if size <= each:
                return least + (cost - least) * (size - below) / (each - below)
            below, least = each, cost
        return least

    def passed(self, size: int, seconds: float) -> None:
        """A pass of so many tokens took so long."""
        if size == 1:
            self._without_mtp += 1
            alone = self._alone or seconds
            self._alone = alone + _SMOOTHING * (min(seconds, _OUTLIER * alone) - alone)
            for each, first in _FIRST_COSTS.items():
                self._costs[each] += _FADING * (first - self._costs[each])
            first, further = (
                cost + _FADING * (first - cost)
                for cost, first in zip(self.mtp_costs, _FIRST_MTP_COSTS, strict=True)
            )
            self.mtp_costs = first, further
            for depth, share in enumerate(_FIRST_MTP_SHARES):
                missing = share * self._mtp_tried[depth] - self._mtp_right[depth]
                self._mtp_right[depth] += _FADING * missing
        elif size in self._costs and self._alone:
            before, found = self._costs[size], max(1.0, seconds / self._alone)
            if found < _OUTLIER * before:
                self._costs[size] = before + _SMOOTHING * (min(found, _SURPRISE * before) - before)

    def verified(self, length: int, guesses: int, right: int) -> None:
        """Of some guesses the first ``right`` were right, and the next one, if there is any, was not."""
        least, tried = _class(length), min(guesses, right + 1)
        fade: float = _DECAY**tried
        self._right[least] = fade * self._right[least] + right
        self._tried[least] = fade * self._tried[least] + tried

    def mtp_took(self, guesses: int, seconds: float) -> None:
        """A head took so long for some guesses."""
        self._without_mtp = 0
        if not self._alone:
            return
        first, further = self.mtp_costs
        expected = first + further * (guesses - 1)
        found = min(seconds / self._alone / expected, _SURPRISE)
        change = 1 + _SMOOTHING * (found - 1)
        self.mtp_costs = first * change, further * change

    def mtp_verified(self, guesses: int, right: int) -> None:
        """Of some guesses of a head the first ``right`` were right; the next, if there is any, was not."""
        for depth in range(min(guesses, right + 1)):
            self._mtp_right[depth] = _DECAY * self._mtp_right[depth] + (depth < right)
            self._mtp_tried[depth] = _DECAY * self._mtp_tried[depth] + 1

    def _rate(self, size: int, shares: Sequence[float], head: float, *, kept: int) -> float:
        """Expected tokens of a pass in the time of a pass of one token.

        Args:
            size: Tokens of the pass.
            shares: By the number of guesses before, the share of guesses that are right if those before are.
            head: Time of the guesses, in passes of one token.
            kept: As for :meth:`choose`.
        """
        expected = all_right = 1.0
        for share in shares:
            all_right *= share
            expected += all_right
        time = self.cost(size) + head
        if len(shares) > kept:
            time += (1 - all_right) * (self.cost(round(expected)) - 1)
        return expected / time


def _class(length: int) -> int:
    return max(least for least in _FIRST_SHARES if least <= length)
