"""Ranges of what draws a token: for options, ``/set`` in a chat, requests, and the engine."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOP_K = 1 << 24
MOST_TOKENS = 1 << 24
MOST_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class Range:
    """Numbers from one to another.

    Attributes:
        least: The first.
        most: The last.
        above: ``least`` itself is out of range.
    """

    least: float
    most: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        if self.above:
            return f"above {self.least:g} and at most {self.most:g}"
        return f"between {self.least:g} and {self.most:g}"


RANGES = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 10, above=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}
