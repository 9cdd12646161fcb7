"""Races candidates against each other, token by token, within a limit of seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moechat.trials import Comparison, Gap
from moechat.trials.sessions import pooled_gap
from moechat.tuner.candidates import Candidate

# Tokens of a turn that count.
TURN_TOKENS = 8
_FEWEST_TOKENS = 3
# The first turn shows how long a token takes, and fills the near tier: at most so many tokens, and this share
# of the limit.
_FIRST_TOKENS, _FIRST_SHARE = 12, 0.15
# Tokens that fill the near tier.
_FILL_TOKENS = 6
# Most rounds of one start: more would not tell candidates apart that are equal.
MOST_ROUNDS = 24
# Turns that a start should have time for, and tokens that one takes to settle.
_FEWEST_TURNS, _USUAL_SETTLE = 4, 2
# A turn ends early once its candidate is surely slower than the leader by this share.
_HOPELESS = 0.1
# Standard errors: about 95 % sure, on both sides.
SURE = 2.0
# The race is over when no candidate can be faster than the leader by more than this.
WITHIN = 0.03
# A prompt is timed if it takes at most this share of the limit; its time is spread over an answer.
_PROMPT_SHARE = 0.1
_ANSWER_TOKENS = 128


class Passes(Protocol):
    """Runs passes of a model; every call returns the seconds that it took."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt that :meth:`prefill` computes."""
        ...

    def decode(self) -> float:
        """Compute one more token."""
        ...

    def prefill(self) -> float:
        """Begin a new sequence: compute a prompt in one pass."""
        ...


@dataclass(frozen=True)
class Raced:
    """The result of a race.

    Attributes:
        session: The tokens that were timed; empty if a token takes too long for two turns.
        pace: Seconds a token of the first candidate.
        seconds: Time of the whole race.
    """

    session: Comparison
    pace: float
    seconds: float


class Evidence:
    """What is known of the candidates from all sessions.

    Args:
        sessions: Comparisons of earlier starts, and that of this one.
        default: Name of the candidate that each session begins with.
    """

    def __init__(self, sessions: Sequence[Comparison], default: str) -> None:
        self._sessions = sessions
        self._default = default

    def tokens(self, name: str) -> int:
        """Tokens of a candidate that were timed."""
        return sum(session.tokens(name) for session in self._sessions)

    def gap(self, name: str, reference: str) -> Gap | None:
        """How much longer a token takes with one candidate; ``None``: they do not compare yet."""
        return pooled_gap(self._sessions, name, reference)

    def leader(self, names: Sequence[str]) -> str:
        """The candidate with the shortest mean time."""

        def share(name: str) -> float:
            gap = self.gap(name, self._default)
            return 0.0 if gap is None else gap.share

        return min((name for name in names if self.tokens(name)), key=share, default=self._default)

    def surely_slower(self, name: str, leader: str, share: float = 0.0) -> bool:
        """Whether a candidate surely takes longer than the leader, by more than a share."""
        gap = self.gap(name, leader)
        return gap is not None and gap.surely_above(share, SURE)

    def open_against(self, leader: str, names: Sequence[str]) -> list[str]:
        """Candidates that may still be faster than the leader by more than :data:`WITHIN`."""
        gaps = {name: self.gap(name, leader) for name in names if name != leader}
        return [name for name, gap in gaps.items() if gap is None or not gap.surely_above(-WITHIN, SURE)]


def race(
    candidates: Sequence[Candidate],
    passes: Passes,
    use: Callable[[Candidate], int],
    *,
    limit_s: float,
    earlier: Sequence[Comparison] = (),
    hardness: Callable[[], float] = lambda: 0.0,
    report: Callable[[float], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Raced:
    """Time candidates in turns of a few tokens, and drop those that are surely slower than the leader.

    The text continues from turn to turn, because with the same tokens each turn would find the experts that
    the one before has fetched; tokens are compared at equal hardness instead
    (:class:`moechat.trials.Comparison`). The race ends when no candidate can be faster than the leader by
    more than :data:`WITHIN`, or with the time.

    Args:
        candidates: At least one; the first is the default, the others most important first.
        passes: Runs passes of the model.
        use: Makes a candidate take effect; returns the tokens that it needs to settle.
        limit_s: Seconds after which no further token is begun.
        earlier: Comparisons of earlier starts.
        hardness: Running sum of the text's hardness, the same for any plan.
        report: Called after each token with the share of the time that has passed.
        clock: Replaces the clock in tests.

    Raises:
        Exception: Errors of ``passes`` and ``use``, KeyboardInterrupt included.
    """
    started = clock()
    deadline = started + limit_s
    session = Comparison()
    evidence = Evidence([*earlier, session], candidates[0].name)

    def decode() -> float:
        seconds = passes.decode()
        report(min(1.0, (clock() - started) / limit_s))
        return seconds

    use(candidates[0])
    first: list[float] = []
    while len(first) < 2 or (len(first) < _FIRST_TOKENS and clock() - started < _FIRST_SHARE * limit_s):
        if clock() >= deadline:
            break
        last = hardness()
        first.append(decode())
        if len(first) > _FILL_TOKENS:
            session.add(candidates[0].name, first[-1], _hard(candidates[0], hardness() - last))
    pace = statistics.median(first[len(first) // 2 :]) if first else limit_s
    extra = _prompts(candidates, passes, use, limit_s, pace)
    # Slow tokens: shorter turns, so that several candidates have one.
    left = (deadline - clock()) / max(pace, 1e-9)
    length = int(min(TURN_TOKENS, max(_FEWEST_TOKENS, left / _FEWEST_TURNS - _USUAL_SETTLE)))

    def turn(candidate: Candidate) -> bool:
        """Whether the turn was complete."""
        settle = use(candidate)
        if clock() + (settle + _FEWEST_TOKENS) * pace > deadline:
            return False
        before = hardness()
        for number in range(settle + length):
            if clock() >= deadline:
                return False
            seconds, last = decode() + extra.get(candidate.name, 0.0), before
            before = hardness()
            if number < settle:
                continue
            session.add(candidate.name, seconds, _hard(candidate, before - last))
            counted = number - settle + 1
            leader = evidence.leader(names)
            if counted >= _FEWEST_TOKENS and evidence.surely_slower(candidate.name, leader, _HOPELESS):
                break
        return True

    names = [candidate.name for candidate in candidates]
    # The default runs in every session, so that the sessions compare.
    leader = evidence.leader(names)
    others = [each for each in candidates[1:] if not evidence.surely_slower(each.name, leader)]
    # Those that earlier starts had no time for come first.
    alive = [candidates[0], *sorted(others, key=lambda each: evidence.tokens(each.name))]
    for number in range(MOST_ROUNDS):
        if len(alive) < 2:
            break
        for candidate in _order(alive, number):
            if not turn(candidate):
                return Raced(session, pace, clock() - started)
        leader = evidence.leader(names)
        alive = [each for each in alive if not evidence.surely_slower(each.name, leader)]
        if not evidence.open_against(leader, [each.name for each in alive]):
            break
    return Raced(session, pace, clock() - started)


def _hard(candidate: Candidate, counted: float) -> float | None:
    """While the store is mapped nothing counts the hardness."""
    return None if candidate.settings is None else counted


def _prompts(
    candidates: Sequence[Candidate],
    passes: Passes,
    use: Callable[[Candidate], int],
    limit_s: float,
    pace: float,
) -> dict[str, float]:
    """Seconds to add to a token for the prompt of its answer, where prompts take different ways."""
    mapped = next((each for each in candidates if each.settings is None), None)
    if mapped is None or 2 * passes.prompt_tokens * pace > _PROMPT_SHARE * limit_s:
        return {}
    usual = passes.prefill() / _ANSWER_TOKENS
    use(mapped)
    extra = dict.fromkeys((each.name for each in candidates), usual)
    return extra | {mapped.name: passes.prefill() / _ANSWER_TOKENS}


def _order(candidates: Sequence[Candidate], number: int) -> list[Candidate]:
    """The order of a round: odd rounds are reversed, so that a drift of the machine hits all alike."""
    return list(candidates[::-1] if number % 2 else candidates)
