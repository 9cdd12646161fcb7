"""Chooses among timed plans. Pure: times in, a choice out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

# Tokens decoded in a typical answer, for each prompt that was timed.
ANSWER_TOKENS = 128
# A candidate must gain more than this share to replace the default.
NOISE = 0.03
# With fewer rounds a single disturbance of the machine could decide.
LEAST_ROUNDS = 3
# The median of normally distributed values has this many standard errors of their mean.
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
# From the median of the absolute deviations to a standard deviation, for a normal distribution.
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Timing:
    """The times of one candidate.

    Attributes:
        name: Of the candidate.
        decode: Seconds a token, round by round; all candidates were timed in turns within a round.
        prefill: Seconds for the prompt, each time that it was computed; empty where it was not timed.
    """

    name: str
    decode: tuple[float, ...] = ()
    prefill: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for value in (*self.decode, *self.prefill):
            if not 0 < value < math.inf:
                raise ValueError(f"{self.name} took {value} s; a time is above 0 and finite")

    @property
    def rounds(self) -> int:
        """Rounds timed."""
        return len(self.decode)

    @property
    def token_seconds(self) -> float:
        """Median seconds a token; infinite before the first round."""
        return statistics.median(self.decode) if self.decode else math.inf

    @property
    def token_spread(self) -> float:
        """Standard deviation of the seconds a token, from the median of the deviations: robust."""
        return _spread(self.decode)

    @property
    def prompt_seconds(self) -> float:
        """Median seconds for the prompt; 0 where it was not timed."""
        return statistics.median(self.prefill) if self.prefill else 0.0


@dataclass(frozen=True)
class Choice:
    """A decision.

    Attributes:
        winner: Name of the candidate to take.
        why: For people, one sentence without a period.
        decided: There were enough rounds; else the default was kept because there were too few.
        gains: By name: the share of an answer's time that a candidate saves over the default, negative where
            it is slower; median over the rounds.
    """

    winner: str
    why: str
    decided: bool = True
    gains: dict[str, float] = field(default_factory=dict)


def choose(timings: Sequence[Timing], *, default: str, plain: str, noise: float = NOISE) -> Choice:
    """Choose the default unless another candidate is significantly faster; never one slower than ``plain``.

    Candidates are compared with the default round by round, so that a machine that slows down does
    so for both. Another one is significantly faster if the median of its gains is above ``noise`` and above
    twice that median's standard error. The winner is then compared with the plain candidate, without any
    allowance.

    Args:
        timings: Of all candidates, with equally many rounds each.
        default: Name of the preferred candidate.
        plain: Name of the candidate that the winner must not be slower than.
        noise: Share of the time.

    Raises:
        ValueError: ``default`` or ``plain`` is missing, a name occurs twice, or rounds differ.
    """
    by_name = {timing.name: timing for timing in timings}
    if len(by_name) != len(timings) or not {default, plain} <= by_name.keys():
        raise ValueError(
            f"{[timing.name for timing in timings]} have duplicates, or lack {default} or {plain}"
        )
    rounds = {timing.rounds for timing in timings}
    if len(rounds) != 1:
        raise ValueError(f"candidates were timed in {sorted(rounds)} rounds")
    (count,) = rounds
    if count < LEAST_ROUNDS:
        return Choice(
            default,
            f"{count} of at least {LEAST_ROUNDS} rounds were timed, so the computed plan stays",
            decided=False,
        )
    # Prompts count only if they were timed for all candidates.
    with_prompt = all(timing.prefill for timing in timings)
    answers = {name: _answers(timing, with_prompt) for name, timing in by_name.items()}
    gained = {name: _gains(times, answers[default]) for name, times in answers.items()}
    gains = {name: statistics.median(values) for name, values in gained.items()}
    best = max(gains, key=lambda name: (gains[name], name == default, name == plain))
    sure = gains[best] > max(noise, 2 * _median_error(gained[best]))
    winner, why = default, _kept(best, default, gains)
    if sure and best != default:
        winner, why = best, f"{_percent(gains[best])} faster than {default}"
    if winner != plain and (lost := statistics.median(_gains(answers[plain], answers[winner]))) > 0:
        why = f"{_percent(lost)} faster than {winner}; a plan slower than {plain} is never chosen"
        winner = plain
    return Choice(winner, why, gains=gains)


def _answers(timing: Timing, with_prompt: bool) -> list[float]:
    """Seconds of an answer, round by round."""
    prompt = timing.prompt_seconds if with_prompt else 0.0
    return [prompt + ANSWER_TOKENS * seconds for seconds in timing.decode]


def _gains(times: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [1 - ours / theirs for ours, theirs in zip(times, reference, strict=True)]


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    middle = statistics.median(values)
    return _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


def _median_error(values: Sequence[float]) -> float:
    return _MEDIAN_ERROR * _spread(values) / math.sqrt(len(values))


def _kept(best: str, default: str, gains: dict[str, float]) -> str:
    if best == default:
        return "no candidate was faster"
    return f"no candidate was significantly faster (best: {best}, by {_percent(gains[best])})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
