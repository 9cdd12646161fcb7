"""First starts of auto with its watch beside fixed strategies: the bound on a few cells, and the script."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import get_args

import pytest
from made_routing import MadeRouting, made_model
from places import SCRIPTS
from regret_cells import PRESETS, Cell, FirstStart, Inputs, Job, Start, family_of, row_of

from moechat.configurator.systems import SYSTEMS
from moechat.configurator.warm_start import default_statistics
from moechat.hardware.profile_file import reference_profile
from moechat.simulate.compare import SimulateOptions
from moechat.simulate.strategy import strategies

# Percent, after all tokens: of a first start, and of one by the slowest way.
BOUND, BOUND_FROM_WORST = 3.0, 5.0
TOKENS = 1000
PROFILES = ("laptop-rtx4060-8g", "rtx4090-24g", "ssd-only-16g")
SHARES = (0.125, 0.5)
ROUTING = MadeRouting(6, 32, 4, 0.8, 0.4)


@cache
def cells_of(profile: str, start: Start, all_ways: bool = False) -> tuple[Cell, ...]:
    model = made_model(ROUTING.layers, ROUTING.experts, ROUTING.top_k, hidden=2880, intermediate=960)
    inputs = Inputs(
        (("made", ROUTING.trace(TOKENS), model),),
        (reference_profile(profile),),
        SHARES,
        TOKENS,
        start,
        all_ways,
    )
    return row_of(inputs, Job(0, 0, accuracy=0.7, seed=0)).cells


@pytest.mark.parametrize("profile", PROFILES)
def test_a_first_start_is_about_as_fast_as_the_best_fixed_strategy(profile: str) -> None:
    for cell in cells_of(profile, "chosen"):
        assert cell.last <= BOUND, cell
        assert cell.lost < 100 * (0.003 + 9 / TOKENS)
        assert max(cell.regret) == TOKENS


@pytest.mark.parametrize("profile", PROFILES)
def test_a_start_by_the_slowest_way_soon_loads_by_a_fast_one(profile: str) -> None:
    for cell in cells_of(profile, "worst", True):
        assert cell.last <= BOUND_FROM_WORST, cell
        assert cell.last < cell.unwatched / 2 or cell.unwatched < BOUND_FROM_WORST
        if cell.unwatched > BOUND:
            assert cell.switches
            assert cell.end != cell.start


def test_a_cell_is_judged_by_every_candidate_and_three_systems() -> None:
    for cell in cells_of("laptop-rtx4060-8g", "chosen"):
        names = [each.name for each in strategies(SYSTEMS["auto"], far_computes=True)]
        assert list(cell.ratios) == [*names, *PRESETS]
        assert min(cell.ratios.values()) == cell.ratios[cell.best] == 1.0
        assert cell.unwatched == pytest.approx(100 * (cell.ratios[cell.chosen] - 1))


def test_a_first_start_knows_the_familys_defaults_alone() -> None:
    made = made_model(ROUTING.layers, ROUTING.experts, ROUTING.top_k)
    options = SimulateOptions(systems=("auto",), tokens=50, warmup=0)
    case = FirstStart(ROUTING.trace(50), made, reference_profile("rtx3060-12g"), options)
    other = FirstStart(ROUTING.trace(50, seed=1), made, reference_profile("rtx3060-12g"), options)
    usual = default_statistics("", ROUTING.layers, ROUTING.experts, ROUTING.top_k, policy="lru")
    assert (case.statistics(SYSTEMS["on-demand"]).activations == usual.activations).all()
    assert case.chosen(0.25).seconds == other.chosen(0.25).seconds
    assert family_of(made) == ""


def regret(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench" / "regret"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


SMALL = ["--routing", "3,8,2,0.5,0.4", "--tokens", "120", "--shares", "1/4,1/2"]


def test_the_table_has_a_line_for_each_share_and_names_the_worst() -> None:
    done = regret(*SMALL, "--profiles", "rtx3060-12g,ssd-only-16g", "--bound", "1000")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "made 3,8,2,0.5,0.4, made-3x8x2, accuracy 0.7, seed 0"
    assert lines[1].split() == ["share", "50", "100", "120", "unwatched", "lost", "ways"]
    first = [line.split()[:2] for line in lines[2:6]]
    assert first[0] == ["rtx3060-12g", "1/4"]
    assert first[1][0] == "1/2"
    assert first[2] == ["ssd-only-16g", "1/4"]
    assert any(line.startswith("4 cells: 0 end above 1000 %") for line in lines)


def test_a_bound_decides_the_exit_status_and_json_has_all_figures() -> None:
    done = regret(*SMALL, "--profiles", "ssd-only-16g", "--bound", "-1000", "--json", "--accuracy", "0.5,0.9")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["above"] == 4
    assert [row["accuracy"] for row in found["rows"]] == [0.5, 0.9]
    (cell, _) = found["rows"][0]["cells"]
    assert set(cell["regret"]) == {"50", "100", "120"}
    assert cell["best"] in cell["ratios"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "there is no trace"),
        (["nowhere.npz"], "there is no trace"),
        (["--routing", "3,8"], "is not routing that can be made"),
        ([*SMALL, "--profiles", "none"], "there is no machine"),
        ([*SMALL, "--accuracy", "high"], "--accuracy is 'high'"),
        ([*SMALL, "--tokens", "0"], "--tokens is 0"),
        ([*SMALL, "--processes", "0"], "--processes is 0"),
    ],
)
def test_impossible_requests_are_refused_with_a_message(arguments: list[str], says: str) -> None:
    done = regret(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_both_starts_are_offered() -> None:
    help_text = regret("--help").stdout
    assert all(name in help_text for name in get_args(Start))
