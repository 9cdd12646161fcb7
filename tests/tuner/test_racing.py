"""Tests of racing candidates and of choosing among them, on a simulated clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from moechat.configurator.systems import SYSTEMS, CacheSettings
from moechat.trials import Comparison
from moechat.tuner import Candidate, candidates, choose, race
from moechat.tuner.racing import MOST_ROUNDS, TURN_TOKENS, WITHIN, Raced

AUTO = SYSTEMS["auto"]
SETTLE = 2


def named(*names: str) -> list[Candidate]:
    return [Candidate(name, name, CacheSettings()) for name in names]


@dataclass
class Machine:
    """A simulated machine: seconds a token of each candidate, more for hard tokens, and noise."""

    costs: dict[str, float]
    noise: float = 0.0
    by_hardness: float = 0.0
    prompt_tokens: int = 10_000
    draw: random.Random = field(default_factory=lambda: random.Random(3))
    now: float = 100.0
    active: str = ""
    hard: float = 5.0
    asked: float = 0.0
    decoded: dict[str, int] = field(default_factory=dict)
    turns: list[str] = field(default_factory=list)
    prompts: int = 0

    def use(self, candidate: Candidate) -> int:
        self.active = candidate.name
        self.turns.append(candidate.name)
        return SETTLE

    def clock(self) -> float:
        return self.now

    def decode(self) -> float:
        self.decoded[self.active] = self.decoded.get(self.active, 0) + 1
        self.hard = min(9.0, max(1.0, self.hard + self.draw.gauss(0, 1.5)))
        self.asked += self.hard
        seconds = self.costs[self.active] * (1 + self.by_hardness * (self.hard - 5))
        seconds *= max(0.5, 1 + self.noise * self.draw.gauss(0, 1))
        self.now += seconds
        return seconds

    def prefill(self) -> float:
        self.prompts += 1
        self.now += 3 * self.costs[self.active]
        return 3 * self.costs[self.active]

    def race(self, limit_s: float, *earlier: Comparison) -> Raced:
        return race(
            named(*self.costs),
            self,
            self.use,
            limit_s=limit_s,
            earlier=earlier,
            hardness=lambda: self.asked,
            clock=self.clock,
        )


def winner(machine: Machine, *sessions: Comparison) -> str:
    return choose(sessions, list(machine.costs), default="computed", plain="plain").winner


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_wins_within_the_time_of_a_start_though_tokens_differ(seed: int) -> None:
    costs = {"computed": 0.05, "plain": 0.06, "dp": 0.043, "two": 0.052, "halves": 0.08}
    machine = Machine(costs, noise=0.05, by_hardness=0.06, draw=random.Random(seed))
    assert winner(machine, machine.race(5.0).session) == "dp"


def test_choices_are_within_three_percent_of_the_best_as_often_as_stated() -> None:
    right = decided = 0
    for seed in range(60):
        draw = random.Random(1000 + seed)
        costs = {name: 0.05 * draw.uniform(0.9, 1.1) for name in ("computed", "plain", "dp", "two")}
        machine = Machine(costs, noise=0.05, by_hardness=0.06, draw=draw)
        choice = choose([machine.race(60.0).session], list(costs), default="computed", plain="plain")
        if choice.decided:
            decided += 1
            right += costs[choice.winner] <= (1 + WITHIN) * min(costs.values())
    assert decided >= 50
    assert right >= 0.95 * decided


def test_a_hopeless_candidate_is_dropped_after_a_part_of_one_turn() -> None:
    machine = Machine({"computed": 0.05, "plain": 0.2, "dp": 0.048})
    machine.race(20.0)
    assert machine.decoded["plain"] < SETTLE + TURN_TOKENS
    assert machine.turns.count("plain") == 1
    assert machine.decoded["dp"] > 2 * machine.decoded["plain"]


def test_the_time_limit_is_exceeded_by_at_most_one_token() -> None:
    for pace in (0.01, 0.3, 2.0, 30.0):
        machine = Machine({"computed": pace, "plain": pace})
        raced = machine.race(5.0)
        assert raced.seconds <= 5.0 + pace
        assert raced.pace == pytest.approx(pace, rel=0.01)


def test_too_slow_a_model_keeps_the_computed_plan_and_decides_nothing() -> None:
    machine = Machine({"computed": 2.0, "plain": 1.0})
    choice = choose([machine.race(5.0).session], list(machine.costs), default="computed", plain="plain")
    assert (choice.winner, choice.decided) == ("computed", False)


def test_a_start_goes_on_where_the_one_before_ended() -> None:
    costs = {"computed": 0.5, "plain": 0.9, "dp": 0.4}
    sessions: list[Comparison] = []
    choice = None
    for start in range(1, 9):
        machine = Machine(costs, noise=0.03, by_hardness=0.05, draw=random.Random(start))
        # The machine is another speed each time.
        machine.costs = {name: seconds * (1 + 0.2 * (start % 3)) for name, seconds in costs.items()}
        sessions.append(machine.race(16.0, *sessions).session)
        choice = choose(sessions, list(costs), default="computed", plain="plain")
        if choice.decided:
            break
    assert choice is not None
    assert (choice.winner, choice.decided) == ("dp", True)
    assert 1 < start < 8
    last = Machine(costs, draw=random.Random(99))
    last.race(30.0, *sessions)
    assert last.decoded.keys() == {"computed", "dp"}, "candidates that are surely slower are dropped"


def test_equal_candidates_end_by_certainty_or_rounds_and_keep_the_default() -> None:
    machine = Machine(dict.fromkeys(("computed", "plain", "dp"), 0.01), noise=0.02)
    raced = machine.race(1000.0)
    choice = choose([raced.session], list(machine.costs), default="computed", plain="plain")
    assert choice.decided
    assert raced.session.tokens("dp") <= MOST_ROUNDS * TURN_TOKENS
    assert raced.seconds < 20


def test_a_plan_slower_than_the_plain_plan_is_never_chosen() -> None:
    session = Comparison()
    for number in range(6):
        session.add("computed", 0.0502 + 0.001 * (number % 2), 0.0)
        session.add("plain", 0.050 + 0.001 * (number % 2), 0.0)
        session.add("dp", 0.0501 + 0.001 * (number % 2), 0.0)
    choice = choose([session], ["computed", "plain", "dp"], default="computed", plain="plain")
    assert choice.winner == "plain"
    assert "a plan slower than plain is never chosen" in choice.why
    same = choose([session], ["computed", "dp"], default="computed", plain="computed")
    assert same.winner == "computed", "a gain below the noise is none"


def test_names_that_do_not_fit_are_refused() -> None:
    for names in (["computed", "computed"], ["computed"], ["plain", "dp"]):
        with pytest.raises(ValueError, match="duplicates, or lack"):
            choose([], names, default="computed", plain="plain")


def test_progress_runs_from_zero_to_one_and_an_interrupt_is_raised() -> None:
    machine = Machine({"computed": 0.05, "plain": 0.05})
    shares: list[float] = []

    def report(share: float) -> None:
        shares.append(share)
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race(named(*machine.costs), machine, machine.use, limit_s=3.0, report=report, clock=machine.clock)
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.1


@pytest.mark.parametrize(("tokens", "timed"), [(4, 2), (10_000, 0)])
def test_the_prompt_of_a_mapped_store_counts_where_it_is_cheap(tokens: int, timed: int) -> None:
    machine = Machine({"computed": 0.01, "mapped": 0.0099}, prompt_tokens=tokens)
    machine_prompts = {"computed": 0.1, "mapped": 0.9}

    def prefill() -> float:
        machine.prompts += 1
        return machine_prompts[machine.active]

    machine.prefill = prefill  # type: ignore[method-assign]
    found = [Candidate("computed", "", CacheSettings()), Candidate("mapped", "", None)]
    session = race(found, machine, machine.use, limit_s=5.0, clock=machine.clock).session
    assert machine.prompts == timed
    gap = session.gap("mapped", "computed")
    assert gap is not None
    assert (gap.share > 0.1) == bool(timed)


@pytest.mark.parametrize("far", [False, True])
def test_candidates_work_with_the_current_runner_and_differ(far: bool) -> None:
    for start in (replace(AUTO, choose=False), replace(AUTO, choose=False, prefetch="prompts", lookahead=2)):
        found = candidates(start, 8, may_map=False, far_computes=far)
        assert [candidate.name for candidate in found][:2] == ["computed", "plain"]
        assert len({candidate.name for candidate in found}) == len(found)
        for candidate in found:
            assert candidate.settings is not None
            assert (candidate.settings.policy, candidate.settings.whole_experts) == (
                AUTO.policy,
                AUTO.whole_experts,
            )
        kinds = {(each.settings.ranks, each.settings.miss) for each in found if each.settings is not None}
        assert {True, False} <= {ahead for ahead, _ in kinds}, "with speculation and without"
        assert not far or {miss for _, miss in kinds} == {"both", "compute", "cpu", "fetch", "seldom"}


def test_the_mapped_store_is_a_candidate_only_if_allowed() -> None:
    found = candidates(AUTO, 8, may_map=True)
    assert [(candidate.name, candidate.settings is None) for candidate in found[:3]] == [
        ("computed", False),
        ("mapped", True),
        ("plain", False),
    ]
