"""The table of auto beside presets, fixed strategies and the oracle, and the routing made for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from choice_rows import AUTO, EVERYTHING, FIXED, ORACLE, PRESETS, Cell, Row
from choice_table import Summary, row_lines, share_text
from made_routing import MadeRouting, made_model
from places import ROOT, SCRIPTS

from moechat.configurator.systems import SYSTEMS
from moechat.errors import UsageError
from moechat.simulate.systems import settings_for

TRACE = ROOT / "tests/data/gpt_oss_20b_part.npz"
SHORT = ["--tokens", "30", "--warmup", "30", "--shares", "1/4,1/2"]
MADE = ["--made", "3,8,2,0.5,0.4"]
MACHINES = ["--profiles", "laptop-rtx4060-8g,ssd-only-16g"]


def choice(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench" / "choice"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def cell(share: float = 0.25, **changes: float) -> Cell:
    """A cell in which everything takes 10 ms, but for the changes; names with underscores for dashes."""
    times = dict.fromkeys(EVERYTHING, 10.0)
    return Cell(share, {**times, **{name.replace("_", "-"): value for name, value in changes.items()}})


def row(*cells: Cell, problem: str = "") -> Row:
    return Row("trace", "model", "machine", 0.7, 0, cells, problem)


def test_every_system_is_a_preset_but_auto_and_the_oracle() -> None:
    assert set(PRESETS) == set(SYSTEMS) - {AUTO, ORACLE}
    settings = [settings_for(name) for name in FIXED]
    assert len(set(settings)) == len(FIXED)
    assert not any(each.needs_future or each == SYSTEMS[AUTO] for each in settings)


def test_a_cell_divides_auto_by_the_best_of_each_kind() -> None:
    found = cell(auto=12, fiddler=8, oracle=6, **{"auto:miss=fetch": 9})
    assert (found.best_preset, found.best_fixed, found.best) == ("fiddler", "auto:miss=fetch", "fiddler")
    assert found.against("fiddler") == 1.5
    assert not found.oracle_beaten
    assert cell(fiddler=8).oracle_beaten
    assert cell(auto=9).oracle_beaten
    assert cell(auto=9).fastest == "auto"
    assert not cell(auto=10, oracle=10).oracle_beaten


def test_only_slow_cells_and_a_beaten_oracle_are_put_in_words() -> None:
    quiet = cell(auto=10.1, oracle=5)
    slow = cell(0.5, auto=12, static=8, oracle=9)
    lines = list(row_lines(row(quiet, slow), 1.01))
    assert lines[0].split() == ["machine", "1.010", "1.010", "2.020", "1.500", "1.200", "1.333"]
    assert [line.strip() for line in lines[1:]] == [
        "1/2: auto 12.00 ms; static 8.00 ms, auto:prefetch=none 10.00 ms, oracle 9.00 ms, slower than static"
    ]
    assert list(row_lines(row(problem="too short"), 1.01)) == [f"{'machine':26} left out: too short"]


def test_the_summary_counts_cells_and_names_the_worst() -> None:
    rows = [
        row(cell(auto=11, oracle=5), cell(0.5, auto=10, oracle=5)),
        row(problem="no"),
        row(cell(fiddler=4)),
    ]
    summary = Summary.of(rows, 1.01, seconds=2.0)
    assert (summary.cells, summary.left_out, summary.oracle_beaten) == (3, 1, 1)
    assert (summary.above_presets, summary.above_fixed, summary.above) == (2, 1, 2)
    assert summary.worst == 2.5
    assert summary.worst_cell == "trace, model, accuracy 0.7, seed 0, machine, 1/4: fiddler"
    assert "1.50 cells a second" in str(summary)
    assert Summary.of([], 1.01, seconds=0.0).cells == 0


def test_shares_are_written_as_quotients() -> None:
    assert [share_text(share) for share in (1 / 16, 0.75, 1 / 3, 1.0, 0.1234)] == [
        "1/16",
        "3/4",
        "1/3",
        "1",
        "0.1234",
    ]


def test_made_routing_has_the_popularity_and_locality_that_were_wanted() -> None:
    local = MadeRouting(4, 32, 4, 0.9, 0.6).trace(2000)
    assert local.locality() == pytest.approx(0.6, abs=0.02)
    assert (local.layers, local.num_experts, local.top_k) == (4, 32, 4)
    even = MadeRouting(4, 32, 4, 0.0, 0.1).trace(2000)
    assert even.locality() == pytest.approx(0.1, abs=0.02)
    assert local.entropy() < even.entropy() - 0.2
    # The most popular experts differ between layers.
    assert len(set(local.counts().argmax(axis=1))) > 1
    assert np.array_equal(local.experts, MadeRouting(4, 32, 4, 0.9, 0.6).trace(2000).experts)
    assert not np.array_equal(local.experts, MadeRouting(4, 32, 4, 0.9, 0.6).trace(2000, seed=1).experts)


def test_routing_that_repeats_always_or_cannot_avoid_it_is_made() -> None:
    assert MadeRouting(2, 8, 2, 0.5, 1.0).trace(50).locality() == 1.0
    # A token of 3 of 4 experts uses at least 2 of the previous one's again.
    assert MadeRouting(2, 4, 3, 0.5, 0.0).trace(200).locality() == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "text", ["", "3,8,2,0.5", "3,8,2,0.5,0.4,1", "3,8,9,0,0", "3,8,2,-1,0", "3,8,2,0,1.5"]
)
def test_routing_that_cannot_be_made_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        MadeRouting.parse(text)


def test_a_made_model_has_the_sizes_given() -> None:
    shape = made_model(3, 8, 2, bits=8, hidden=512, intermediate=640).shape
    assert (shape.layers, shape.experts, shape.top_k, shape.bits) == (3, 8, 2, 8)
    assert shape.blocks_per_expert == 10
    assert shape.expert_bytes > 3 * 512 * 640


def test_rows_hold_every_system_and_are_the_same_from_several_processes() -> None:
    alone, together = (
        choice(*MADE, *MACHINES, *SHORT, "--accuracy", "0.5,0.9", "--json", "--processes", count)
        for count in ("1", "2")
    )
    assert alone.returncode == 0, alone.stderr
    rows = json.loads(alone.stdout)["rows"]
    assert rows == json.loads(together.stdout)["rows"]
    assert [(each["profile"], each["accuracy"]) for each in rows] == [
        ("laptop-rtx4060-8g", 0.5),
        ("ssd-only-16g", 0.5),
        ("laptop-rtx4060-8g", 0.9),
        ("ssd-only-16g", 0.9),
    ]
    for each in rows:
        assert [found["share"] for found in each["cells"]] == [0.25, 0.5]
        for found in each["cells"]:
            times = found["tpot_ms"]
            assert set(times) == set(EVERYTHING)
            assert found["against_presets"] == times[AUTO] / min(times[name] for name in PRESETS)
            assert found["against_fixed"] == times[AUTO] / min(times[name] for name in FIXED)


def test_the_table_has_a_row_for_each_machine_also_from_files(tmp_path: Path) -> None:
    shutil.copy(ROOT / "profiles/rtx3060-12g.toml", tmp_path / "my-machine.toml")
    done = choice(*MADE, *SHORT, "--profiles", "rtx3060-12g", str(tmp_path / "my-machine.toml"))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("    ")]
    assert lines[0] == "made 3,8,2,0.5,0.4, made-3x8x2, accuracy 0.7, seed 0"
    shipped, file = (line.split() for line in lines[1:3])
    assert (shipped[0], file[0]) == ("rtx3060-12g", "my-machine")
    assert shipped[1:] == file[1:]
    assert len(shipped) == 1 + 2 * 3
    assert lines[-1].startswith("4 cells: auto above 1.01 in ")


def test_a_ratio_that_is_required_decides_the_exit_status() -> None:
    small = [*MADE, *SHORT, "--profiles", "ssd-only-16g"]
    assert choice(*small, "--require", "100").returncode == 0
    assert choice(*small, "--require", "0.01").returncode == 1


def test_recorded_traces_of_a_directory_are_mapped_to_the_models_named(tmp_path: Path) -> None:
    shutil.copy(TRACE, tmp_path)
    done = choice(
        str(tmp_path), "--models", "mixtral-8x7b", "--profiles", "ssd-only-16g", "--tokens", "5",
        "--warmup", "5", "--shares", "1/4", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = [(each["trace"], each["model"]) for each in json.loads(done.stdout)["rows"]]
    assert names == [("gpt_oss_20b_part", "made-6x32x4"), ("gpt_oss_20b_part", "mixtral-8x7b")]


def test_a_trace_that_is_too_short_is_left_out_and_named() -> None:
    done = choice(str(TRACE), "--profiles", "ssd-only-16g", "--warmup", "1000000", "--shares", "1/4")
    assert done.returncode == 2
    assert "ssd-only-16g               left out: the trace has" in done.stdout
    assert "1 rows left out" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.npz"], "there is no trace"),
        (["--made", "3,8"], "is not routing that can be made"),
        ([*MADE, "--profiles", "none"], "there is no machine"),
        ([*MADE, "--profiles", "pdp-11"], "there is no hardware profile"),
        ([*MADE, "--shares", "many"], "is not a fraction"),
        ([*MADE, "--accuracy", "high"], "--accuracy is 'high'"),
        ([*MADE, "--processes", "0"], "--processes is 0"),
        ([str(SCRIPTS / "bench")], "there is no trace (.npz) in"),
    ],
)
def test_impossible_requests_are_refused_with_a_message(arguments: list[str], says: str) -> None:
    done = choice(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
