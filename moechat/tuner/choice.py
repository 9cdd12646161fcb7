"""Chooses among raced candidates. Pure: times in, a choice out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moechat.trials import Comparison, Gap
from moechat.tuner.racing import WITHIN, Evidence

# A candidate must gain this share to replace the default, by at least one standard error.
LEAST_GAIN = 0.01
_LIKELY = 1.0


@dataclass(frozen=True)
class Timing:
    """What is known of one candidate.

    Attributes:
        name: Of the candidate.
        tokens: Tokens timed, over all starts.
        token_seconds: Mean seconds of a token in the last start that timed it; 0: in none.
        gap: How much longer a token takes than with the default; ``None`` for the default itself, and where
            nothing was timed.
    """

    name: str
    tokens: int
    token_seconds: float
    gap: Gap | None


@dataclass(frozen=True)
class Choice:
    """A decision.

    Attributes:
        winner: Name of the candidate to take.
        why: For people, one sentence without a period.
        decided: No other candidate can be faster by more than :data:`~moechat.tuner.racing.WITHIN`, with a
            confidence of about 95 %; else the race goes on at the next start.
        timings: Of all candidates.
    """

    winner: str
    why: str
    decided: bool
    timings: tuple[Timing, ...] = ()


def choose(sessions: Sequence[Comparison], names: Sequence[str], *, default: str, plain: str) -> Choice:
    """Choose the fastest candidate; never one slower than ``plain``.

    The default is replaced by a candidate that is likely faster by :data:`LEAST_GAIN`. The winner is then
    compared with the plain candidate, without any allowance.

    Args:
        sessions: Times of tokens, by start.
        names: Of all candidates.
        default: Name of the preferred candidate.
        plain: Name of the candidate that the winner must not be slower than.

    Raises:
        ValueError: ``default`` or ``plain`` is missing, or a name occurs twice.
    """
    if len(set(names)) != len(names) or not {default, plain} <= set(names):
        raise ValueError(f"{list(names)} have duplicates, or lack {default} or {plain}")
    evidence = Evidence(sessions, default)
    timings = tuple(_timing(name, sessions, evidence, default) for name in names)
    if sum(1 for timing in timings if timing.tokens) < 2:
        return Choice(default, "there was no time to compare plans", False, timings)
    best = evidence.leader(names)
    gain = evidence.gap(best, default)
    winner, why = default, "no candidate was faster"
    if gain is not None and gain.share < -LEAST_GAIN and gain.surely_below(0.0, _LIKELY):
        winner, why = best, f"{_percent(-gain.share)} faster than {default}"
    elif gain is not None and gain.share < 0:
        why = f"no candidate was clearly faster (best: {best}, by {_percent(-gain.share)})"
    against = evidence.gap(plain, winner)
    if against is not None and against.share < 0:
        why = f"{_percent(-against.share)} faster than {winner}; a plan slower than {plain} is never chosen"
        winner = plain
    left = evidence.open_against(winner, names)
    sure = f"no other is more than {100 * WITHIN:.0f} % faster, at 95 % confidence"
    more = f"{len(left)} of {len(names) - 1} others are still open" if left else sure
    return Choice(winner, f"{why}; {more}", not left, timings)


def _timing(name: str, sessions: Sequence[Comparison], evidence: Evidence, default: str) -> Timing:
    last = next((session for session in reversed(sessions) if session.tokens(name)), None)
    seconds = 0.0 if last is None else last.seconds(name)
    return Timing(name, evidence.tokens(name), seconds, evidence.gap(name, default))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
