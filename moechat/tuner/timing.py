"""Times candidates in turns, within a limit of seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from moechat.tuner.candidates import Candidate
from moechat.tuner.choice import LEAST_ROUNDS, Timing

MOST_ROUNDS = 8
# Tokens of a turn: the first ones let the near tier adapt to the plan, the others are timed.
_FEWEST_TOKENS, _MOST_TOKENS = 6, 30
_SETTLE_SHARE = 1 / 3
# The first turn estimates the seconds per token: at most this many tokens and this share of the limit. Its
# first token also fills the near tier, so a second one follows if the first took less than the second share.
_FIRST_TOKENS, _FIRST_SHARE, _SECOND_SHARE = 12, 0.15, 0.5
# All prompts together may take this share of the limit.
_PREFILL_SHARE = 0.25
_PREFILL_ROUNDS = 2
# Some candidates are slower than the first.
_SLACK = 1.3
# Fewer pairs of turns do not show the cost of hardness.
_FEWEST_SLOPES = 6


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
class Timed:
    """The result of timing.

    Attributes:
        timings: Of the candidates that there was time for, equally many rounds of each.
        left_out: Names of the others.
        pace: Seconds a token of the first candidate in its first turn.
        seconds: Time of the whole measurement.
    """

    timings: tuple[Timing, ...]
    left_out: tuple[str, ...]
    pace: float
    seconds: float


@dataclass(frozen=True)
class Turn:
    """One turn of one candidate.

    Attributes:
        name: Of the candidate.
        seconds: Mean seconds per token.
        hardness: Hardness of the text per token; ``None``: unknown.
    """

    name: str
    seconds: float
    hardness: float | None


def even_out(turns: Sequence[Turn]) -> list[Turn]:
    """The turns as if all had had text of the same hardness.

    The cost of hardness is the median slope between turns of the same candidate (Theil and Sen), at least 0;
    short disturbances of the machine hardly change it. A turn loses at most half of its time.
    """
    known = [turn for turn in turns if turn.hardness is not None]
    slopes = [
        (one.seconds - other.seconds) / (one.hardness - other.hardness)
        for place, one in enumerate(known)
        for other in known[:place]
        if one.name == other.name
        and one.hardness is not None
        and other.hardness is not None
        and one.hardness != other.hardness
    ]
    if len(slopes) < _FEWEST_SLOPES:
        return list(turns)
    slope = max(0.0, statistics.median(slopes))
    usual = statistics.fmean(turn.hardness for turn in known if turn.hardness is not None)
    return [
        turn
        if turn.hardness is None
        else replace(turn, seconds=max(turn.seconds / 2, turn.seconds - slope * (turn.hardness - usual)))
        for turn in turns
    ]


def time_candidates(
    candidates: Sequence[Candidate],
    passes: Passes,
    use: Callable[[Candidate], None],
    *,
    limit_s: float,
    hardness: Callable[[], float | None] = lambda: None,
    report: Callable[[float], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timed:
    """Time candidates in interleaved rounds.

    In each round every candidate has a turn of a few tokens; the order is rotated and reversed from round to
    round. The text continues from turn to turn, because with the same tokens each turn would find the experts
    that the previous one has fetched. If the time is too short for three rounds of all, the last candidates
    are left out, but never the first two. An unfinished round does not count, and no round is begun if the
    first tokens show that none could end in time.

    Some texts need more uncached experts than others. If ``hardness`` measures that, the times are corrected,
    see :func:`even_out`.

    Args:
        candidates: At least one, most important first.
        passes: Runs passes of the model.
        use: Makes a candidate take effect.
        limit_s: Seconds after which no further token is begun.
        hardness: Returns the running sum of the text's difficulty, the same for any plan; ``None``: unknown.
        report: Called after each token with the share of the time that has passed.
        clock: Replaces the clock in tests.

    Raises:
        Exception: Errors of ``passes`` and ``use``, KeyboardInterrupt included.
    """
    started = clock()
    deadline = started + limit_s
    use(candidates[0])
    first = [passes.decode()]
    while len(first) < _FIRST_TOKENS:
        share = _FIRST_SHARE if len(first) > 1 else _SECOND_SHARE
        if clock() >= started + share * limit_s:
            break
        first.append(passes.decode())
    pace = statistics.median(first[len(first) // 2 :])

    tokens_left = max(0.0, deadline - clock()) / (pace * _SLACK)
    if tokens_left < 2 * _FEWEST_TOKENS:  # no round could end, so stop early
        nothing = tuple(Timing(candidate.name) for candidate in candidates[:2])
        left_out = tuple(candidate.name for candidate in candidates[2:])
        return Timed(nothing, left_out, pace, clock() - started)
    turns = int(tokens_left / _FEWEST_TOKENS)
    kept = list(candidates[: max(2, min(len(candidates), turns // LEAST_ROUNDS))])
    per_turn = int(tokens_left / (len(kept) * MOST_ROUNDS))
    per_turn = min(_MOST_TOKENS, max(_FEWEST_TOKENS, per_turn))
    settle = max(2, int(per_turn * _SETTLE_SHARE))
    prompts = len(kept) * _PREFILL_ROUNDS * passes.prompt_tokens * pace
    with_prompts = prompts <= _PREFILL_SHARE * limit_s

    turns_taken: list[Turn] = []
    prefill: dict[str, list[float]] = {candidate.name: [] for candidate in kept}
    for number in range(MOST_ROUNDS):
        taken: list[Turn] = []
        prompted: dict[str, float] = {}
        for candidate in _order(kept, number):
            use(candidate)
            if with_prompts and number < _PREFILL_ROUNDS:
                prompted[candidate.name] = passes.prefill()
            seconds: list[float] = []
            before = None
            while len(seconds) < per_turn and clock() < deadline:
                before = hardness() if len(seconds) == settle else before
                seconds.append(passes.decode())
                report(min(1.0, (clock() - started) / limit_s))
            if len(seconds) < per_turn:
                break
            after = None if before is None else hardness()
            hard = None
            # The near tier counts nothing while the store is mapped.
            if before is not None and after is not None and after > before:
                hard = (after - before) / (per_turn - settle)
            taken.append(Turn(candidate.name, statistics.fmean(seconds[settle:]), hard))
        if len(taken) < len(kept):
            break
        turns_taken += taken
        for name, seconds_taken in prompted.items():
            prefill[name].append(seconds_taken)
    decode: dict[str, list[float]] = {candidate.name: [] for candidate in kept}
    for turn in even_out(turns_taken):
        decode[turn.name].append(turn.seconds)
    return Timed(
        tuple(Timing(name, tuple(decode[name]), tuple(prefill[name])) for name in decode),
        tuple(candidate.name for candidate in candidates[len(kept) :]),
        pace,
        clock() - started,
    )


def _order(candidates: Sequence[Candidate], number: int) -> list[Candidate]:
    """The order of a round: every second round has another first candidate; odd rounds are reversed."""
    start = number // 2 % len(candidates)
    order = [*candidates[start:], *candidates[:start]]
    return order[::-1] if number % 2 else order
