"""Tests of the watch: what it finds, how soon, and what its trials cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moechat.trials import Watch
from moechat.trials.watch import ALLOWED_SHARE, ALLOWED_TOKENS

# How long a token takes with each way, divided by a usual one.
Times = Mapping[str, float]
USUAL = 1.8  # seconds of a usual token


@dataclass
class Machine:
    """Computes tokens of varying hardness and tells a watch.

    Attributes:
        watch: The watch.
        times: Times of the ways from a token on.
        noise: Standard deviation of the tokens' logarithms at equal hardness.
        tokens: Tokens so far.
        used: Way of each token.
        lost: Time that tokens of rivals took longer than with the way at work, in usual tokens.
    """

    watch: Watch
    times: Times | Callable[[int], Times]
    noise: float = 0.05
    seed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    used: list[str] = field(default_factory=list)
    at_work: list[str] = field(default_factory=list)
    lost: float = 0.0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def play(self, tokens: int) -> Machine:
        for _ in range(tokens):
            times = self.times(self.tokens) if callable(self.times) else self.times
            way, hardness = self.watch.way, max(0.0, self._random.normal(40, 10))
            usual = 1 + 0.02 * hardness
            self.lost += usual * max(0.0, times[way] - times[self.watch.at_work]) / USUAL
            seconds = usual * times[way] * math.exp(self.noise * self._random.normal())
            self.seconds += seconds
            self.used.append(way)
            self.at_work.append(self.watch.at_work)
            self.tokens += 1
            changed = self.watch.token(seconds, hardness)
            assert changed == (self.watch.way != way)
        return self


def machine(times: Times, at_work: str = "one", expected: Times | None = None, seed: int = 0) -> Machine:
    return Machine(Watch(list(times), at_work, expected or {}), times, seed=seed)


@pytest.mark.parametrize(("time", "soon"), [(0.5, 40), (0.8, 40), (0.9, 100), (0.95, 200)])
def test_a_faster_rival_is_at_work_soon(time: float, soon: int) -> None:
    for seed in range(10):
        found = machine({"one": 1.0, "other": time}, seed=seed).play(soon)
        assert found.watch.at_work == "other", seed
        (switch,) = found.watch.switches
        assert (switch.before, switch.after) == ("one", "other")
        assert switch.token == found.at_work.index("other")
        assert switch.gap.share == pytest.approx(time - 1, abs=0.1)
        assert found.watch.way in ("one", "other")


def test_the_fastest_of_several_is_found_though_a_model_expects_the_contrary() -> None:
    times = {"one": 1.6, "two": 1.3, "three": 1.0, "four": 2.0}
    wrong = {"one": 1.0, "two": 1.3, "three": 1.6, "four": 0.9}
    for seed in range(10):
        found = machine(times, expected=wrong, seed=seed).play(300)
        assert found.watch.at_work == "three", seed


def test_rivals_are_tried_in_the_order_of_their_expected_times() -> None:
    found = machine(dict.fromkeys("abcd", 1.0), "a", {"a": 1.0, "b": 1.2, "c": 0.9, "d": 1.1}).play(400)
    order = list(dict.fromkeys(found.used))
    assert order == ["a", "c", "d", "b"]


def test_the_way_at_work_stays_while_all_are_equal() -> None:
    switches = [
        len(machine(dict.fromkeys("abc", 1.0), "a", seed=seed).play(1000).watch.switches)
        for seed in range(30)
    ]
    # A trial that no gap decides ends by the mean, and then a gain of a few percent may be noise.
    assert sum(switches) <= 10
    assert max(switches) <= 2


def test_slower_rivals_never_take_over() -> None:
    for seed in range(20):
        found = machine({"one": 1.0, "a": 1.1, "b": 1.3, "c": 2.0}, seed=seed).play(2000)
        assert found.watch.switches == []
        assert set(found.at_work) == {"one"}


def test_tokens_that_become_faster_by_themselves_are_no_gain_of_a_rival() -> None:
    """While the cache fills, for example."""
    fooled = 0
    for seed in range(20):
        watch = Watch(["one", "other"], "one", {})

        def times(token: int) -> Times:
            filling = 1 + 2 * math.exp(-token / 25)
            return {"one": filling, "other": 1.05 * filling}

        found = Machine(watch, times, seed=seed).play(120)
        fooled += bool(watch.switches)
        assert "other" in found.used
    assert fooled <= 2


def test_a_rival_that_is_expected_to_be_slower_has_to_be_surely_faster() -> None:
    """A difference of little more than a standard error is enough for one that nothing is said against."""
    times = {"one": 1.0, "other": 0.97}

    def taken(expected: float) -> int:
        found = 0
        for seed in range(60):
            watch = Watch(["one", "other"], "one", {"one": 1.0, "other": expected})
            Machine(watch, times, noise=0.15, seed=seed).play(260)
            found += watch.at_work == "other"
        return found

    assert taken(1.0) >= taken(1.1) + 10
    assert taken(1.1) > 0


@pytest.mark.parametrize("slower", [1.5, 2.0, 3.0, 10.0, 100.0])
def test_a_much_slower_rival_costs_little_and_is_not_tried_again_soon(slower: float) -> None:
    for seed in range(10):
        found = machine({"one": 1.0, "other": slower}, seed=seed).play(300)
        used = found.used.count("other")
        # Two tokens say that it is slow, not disturbed; others only within what is allowed.
        assert 2 <= used <= 10
        assert found.lost <= max(2 * 1.5 * (slower - 1), ALLOWED_TOKENS + 3)
        found.play(300)
        assert found.used.count("other") <= used + 6


def test_a_rival_that_is_expected_to_cost_more_than_is_allowed_is_not_tried() -> None:
    found = machine({"one": 1.0, "other": 10.0}, expected={"one": 1.0, "other": 10.0}).play(2000)
    assert found.used.count("other") == 0
    assert found.watch.rounds == 0, "nothing was tried, so nothing is confirmed"


def test_one_disturbed_token_does_not_exclude_a_faster_rival() -> None:
    for disturbed in range(6):
        watch, tokens = Watch(["one", "other"], "one", {}), 0
        for _ in range(800):
            tokens += watch.way == "other"
            hiccup = 50.0 if watch.way == "other" and tokens == disturbed else 1.0
            watch.token((0.8 if watch.way == "other" else 1.0) * hiccup, 1.0)
        assert watch.at_work == "other", disturbed


@given(
    gaps=st.lists(st.floats(0.0, 6.0), min_size=1, max_size=5),
    wrong=st.lists(st.floats(-0.9, 3.0), min_size=5, max_size=5),
    seed=st.integers(0, 1 << 20),
)
@example(gaps=[5.76, 4.71, 0.0, 5.72, 4.14], wrong=[1.0, 0.0, -0.22, 0.0, 0.0], seed=150)
def test_trials_lose_no_more_than_is_allowed_and_one_trial(
    gaps: list[float], wrong: list[float], seed: int
) -> None:
    """Whatever a model expects of rivals that are all slower."""
    times = {"one": 1.0, **{str(at): 1 + gap for at, gap in enumerate(gaps)}}
    expected = {"one": 1.0, **{str(at): 1 + gap for at, gap in enumerate(wrong[: len(gaps)])}}
    found = machine(times, expected=expected, seed=seed).play(5000)
    if found.watch.switches:  # a rival that is slower by so little that it looked faster
        assert min(gaps) < 0.1
        return
    # A trial may lose two tokens before it is known to, and what a token more or less of noise allows.
    trial = 2 * 1.6 * max(gaps) + 3
    assert found.lost <= ALLOWED_SHARE * 5000 * 1.1 + ALLOWED_TOKENS + trial
    assert found.watch.lost_share == pytest.approx(found.lost * USUAL / found.seconds, abs=0.0025)


@pytest.mark.parametrize("answer", [12, 20, 40])
def test_trials_that_are_abandoned_lose_no_more_either(answer: int) -> None:
    found = machine({"one": 1.0, "other": 1.4})
    for _ in range(5000 // answer):
        found.play(answer)
        found.watch.abandon()
    assert found.lost <= ALLOWED_SHARE * 5000 + ALLOWED_TOKENS + 6
    assert found.watch.lost_share == pytest.approx(found.lost * USUAL / found.seconds, abs=0.0025)


def test_an_abandoned_trial_ends_at_once_and_begins_again() -> None:
    found = machine({"one": 1.0, "other": 0.8})
    while found.watch.way == "one":
        found.play(1)
    found.watch.abandon()
    assert (found.watch.way, found.watch.at_work) == ("one", "one")
    found.watch.abandon()
    assert found.watch.switches == []
    found.play(7)
    assert found.watch.way == "one", "a trial begins with tokens of the same answer"
    found.play(60)
    assert found.watch.at_work == "other"


def test_tokens_before_a_pause_do_not_count_in_a_trial() -> None:
    watch = Watch(["one", "other"], "one", {})
    # An answer of slow tokens, whatever the way; the next one is fast.
    for _ in range(20):
        watch.token(1.5, 1.0)
    watch.pause()
    used = []
    for _ in range(100):
        used.append(watch.way)
        watch.token(1.0, 1.0)
    assert used[:8] == ["one"] * 8
    assert "other" in used
    assert watch.switches == []


def test_a_trial_goes_on_after_a_pause() -> None:
    found = machine({"one": 1.0, "other": 0.97})
    while found.watch.way == "one":
        found.play(1)
    found.watch.pause()
    assert found.watch.way == "other"
    found.play(300)
    assert found.watch.at_work == "other"


def test_a_rival_that_becomes_faster_later_is_noticed() -> None:
    noticed = []
    for seed in range(20):
        watch = Watch(["one", "other"], "one", {})
        later = Machine(watch, lambda token: {"one": 1.0, "other": 1.2 if token < 1000 else 0.8}, seed=seed)
        later.play(2200)
        assert watch.at_work == "other", seed
        noticed.append(later.at_work.index("other"))
    # Rounds begin after about 300, 800 and 1,900 tokens.
    assert min(noticed) > 1000
    assert max(noticed) < 2100


def test_a_way_that_becomes_slow_is_replaced() -> None:
    watch = Watch(["one", "other"], "one", {})
    later = Machine(watch, lambda token: {"one": 1.0 if token < 1000 else 1.5, "other": 1.2})
    later.play(1000)
    assert watch.at_work == "one"
    later.play(1200)
    assert watch.at_work == "other"


def test_rounds_without_a_change_become_rarer_and_a_change_begins_anew() -> None:
    found = machine({"one": 1.0, "other": 1.3}).play(12_000)
    used = np.flatnonzero(np.array(found.used) == "other")
    starts = used[np.flatnonzero(np.diff(used, prepend=-1000) > 100)]
    rests = np.diff(starts)
    assert all(1.5 < later / before < 2.5 for before, later in pairwise(rests))
    assert found.watch.rounds == len(starts)

    changed = Machine(
        Watch(["one", "other"], "one", {}), lambda token: {"one": 1.0, "other": 1.3 if token < 3000 else 0.7}
    ).play(6000)
    (switch,) = changed.watch.switches
    again = [at for at in range(switch.token, 6000) if changed.used[at] == "one"]
    assert again[0] - switch.token < 300


def test_one_way_alone_is_never_tried() -> None:
    found = machine({"one": 1.0}).play(500)
    assert set(found.used) == {"one"}
    assert (found.watch.rounds, found.watch.lost_share) == (0, 0.0)


@pytest.mark.parametrize(
    ("ways", "at_work"), [(["one", "two"], "three"), (["one", "one"], "one"), ([], "one")]
)
def test_a_wrong_name_is_refused(ways: list[str], at_work: str) -> None:
    with pytest.raises(ValueError, match=r"has to be one of .*, each once"):
        Watch(ways, at_work, {})


def test_expected_times_of_unknown_or_missing_ways_do_no_harm() -> None:
    for expected in ({}, {"two": 1.0}, {"one": 0.0, "two": 1.0}, {"else": 1.0}):
        found = Machine(Watch(["one", "two"], "one", expected), {"one": 1.0, "two": 0.7}).play(100)
        assert found.watch.at_work == "two"
