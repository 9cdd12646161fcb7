"""Tests of timing candidates in turns, on a simulated clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.tuner import Candidate, candidates, choose, time_candidates
from moechat.tuner.timing import MOST_ROUNDS, Turn, even_out

AUTO = SYSTEMS["auto"]


def named(*names: str) -> list[Candidate]:
    return [Candidate(name, name, CacheSettings()) for name in names]


@dataclass
class Machine:
    """A simulated machine with a cost in seconds a token for each candidate, noise, and settling time."""

    costs: dict[str, float]
    noise: float = 0.0
    settling: int = 0
    prompt_tokens: int = 32
    draw: random.Random = field(default_factory=lambda: random.Random(3))
    now: float = 100.0
    active: str = ""
    used: list[str] = field(default_factory=list)
    decoded: int = 0
    prompts: int = 0
    since: int = 0

    def use(self, candidate: Candidate) -> None:
        self.active, self.since = candidate.name, 0
        self.used.append(candidate.name)

    def clock(self) -> float:
        return self.now

    def _pass(self, seconds: float) -> float:
        seconds *= 1 + self.noise * abs(self.draw.gauss(0, 1))
        self.now += seconds
        return seconds

    def decode(self) -> float:
        self.decoded += 1
        self.since += 1
        return self._pass(self.costs[self.active] * (5 if self.since <= self.settling else 1))

    def prefill(self) -> float:
        self.prompts += 1
        return self._pass(3 * self.costs[self.active])


def test_every_candidate_has_equally_many_turns_and_begins_some_round() -> None:
    machine = Machine({"computed": 0.004, "plain": 0.005, "dp": 0.003}, prompt_tokens=10_000)
    timed = time_candidates(named(*machine.costs), machine, machine.use, limit_s=6.0, clock=machine.clock)
    assert [timing.rounds for timing in timed.timings] == [MOST_ROUNDS] * 3
    assert machine.prompts == 0, "they would have taken longer than a quarter of the time"
    rounds = [machine.used[1:][start : start + 3] for start in range(0, 3 * MOST_ROUNDS, 3)]
    assert all(sorted(order) == sorted(machine.costs) for order in rounds)
    assert {order[0] for order in rounds} == set(machine.costs)
    for timing in timed.timings:
        assert timing.token_seconds == pytest.approx(machine.costs[timing.name])
    assert not timed.left_out


def test_warm_up_tokens_of_a_plan_are_not_counted() -> None:
    machine = Machine({"computed": 0.004, "plain": 0.005}, settling=2)
    timed = time_candidates(named(*machine.costs), machine, machine.use, limit_s=5.0, clock=machine.clock)
    assert timed.timings[0].decode == pytest.approx([0.004] * MOST_ROUNDS)


def test_a_short_prompt_is_timed_too() -> None:
    machine = Machine({"computed": 0.004, "plain": 0.005}, prompt_tokens=32)
    timed = time_candidates(named(*machine.costs), machine, machine.use, limit_s=6.0, clock=machine.clock)
    assert timed.timings[0].prefill == pytest.approx([0.012, 0.012])


@pytest.mark.parametrize("pace", [1e-4, 0.004, 0.03, 0.2, 0.9, 3.0])
def test_the_time_limit_is_exceeded_by_at_most_one_token(pace: float) -> None:
    costs = {name: pace * factor for name, factor in zip("abcdefgh", (1, 2, 1, 3, 1, 1, 2, 1), strict=True)}
    machine = Machine(costs)
    timed = time_candidates(named(*costs), machine, machine.use, limit_s=5.0, clock=machine.clock)
    assert timed.seconds <= 5.0 + 3 * pace
    assert len({timing.rounds for timing in timed.timings}) == 1
    assert [timing.name for timing in timed.timings] + list(timed.left_out) == list(costs)
    assert len(timed.timings) >= 2, "the first two stay, however slow they are"


def test_slow_models_get_fewer_candidates_and_very_slow_ones_none() -> None:
    def rounds(pace: float) -> tuple[int, int]:
        machine = Machine(dict.fromkeys("abcdefgh", pace))
        timed = time_candidates(named(*machine.costs), machine, machine.use, limit_s=5.0, clock=machine.clock)
        return len(timed.timings), timed.timings[0].rounds

    assert rounds(0.004) == (8, MOST_ROUNDS)
    few, enough = rounds(0.04)
    assert 2 <= few < 8
    assert enough >= 3
    assert rounds(0.25) == (2, 1)
    assert rounds(1.0) == (2, 0)


@pytest.mark.parametrize(("pace", "tokens"), [(0.5, 2), (1.0, 2), (3.0, 1), (60.0, 1)])
def test_timing_stops_early_if_rounds_cannot_finish_in_time(pace: float, tokens: int) -> None:
    machine = Machine(dict.fromkeys("abc", pace))
    timed = time_candidates(named(*machine.costs), machine, machine.use, limit_s=5.0, clock=machine.clock)
    assert machine.decoded == tokens
    assert timed.seconds == pytest.approx(tokens * pace)
    assert [timing.rounds for timing in timed.timings] == [0, 0]
    assert (timed.left_out, timed.pace) == (("c",), pace)


def test_a_slow_first_token_does_not_count_as_the_pace() -> None:
    machine = Machine({"computed": 0.02, "plain": 0.02}, settling=1)
    machine.costs = dict.fromkeys(machine.costs, 0.2)
    decode = machine.decode

    def cold() -> float:
        seconds = decode()
        machine.costs = dict.fromkeys(machine.costs, 0.02)
        return seconds

    machine.decode = cold  # type: ignore[method-assign]
    timed = time_candidates(named(*machine.costs), machine, machine.use, limit_s=5.0, clock=machine.clock)
    assert timed.timings[0].rounds >= 3


def test_progress_runs_from_zero_to_one_and_an_interrupt_is_raised() -> None:
    machine = Machine({"computed": 0.004, "plain": 0.005})
    shares: list[float] = []

    def report(share: float) -> None:
        shares.append(share)
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time_candidates(
            named(*machine.costs), machine, machine.use, limit_s=2.0, report=report, clock=machine.clock
        )
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.3


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_candidate_wins_on_a_noisy_machine(seed: int) -> None:
    machine = Machine({"computed": 0.01, "plain": 0.013, "dp": 0.0075}, noise=0.1, draw=random.Random(seed))
    timed = time_candidates(named(*machine.costs), machine, machine.use, limit_s=6.0, clock=machine.clock)
    assert choose(timed.timings, default="computed", plain="plain").winner == "dp"


@dataclass
class Text(Machine):
    """A machine on which a token's cost rises with the hardness of the text (experts that no plan keeps)."""

    asked: float = 0.0
    hard: float = 5.0

    def decode(self) -> float:
        self.hard = min(9.0, max(1.0, self.hard + self.draw.gauss(0, 1.5)))
        self.asked += self.hard
        self.decoded += 1
        return self._pass(self.costs[self.active] + 0.002 * self.hard)


def spreads(knows: bool) -> list[float]:
    machine = Text({"computed": 0.004, "plain": 0.006, "dp": 0.0025})
    timed = time_candidates(
        named(*machine.costs),
        machine,
        machine.use,
        limit_s=6.0,
        hardness=lambda: machine.asked if knows else None,
        clock=machine.clock,
    )
    if knows:
        for timing in timed.timings:
            steady = machine.costs[timing.name] + 0.002 * 5
            assert timing.token_seconds == pytest.approx(steady, abs=0.002)
        assert choose(timed.timings, default="computed", plain="plain").winner == "dp"
    return [timing.token_spread for timing in timed.timings]


def test_differences_in_text_hardness_are_corrected() -> None:
    known, unknown = spreads(knows=True), spreads(knows=False)
    assert max(known) < 0.2 * min(unknown)


def test_correction_for_hardness_needs_enough_turns_and_a_positive_slope() -> None:
    turns = [Turn("a", 1.0 + 0.1 * hard, hard) for hard in (1.0, 2.0, 3.0, 4.0)]
    turns += [Turn("b", 2.0 + 0.1 * hard, hard) for hard in (1.0, 2.0, 3.0, 4.0)]
    even = even_out(turns)
    assert [turn.seconds for turn in even] == pytest.approx([1.25] * 4 + [2.25] * 4)
    assert even_out(turns[:3]) == turns[:3], "three turns say too little"
    hiccup = [*turns, Turn("a", 50.0, 2.5)]
    assert even_out(hiccup)[0].seconds == pytest.approx(1.25, abs=0.05)
    without = [Turn(turn.name, turn.seconds, None) for turn in turns]
    assert even_out(without) == without
    # Times that fall with hardness are due to chance or another cause, and are not corrected.
    turned = [Turn("a", 2.0 - 0.1 * hard, hard) for hard in (1.0, 2.0, 3.0, 4.0)]
    assert even_out(turned) == turned


def test_candidates_work_with_the_current_runner() -> None:
    found = candidates(replace(AUTO, choose=False), 8, may_map=False)
    assert [candidate.name for candidate in found][:2] == ["computed", "plain"]
    assert len({candidate.name for candidate in found}) == len(found)
    for candidate in found:
        assert candidate.settings is not None
        assert (candidate.settings.policy, candidate.settings.whole_experts) == (
            AUTO.policy,
            AUTO.whole_experts,
        )
    assert found[1].settings == CacheSettings(
        policy=AUTO.policy, split=1.0, allocation="uniform", prefetch="none", miss=AUTO.miss
    )


def test_the_mapped_store_is_a_candidate_only_if_allowed() -> None:
    found = candidates(AUTO, 8, may_map=True)
    assert [(candidate.name, candidate.settings is None) for candidate in found[:3]] == [
        ("computed", False),
        ("mapped", True),
        ("plain", False),
    ]
