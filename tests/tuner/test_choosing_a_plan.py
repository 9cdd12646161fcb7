"""Tests of the rule that chooses a plan from timings."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.tuner import Timing, choose


def timing(name: str, *milliseconds: float, prompt: tuple[float, ...] = ()) -> Timing:
    return Timing(
        name, tuple(value / 1000 for value in milliseconds), tuple(value / 1000 for value in prompt)
    )


def winner(*timings: Timing, default: str = "computed", plain: str = "plain") -> str:
    return choose(timings, default=default, plain=plain).winner


def test_computed_plan_is_kept_if_others_are_hardly_faster() -> None:
    choice = choose(
        [timing("computed", 10, 10, 10), timing("plain", 12, 12, 12), timing("dp", 9.8, 9.8, 9.8)],
        default="computed",
        plain="plain",
    )
    assert (choice.winner, choice.decided) == ("computed", True)
    assert choice.why == "no candidate was significantly faster (best: dp, by 2.0 %)"
    assert choice.gains["plain"] == pytest.approx(-0.2)


def test_a_plan_faster_by_more_than_the_noise_wins() -> None:
    choice = choose(
        [timing("computed", 10, 10, 10), timing("plain", 12, 12, 12), timing("dp", 9.5, 9.5, 9.5)],
        default="computed",
        plain="plain",
    )
    assert (choice.winner, choice.why) == ("dp", "5.0 % faster than computed")


def test_the_fastest_of_several_wins() -> None:
    assert winner(timing("computed", 10, 10, 10), timing("plain", 8, 8, 8), timing("dp", 7, 7, 7)) == "dp"


def test_a_gain_within_the_spread_of_the_rounds_does_not_count() -> None:
    noisy = timing("dp", 4, 15, 9.4, 16, 3, 9.4)
    assert winner(timing("computed", *[10] * 6), timing("plain", *[20] * 6), noisy) == "computed"
    steady = timing("dp", 9.4, 9.3, 9.4, 9.5, 9.4, 9.4)
    assert winner(timing("computed", *[10] * 6), timing("plain", *[20] * 6), steady) == "dp"


def test_a_slowdown_of_the_machine_does_not_change_the_winner() -> None:
    # Times double from round to round and dp is always a tenth faster: medians over rounds would hide it.
    slowing = [10 * 2**number for number in range(5)]
    faster = [0.9 * value for value in slowing]
    assert winner(timing("computed", *slowing), timing("plain", *slowing), timing("dp", *faster)) == "dp"


def test_one_outlier_does_not_change_the_winner() -> None:
    assert (
        winner(timing("computed", 10, 10, 500, 10, 10), timing("plain", *[9.9] * 5), timing("dp", *[11] * 5))
        == "plain"  # plain is faster than computed by 1 %, and a plan slower than plain is never chosen
    )
    assert winner(timing("computed", 10, 10, 500, 10, 10), timing("plain", *[10.1] * 5)) == "computed"


def test_a_plan_slower_than_the_plain_plan_is_never_chosen() -> None:
    choice = choose(
        [timing("computed", 10, 10, 10), timing("mapped", 9.9, 9.9, 9.9), timing("dp", 10, 10, 10)],
        default="computed",
        plain="mapped",
    )
    assert choice.winner == "mapped"
    assert choice.why == "1.0 % faster than computed; a plan slower than mapped is never chosen"


def test_the_plain_plan_can_be_the_computed_plan() -> None:
    assert winner(timing("computed", 10, 10, 10), timing("dp", 11, 11, 11), plain="computed") == "computed"


def test_prompt_times_count_only_if_all_candidates_have_them() -> None:
    slow_prompt = timing("dp", 9, 9, 9, prompt=(5000.0,))
    with_all = (
        timing("computed", 10, 10, 10, prompt=(100.0,)),
        timing("plain", 20, 20, 20, prompt=(100.0,)),
    )
    assert winner(*with_all, slow_prompt) == "computed"
    assert winner(timing("computed", 10, 10, 10), timing("plain", 20, 20, 20), slow_prompt) == "dp"


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_too_few_rounds_keep_the_default(rounds: int) -> None:
    choice = choose(
        [timing("computed", *[10] * rounds), timing("plain", *[1] * rounds)],
        default="computed",
        plain="plain",
    )
    assert (choice.winner, choice.decided) == ("computed", False)
    assert f"{rounds} of at least 3 rounds" in choice.why


def test_impossible_timings_are_rejected() -> None:
    for value in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="a time is above 0"):
            Timing("computed", (value,))
    with pytest.raises(ValueError, match="have duplicates, or lack"):
        choose([timing("computed", 1)], default="computed", plain="plain")
    with pytest.raises(ValueError, match="have duplicates, or lack"):
        choose([timing("computed", 1), timing("computed", 1)], default="computed", plain="computed")
    with pytest.raises(ValueError, match="rounds"):
        choose([timing("computed", 1), timing("plain", 1, 1)], default="computed", plain="plain")


def test_medians_and_spreads_are_robust() -> None:
    found = timing("computed", 10, 11, 12, 13, 1000, prompt=(1.0, 3.0))
    assert found.token_seconds == pytest.approx(0.012)
    assert found.token_spread == pytest.approx(1.4826 * 0.001)
    assert found.prompt_seconds == pytest.approx(0.002)
    assert timing("computed", 5).token_spread == 0
    assert Timing("computed").token_seconds == math.inf


times = st.floats(0.001, 10)


@given(
    st.integers(1, 6).flatmap(
        lambda rounds: st.lists(st.lists(times, min_size=rounds, max_size=rounds), min_size=2, max_size=6)
    )
)
def test_the_winner_is_never_slower_than_plain_in_the_median_of_the_rounds(
    drawn: list[list[float]],
) -> None:
    timings = [Timing(str(place), tuple(values)) for place, values in enumerate(drawn)]
    choice = choose(timings, default="0", plain="1")
    if not choice.decided:
        assert choice.winner == "0"
        return
    taken, plain = timings[int(choice.winner)], timings[1]
    faster = sorted(1 - mine / theirs for mine, theirs in zip(plain.decode, taken.decode, strict=True))
    middle = (faster[(len(faster) - 1) // 2] + faster[len(faster) // 2]) / 2
    assert middle <= 1e-12


def test_noise_rarely_changes_the_best_choice() -> None:
    """With 5 % noise on each round, equal plans keep the default, and a gain of 10 % is found."""
    draw = random.Random(5)

    def rounds(true: float) -> list[float]:
        return [true * math.exp(draw.gauss(0, 0.05)) for _ in range(8)]

    def kept(gain: float) -> float:
        outcomes = [
            winner(
                timing("computed", *rounds(10)),
                timing("plain", *rounds(13)),
                timing("dp", *rounds(10 * (1 - gain))),
                timing("halves", *rounds(10.5)),
            )
            for _ in range(200)
        ]
        return outcomes.count("computed") / len(outcomes)

    assert kept(0.0) > 0.9
    assert kept(0.15) < 0.1
