"""What a comparison says: which systems are one, which is the fastest, and whether that is sure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.bench.advice import Advice, Cell, advise, contenders, hopeful
from moechat.bench.entries import effective, entries_of, shares_to_compare, systems_to_compare
from moechat.configurator.systems import SYSTEMS, settings_of
from moechat.errors import UsageError


def cell(system: str, *runs: float) -> Cell:
    return Cell(system, 0.25, 1 << 20, runs, 0.1, 0.5)


def advice(*cells: Cell, floor: float | None = None, exact: bool = False) -> Advice:
    return advise(cells, floor, exact=exact)


def test_all_systems_but_those_that_need_the_future_are_compared() -> None:
    assert set(systems_to_compare(None)) == set(SYSTEMS) - {"oracle"}
    assert shares_to_compare("1/2,0.1") == (0.1, 0.5)
    for wrong in ("oracle", "auto,auto", "wonder", ","):
        with pytest.raises(UsageError):
            systems_to_compare(wrong)


def test_systems_that_differ_only_in_what_has_no_effect_are_one() -> None:
    names = ("on-demand", "auto", "on-demand:miss=compute", "on-demand:lookahead=3", "on-demand:gamma=0.5")
    here, with_far = (entries_of(names, far_computes=far) for far in (False, True))
    assert [(entry.system, entry.also) for entry in here] == [("on-demand", names[2:]), ("auto", ())]
    assert [entry.system for entry in with_far] == ["on-demand", "auto", "on-demand:miss=compute"]


def test_settings_that_have_an_effect_keep_systems_apart() -> None:
    moepic = settings_of("moepic")
    for changed in (replace(moepic, omega=9.0), replace(moepic, rho=0.5), replace(moepic, lookahead=2)):
        assert effective(changed, far_computes=False) != effective(moepic, far_computes=False)


def test_the_default_is_advised_unless_another_one_is_surely_faster() -> None:
    within = advice(cell("auto", 10, 11, 12), cell("moepic", 9, 9.5, 10.5), cell("static", 15, 16, 17))
    assert (within.use, within.equal, within.following) == ("auto", ("moepic",), "static")
    assert within.faster_by == pytest.approx(16 / 11 - 1)
    assert within.default_ms is None
    beyond = advice(cell("auto", 10, 11, 12), cell("moepic", 8, 9, 9.5), floor=6)
    assert (beyond.use, beyond.following, beyond.default_ms) == ("moepic", "auto", 11)
    assert beyond.over_floor == pytest.approx(0.5)


def test_a_median_that_is_faster_by_chance_is_not_preferred_to_one_that_is_surely_faster() -> None:
    found = advice(cell("auto", 10, 11, 12), cell("moepic", 7, 8, 11.5), cell("static", 8, 9, 9.5))
    assert found.use == "static"
    assert found.equal == ("moepic",)


def test_single_runs_differ_from_five_per_cent_on_and_simulated_times_from_three() -> None:
    close = (cell("auto", 10.4), cell("moepic", 10))
    assert advice(*close).use == "auto"
    assert advice(*close).equal == ("moepic",)
    assert advice(*close, exact=True).use == "moepic"
    assert advice(cell("auto", 11), cell("moepic", 10)).use == "moepic"
    assert advice(cell("auto", 10.2), cell("moepic", 10), exact=True).use == "auto"


def test_more_runs_are_for_those_that_may_be_the_fastest() -> None:
    slow = cell("static", 20, 21, 22)
    assert contenders([cell("auto", 10, 11, 12), slow]) == ()
    assert contenders([cell("auto", 10, 11, 12), cell("moepic", 11, 12, 13), slow]) == ("auto", "moepic")
    # Three runs may be apart by chance, so a default that is a little slower gets another chance.
    assert contenders([cell("auto", 10, 10.5, 11), cell("moepic", 9, 9.5, 9.9), slow]) == ("auto", "moepic")
    assert contenders([cell("auto", 20, 21, 22), cell("moepic", 9, 9.5, 9.9), slow]) == ()


def test_runs_of_slow_systems_are_enough_but_not_of_the_default() -> None:
    cells = [cell("auto", 70), cell("moepic", 10), cell("static", 29, 50), cell("deepspeed", 31)]
    assert hopeful(cells) == ("auto", "moepic", "static")


_RUNS = st.lists(st.floats(0.01, 1e4), min_size=1, max_size=5)


@given(st.dictionaries(st.sampled_from(sorted(SYSTEMS)), _RUNS, min_size=1), st.booleans())
def test_every_system_is_advised_equal_or_slower_and_nothing_is_surely_faster(
    runs: dict[str, list[float]], exact: bool
) -> None:
    cells = [cell(name, *times) for name, times in runs.items()]
    found = advise(cells, None, exact=exact)
    use = next(each for each in cells if each.system == found.use)
    slower = [each for each in cells if use.surely_faster(each, exact=exact)]
    assert {found.use, *found.equal} | {each.system for each in slower} == set(runs)
    assert found.use not in found.equal
    assert (found.following is None) == (not slower)
    if slower:
        assert found.following in {each.system for each in slower}
        assert found.faster_by is not None
        assert found.faster_by > 0
    default = next((each for each in cells if each.system == "auto"), None)
    if default is not None:
        better = [each for each in cells if each.surely_faster(default, exact=exact)]
        assert (use is default) == (not better)
        assert not better or use in better
