"""Compares times of tokens that were taken under several ways to run. Pure: times in, differences out.

A token takes longer where more of its experts are missing, whichever way the engine runs, and this explains
most of the spread between tokens. So each token comes with its hardness, a number that does not depend on the
way, and the ways are compared at equal hardness: an analysis of covariance of relative times with one slope
for all ways. That is nearly as good as pairing each token with itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

# Spread that single tokens are taken to have at equal hardness, and the number of tokens that this counts
# for: a few tokens cannot show their own spread.
_USUAL_SPREAD, _USUAL_TOKENS = 0.08, 6
# Neighbouring tokens share what disturbs the machine, so their mean is less certain than that of as many
# independent ones.
_DEPENDENCE = 1.5
# A token that takes this many times the mean was disturbed by something else, and counts as this much.
_MOST_TIMES_MEAN = 2.5
_FEWEST_FOR_MEAN = 4


@dataclass(frozen=True)
class Gap:
    """How much longer a token takes with one way than with another.

    Attributes:
        share: Difference, as a share of the other way's time; negative: faster.
        error: Standard error of the share.
    """

    share: float
    error: float

    def surely_below(self, share: float, errors: float) -> bool:
        """Whether the gap is below ``share``, with a margin of so many standard errors."""
        return self.share + errors * self.error < share

    def surely_above(self, share: float, errors: float) -> bool:
        """Whether the gap is above ``share``, with a margin of so many standard errors."""
        return self.share - errors * self.error > share


@dataclass
class _Sums:
    tokens: int = 0
    seconds: float = 0.0
    hardness: float = 0.0
    seconds_squared: float = 0.0
    hardness_squared: float = 0.0
    product: float = 0.0
    rated: float = 1.0  # 0: the hardness of some token is not known

    def add(self, seconds: float, hardness: float) -> None:
        self.tokens += 1
        self.seconds += seconds
        self.hardness += hardness
        self.seconds_squared += seconds * seconds
        self.hardness_squared += hardness * hardness
        self.product += seconds * hardness

    @property
    def mean(self) -> float:
        return self.seconds / self.tokens

    @property
    def mean_hardness(self) -> float:
        return self.hardness / self.tokens

    def left(self, slope: float) -> float:
        """Sum of squared relative deviations that the hardness does not explain."""
        slope *= self.mean if self.rated else 0.0
        left = self.of_seconds - 2 * slope * self.of_product + slope * slope * self.of_hardness
        return max(0.0, left) / self.mean**2

    # Sums of squares and products about the means.
    @property
    def of_seconds(self) -> float:
        return max(0.0, self.seconds_squared - self.seconds * self.seconds / self.tokens)

    @property
    def of_hardness(self) -> float:
        return max(0.0, self.hardness_squared - self.hardness * self.hardness / self.tokens)

    @property
    def of_product(self) -> float:
        return self.product - self.seconds * self.hardness / self.tokens


class Comparison:
    """Times of single tokens, by way to run."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}

    def add(self, way: str, seconds: float, hardness: float | None) -> None:
        """Add one token.

        Args:
            way: How it was computed.
            seconds: Its time.
            hardness: Any measure that grows with the experts that it misses and does not depend on the way;
                ``None``: unknown, and the way is compared without it.
        """
        tokens = sum(sums.tokens for sums in self._sums.values())
        if tokens >= _FEWEST_FOR_MEAN:
            mean = sum(sums.seconds for sums in self._sums.values()) / tokens
            seconds = min(seconds, _MOST_TIMES_MEAN * mean)
        sums = self._sums.setdefault(way, _Sums())
        sums.rated = float(sums.rated and hardness is not None)
        sums.add(seconds, hardness or 0.0)

    @classmethod
    def of(cls, sums: Mapping[str, Sequence[float]]) -> Comparison:
        """The comparison that :meth:`sums` describes.

        Raises:
            ValueError: The numbers are not those of any tokens.
        """
        found = cls()
        for way, values in sums.items():
            count, *others = values
            if len(others) != 6:
                raise ValueError(f"{list(values)} are not the sums of any tokens")
            made = _Sums(int(count), *map(float, others))
            numbers = astuple(made)
            if made.tokens != count or made.tokens < 1 or not all(map(math.isfinite, numbers)):
                raise ValueError(f"{list(values)} are not the sums of any tokens")
            if made.seconds <= 0 or min(numbers[3:5]) < 0:
                raise ValueError(f"{list(values)} are not the sums of any tokens")
            found._sums[way] = made
        return found

    def sums(self) -> dict[str, tuple[float, ...]]:
        """Of each way: tokens, then the sums of seconds, hardness, their squares and product, and
        whether all hardness is known.
        """
        return {way: astuple(sums) for way, sums in self._sums.items()}

    def tokens(self, way: str) -> int:
        """Tokens of one way."""
        return self._sums[way].tokens if way in self._sums else 0

    def seconds(self, way: str) -> float:
        """Mean seconds of a token of one way, at its own hardness; 0 without tokens."""
        return self._sums[way].seconds / self._sums[way].tokens if way in self._sums else 0.0

    def expected(self, way: str, hardness: float) -> float:
        """Expected seconds of a token of one way, which has tokens, at a hardness."""
        sums = self._sums[way]
        mean = sums.seconds / sums.tokens
        return max(mean + self._slope * (hardness - sums.hardness / sums.tokens), mean / _MOST_TIMES_MEAN)

    @property
    def _slope(self) -> float:
        """Seconds for each unit of hardness, with every way."""
        hardness = sum(sums.of_hardness for sums in self._sums.values())
        product = sum(sums.of_product for sums in self._sums.values())
        return max(0.0, product / hardness) if hardness > 0 else 0.0

    def gap(self, way: str, reference: str) -> Gap | None:
        """How much longer a token takes with one way; ``None``: one of the two has no tokens."""
        if way == reference or not (self.tokens(way) and self.tokens(reference)):
            return None
        one, other, everyone = self._sums[way], self._sums[reference], list(self._sums.values())
        slope = _slope(everyone)
        left = sum(sums.left(slope) for sums in everyone)
        freedom = max(0, sum(sums.tokens for sums in everyone) - len(everyone) - 1)
        variance = (left + _USUAL_TOKENS * _USUAL_SPREAD**2) / (freedom + _USUAL_TOKENS)
        harder = one.mean_hardness - other.mean_hardness if one.rated and other.rated else 0.0
        # Both at the hardness between them.
        most = 1 - 1 / _MOST_TIMES_MEAN
        step = min(most, max(-most, slope * harder / 2))
        ratio = one.mean / other.mean * (1 - step) / (1 + step)
        spread = 1 / one.tokens + 1 / other.tokens
        known = sum(sums.of_hardness for sums in everyone if sums.rated)
        spread += harder * harder / known if known > 0 else 0.0
        return Gap(ratio - 1, _DEPENDENCE * ratio * math.sqrt(variance * spread))


def _slope(everyone: Sequence[_Sums]) -> float:
    """Share of a token's time that a unit of hardness adds, at least 0."""
    rated = [sums for sums in everyone if sums.rated]
    hardness = sum(sums.of_hardness for sums in rated)
    if hardness <= 0:
        return 0.0
    return max(0.0, sum(sums.of_product / sums.mean for sums in rated) / hardness)
