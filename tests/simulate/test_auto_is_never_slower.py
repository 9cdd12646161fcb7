"""The choice of auto on made routing: as fast as presets and fixed strategies; nothing beats the oracle.

A reduced form of ``scripts/bench/choice``.
"""

from __future__ import annotations

from functools import cache

import pytest
from choice_rows import EVERYTHING, ORACLE, Cell, Inputs, Job, Length, row_of
from made_routing import MadeRouting, made_model

from moechat.hardware.profile_file import reference_profile

LIMIT = 1.01
SURE = 1e-9
# Routing, and sizes of the experts: few large ones evenly used, some, many small ones.
ROUTING = {
    "few": (MadeRouting(8, 8, 2, 0.1, 0.3), {"hidden": 4096, "intermediate": 1792}),
    "some": (MadeRouting(8, 32, 4, 0.9, 0.43), {"hidden": 2880, "intermediate": 960}),
    "many": (MadeRouting(6, 64, 6, 0.8, 0.3), {"hidden": 2048, "intermediate": 768}),
}
# A processor that is fast for its link, one that is slow for it, a fast one with a fast link, and no card.
PROFILES = ("laptop-rtx4060-8g", "rtx3060-12g", "rtx4090-24g", "ssd-only-16g")
SHARES = (0.125, 0.25, 0.5)
# Rows in the order in which every machine comes with another kind of routing: the first of them always run.
ROWS = [(place + turn, place) for turn in range(len(ROUTING)) for place in range(len(PROFILES))]
CELLS = [
    f"{list(ROUTING)[routing % len(ROUTING)]}-{PROFILES[place]}-{share:g}"
    for routing, place in ROWS
    for share in SHARES
]


@cache
def inputs() -> Inputs:
    return Inputs(
        traces=tuple((name, made.trace(900)) for name, (made, _) in ROUTING.items()),
        models=tuple(
            made_model(made.layers, made.experts, made.top_k, **sizes) for made, sizes in ROUTING.values()
        ),
        profiles=tuple(reference_profile(name) for name in PROFILES),
        shares=SHARES,
        length=Length(tokens=300, warmup=600),
    )


@cache
def cells_of(name: str, profile: str) -> dict[str, Cell]:
    """Cells of one row by share, simulated once for all tests."""
    place = list(ROUTING).index(name)
    row = row_of(inputs(), Job(place, place, PROFILES.index(profile), accuracy=0.7, seed=0))
    if row.problem:
        raise RuntimeError(row.problem)
    return {f"{cell.share:g}": cell for cell in row.cells}


def cell_named(name: str) -> Cell:
    routing, _, rest = name.partition("-")
    profile, _, share = rest.rpartition("-")
    return cells_of(routing, profile)[share]


every_cell = pytest.mark.parametrize("cell", CELLS)


@every_cell
def test_auto_is_as_fast_as_the_best_preset(cell: str) -> None:
    found = cell_named(cell)
    assert found.against(found.best_preset) <= LIMIT, found.best_preset


@every_cell
def test_auto_is_as_fast_as_the_best_fixed_strategy(cell: str) -> None:
    found = cell_named(cell)
    assert found.against(found.best_fixed) <= LIMIT, found.best_fixed


@every_cell
def test_nothing_is_faster_than_the_oracle(cell: str) -> None:
    times = cell_named(cell).times
    assert set(times) == set(EVERYTHING)
    bound = times[ORACLE] * (1 - SURE)
    assert {name: time for name, time in times.items() if time < bound} == {}
