"""Watches whether the way to run that is at work is the fastest, by short trials of its rivals.

A plan chooses the way by a model of the machine and by what was known of the routing; both can be wrong, and
both can change. So while answers are given, a rival takes over for a few tokens now and then, in turns with
the way at work, and replaces it when it is surely faster. The tokens are the same with every way. Pure: no
clock, no engine.

What it costs is bounded: no trial begins whose expected loss exceeds what the tokens so far allow
(:data:`ALLOWED_SHARE` of their time and :data:`ALLOWED_TOKENS`), and a trial ends as soon as the rival is
surely slower, or has lost more than that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moechat.trials.comparison import Comparison, Gap

# Time that trials may lose: this share of all time, and so many tokens.
ALLOWED_SHARE, ALLOWED_TOKENS = 0.003, 8
# A rival must gain this share to be worth a change.
LEAST_GAIN = 0.01
# Standard errors that make a difference sure.
_SURE = 2.5
# Tokens before the first trial, for the cache to fill; and between the trials of a round.
_FIRST, _PAUSE = 24, 8
# Tokens between rounds: doubled after each round without a change.
_LEAST_REST, _MOST_REST = 256, 4096
# A turn of a trial. What the turn before has in flight still arrives in its first tokens.
_TURN, _SETTLE = 16, 2
# Tokens of the way at work that a trial begins with, at least.
_FEWEST_RECENT = 8
# Tokens of each way that decide a trial that is not sure before.
_MOST_TOKENS = 64
_FEWEST_TOKENS = 3
# Tokens that a trial is taken to need to drop a slow rival.
_DROP_TOKENS = 6
# A trial may lose this many tokens' time beyond what is allowed, so that a little noise does not end it; and
# has at least this many tokens, of which the slowest counts as this many times the expected time, unless
# another one took as long: a single disturbed token says nothing of the rival.
_SLACK_TOKENS, _FEWEST_LOSING, _MOST_TIMES_EXPECTED = 1, 2, 2.5


@dataclass(frozen=True)
class Switch:
    """A rival that replaced the way at work.

    Attributes:
        token: Tokens watched until then.
        before: The way that was at work.
        after: The rival.
        gap: How much longer a token took with the rival.
    """

    token: int
    before: str
    after: str
    gap: Gap


def _surely_gains(gap: Gap) -> bool:
    """Whether a rival with this gap is surely faster, by enough to be worth a change."""
    return gap.share < -LEAST_GAIN and gap.surely_below(0.0, _SURE)


class Watch:
    """Decides how the next token runs. Not safe for several threads.

    Args:
        ways: All ways; the one at work among them.
        at_work: The way at first.
        expected: Expected seconds of a token, by way; those that lack are taken to be as fast as
            ``at_work``. Only the ratios matter, and only for the order of trials and their expected loss.

    Attributes:
        way: The way that computes the next token: the one at work, or a rival on trial.
        at_work: The way at work.
        switches: Changes so far.
        rounds: Rounds of trials that are complete; those without a trial do not count.

    Raises:
        ValueError: ``at_work`` is not among the ways, or a way occurs twice.
    """

    def __init__(self, ways: Sequence[str], at_work: str, expected: Mapping[str, float]) -> None:
        if at_work not in ways or len(set(ways)) != len(ways):
            raise ValueError(f"{at_work!r} has to be one of {list(ways)}, each once")
        base = expected.get(at_work, 0.0)
        # Ways of which an expected time or a trial tells how fast they are.
        self._known = {way for way in ways if way in expected and base > 0} | {at_work}
        # By how much longer a token takes than with the way at work; 0 for those that are not known.
        self._gaps = {way: expected[way] / base - 1 if base > 0 and way in expected else 0.0 for way in ways}
        self.way = self.at_work = at_work
        self.switches: list[Switch] = []
        self.rounds = 0
        self._waiting: list[str] = []  # rivals of this round
        self._rest = _FIRST  # tokens until the next trial
        self._between = _LEAST_REST  # tokens after this round
        # The last tokens of the way at work: seconds and hardness.
        self._recent: deque[tuple[float, float]] = deque(maxlen=_TURN)
        self._rival: str | None = None  # on trial
        self._trial = Comparison()
        self._since = Comparison()  # its tokens from the rival's first on
        self._turn = 0  # tokens of this turn
        # By token of the rival on trial: expected seconds with the way at work, and by how many times it took
        # longer.
        self._excess: list[tuple[float, float]] = []
        self._allowed = 0.0  # what the trial may lose, in seconds
        self._tried = False  # a trial of this round has ended
        self._tokens = 0
        self._seconds = self._lost = 0.0

    @property
    def lost_share(self) -> float:
        """Share of all time that trials have lost, estimated."""
        return self._lost / self._seconds if self._seconds > 0 else 0.0

    def pause(self) -> None:
        """An answer has ended: the tokens before do not compare with those that follow."""
        self._recent.clear()
        self._turn = 0

    def abandon(self) -> None:
        """End a trial without a result; it begins again later."""
        if self._rival is not None:
            self._lost += self._losing
            self._waiting.insert(0, self._rival)
            self._rival, self.way = None, self.at_work
        self.pause()

    def token(self, seconds: float, hardness: float) -> bool:
        """Count a token that was computed by :attr:`way`.

        Args:
            seconds: Its time.
            hardness: As for :meth:`Comparison.add`.

        Returns:
            Whether :attr:`way` has changed.
        """
        before = self.way
        self._tokens += 1
        self._seconds += seconds
        self._turn += 1
        if self._rival is None:
            self._recent.append((seconds, hardness))
            self._rest -= 1
            if self._rest <= 0 and len(self._recent) >= _FEWEST_RECENT:
                self._begin()
        else:
            self._on_trial(self._rival, seconds, hardness)
        if self.way != before:
            self._turn = 0
        return self.way != before

    # ---- trials

    def _begin(self) -> None:
        """Begin the next trial, or wait for one that is allowed."""
        if not self._waiting:
            self._waiting = sorted(
                (way for way in self._gaps if way != self.at_work), key=lambda way: self._gaps[way]
            )
        mean = self._seconds / self._tokens
        allowed = ALLOWED_SHARE * self._seconds + ALLOWED_TOKENS * mean - self._lost
        if not self._waiting or _DROP_TOKENS * max(0.0, self._gaps[self._waiting[0]]) * mean > allowed:
            self._end_round()
            return
        self._allowed = allowed + _SLACK_TOKENS * mean
        self._excess = []
        self._rival = self.way = self._waiting.pop(0)
        self._trial, self._since = Comparison(), Comparison()
        for seconds, hardness in self._recent:
            self._trial.add(self.at_work, seconds, hardness)

    def _on_trial(self, rival: str, seconds: float, hardness: float) -> None:
        """Count a token of a trial, then end the trial, or choose the way of its next token."""
        if self.way == rival:
            expected = self._trial.expected(self.at_work, hardness)
            self._excess.append((expected, seconds / expected - 1))
        if self._turn > _SETTLE:
            self._trial.add(self.way, seconds, hardness)
            self._since.add(self.way, seconds, hardness)
        gap = self._trial.gap(rival, self.at_work)
        if gap is not None and self._trial.tokens(rival) >= _FEWEST_TOKENS:
            wins = self._wins(rival, gap)
            if wins is not None:
                self._end(rival, gap, wins=wins)
                return
            if _surely_gains(gap) and not self._compared_since:
                self.way = self.at_work
                return
        if len(self._excess) >= _FEWEST_LOSING and self._losing > self._allowed:
            # All of its tokens were at least so slow.
            self._end(rival, Gap(min(share for _, share in self._excess), 0.0), wins=False)
        elif self._turn >= _TURN:
            self.way = self.at_work if self.way == rival else rival

    def _wins(self, rival: str, gap: Gap) -> bool | None:
        """Whether the rival wins its trial; ``None``: that is not decided yet."""
        # Tokens may have become faster by themselves, for example while the cache fills. So the rival also
        # has to be faster than the way at work is afterwards.
        since = self._since.gap(rival, self.at_work)
        faster = gap.share < -LEAST_GAIN and since is not None and since.surely_below(0.0, 1.0)
        if faster and _surely_gains(gap) and self._compared_since:
            return True
        if gap.surely_above(-LEAST_GAIN, _SURE):
            return False
        if min(self._trial.tokens(rival), self._trial.tokens(self.at_work)) < _MOST_TOKENS:
            return None
        # One error is enough, unless a model or an earlier trial says the contrary.
        return faster and gap.surely_below(0.0, 1.0 if self._gaps[rival] <= 0 else _SURE)

    @property
    def _compared_since(self) -> bool:
        """Whether the way at work has had tokens since the rival's first one."""
        return self._since.tokens(self.at_work) >= _FEWEST_TOKENS

    @property
    def _losing(self) -> float:
        """Seconds that the rival on trial has lost so far."""
        if not self._excess:
            return 0.0
        *others, (expected, most) = sorted(self._excess, key=lambda token: token[0] * token[1])
        # Where another token was as slow, it is the rival that is slow.
        counted = min(most, max([_MOST_TIMES_EXPECTED - 1, *(share for _, share in others)]))
        total = sum(expected * share for expected, share in self._excess)
        return max(0.0, total - expected * (most - counted))

    def _end(self, rival: str, gap: Gap, *, wins: bool) -> None:
        self._lost += self._losing
        self._tried = True
        # A gap that is not sure may be smaller, and a rival that lost by chance is tried again.
        self._gaps[rival] = gap.share - gap.error
        self._known.add(rival)
        self._rival = None
        self._recent.clear()
        self._rest = _PAUSE
        if wins:
            self.switches.append(Switch(self._tokens, self.at_work, rival, gap))
            gained = min(0.0, gap.share + gap.error)
            for way in self._known:
                self._gaps[way] = (1 + self._gaps[way]) / (1 + gained) - 1
            self._gaps[rival] = 0.0
            # Rivals that lost against the way before are not tried again in this round.
            self.at_work = rival
            self._between = _LEAST_REST
        self.way = self.at_work
        if not self._waiting:
            self._end_round()

    def _end_round(self) -> None:
        self._waiting = []
        self.rounds += self._tried
        self._tried = False
        self._rest = self._between
        self._between = min(2 * self._between, _MOST_REST)
