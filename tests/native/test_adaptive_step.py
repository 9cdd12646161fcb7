"""The adaptive step of ExpertFlow (section 3.2)."""

from __future__ import annotations

import pytest

from moechat._native import AdaptiveStep
from moechat.configurator.systems import MOST_LOOKAHEAD

MB, GB = 1e6, 1e9


def test_the_worked_example_of_the_estimate() -> None:
    step = AdaptiveStep(24, 32, 8.7 * MB, 4)
    assert (step.step, step.estimate) == (1, 0)
    step.measure(1.2e-3, 12 * GB)
    assert step.estimate == pytest.approx(2.42, abs=0.005)
    assert step.step == 3


def test_half_the_bandwidth_doubles_the_estimate() -> None:
    fast, slow = (AdaptiveStep(24, 32, 8.7 * MB, 4) for _ in range(2))
    fast.measure(1.2e-3, 12 * GB)
    slow.measure(1.2e-3, 6 * GB)
    assert slow.estimate == pytest.approx(2 * fast.estimate)


def test_the_worked_example_of_the_loop() -> None:
    step = AdaptiveStep(24, 32, 8.7 * MB, 4, stalls=2, ready=4)
    step.measure(1.2e-3, 12 * GB)
    found = []
    for late in (True, False, True, False, False, False, False):
        step.turn(late)
        found.append(step.step)
    assert found == [3, 3, 4, 4, 4, 4, 3]


def test_the_step_stays_within_its_bounds() -> None:
    step = AdaptiveStep(4, 8, 100 * MB, 4, stalls=1, ready=1)
    step.measure(1e-3, GB)  # an estimate of 400
    assert step.step == 3
    for _ in range(20):
        step.turn(True)
    assert step.step == 3
    for _ in range(20):
        step.turn(False)
    assert step.step == 1
    assert AdaptiveStep(1, 8, MB, 4).step == 1
    for most, expected in ((2, 2), (None, MOST_LOOKAHEAD)):
        bounded = AdaptiveStep(24, 8, 100 * MB, 4, **({} if most is None else {"most": most}))
        bounded.measure(1e-3, GB)
        assert bounded.step == expected


def test_a_steady_link_moves_the_step_by_one_at_most() -> None:
    step = AdaptiveStep(24, 32, 8.7 * MB, 4)
    seen = set()
    for number in range(400):
        noise = 1 + 0.05 * (-1) ** number
        step.measure(1.2e-3 * noise, 12 * GB / noise)
        step.turn(number % 5 == 0)
        seen.add(step.step)
    assert max(seen) - min(seen) <= 1


def test_more_experts_of_a_flat_distribution_raise_the_estimate() -> None:
    step = AdaptiveStep(24, 32, 8.7 * MB, 4)
    for _ in range(200):
        step.want(8)
    step.measure(1.2e-3, 12 * GB)
    assert step.estimate == pytest.approx(4.83, abs=0.02)


def test_a_pause_of_the_user_hardly_counts() -> None:
    step = AdaptiveStep(24, 32, 8.7 * MB, 4)
    step.measure(1.2e-3, 12 * GB)
    step.measure(60.0, 12 * GB)
    assert step.estimate > 2


@pytest.mark.parametrize("sizes", [(0, 8, 1.0, 1.0), (4, 0, 1.0, 1.0), (4, 8, 0.0, 1.0), (4, 8, 1.0, 0.0)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int, float, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        AdaptiveStep(*sizes)
