"""The papers' tables: counts that share no code agree, absent systems are named, the script runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_routing import MadeRouting, made_model
from papers_player import Setting, shuffled
from papers_tables import _fitted, _hits, _rows
from papers_theta import CACHE_ONLY, cell_of, split_system
from places import SCRIPTS

from moechat.configurator.costs import Costs
from moechat.routing.counter import statistics_of_trace
from moechat.routing.trace import Trace

ROUTING = MadeRouting(4, 16, 2, 0.8, 0.4)
COSTS = Costs(attention=0.4e-3, moe=0.6e-3, head=1e-3, load=1.5e-3)
SCRIPT = SCRIPTS / "bench" / "papers"


def setting(**more: object) -> Setting:
    trace = ROUTING.trace(400)
    model = made_model(ROUTING.layers, ROUTING.experts, ROUTING.top_k, hidden=512, intermediate=512)
    return replace(Setting(model, trace, COSTS, timed=200), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("cached", [2, 5, 9])
def test_a_count_apart_from_moechat_has_its_hit_rates(policy: str, cached: int) -> None:
    trace = ROUTING.trace(1500)
    apart = sum(_hits(trace.experts[:, layer], cached, policy, 0, enters=False) for layer in range(4))
    ours = statistics_of_trace(trace, policy).hit_rate[:, cached].mean()
    assert apart / trace.experts.size == pytest.approx(ours, abs=0.012)


def test_what_was_chosen_stays_only_where_it_is_said_to() -> None:
    # Expert 3 has been used less often than 0 and 1.
    chosen = np.array([[0], [1], [0], [1], [3], [3]])
    assert _hits(chosen, 2, "lfu", 0, enters=True) == 3
    assert _hits(chosen, 2, "lfu", 0, enters=False) == 2
    assert _hits(chosen, 2, "lru", 0, enters=True) == _hits(chosen, 2, "lru", 0, enters=False) == 3


def test_systems_that_are_not_there_are_reported_as_absent() -> None:
    rows = _rows(setting(), 0.25, {"on-demand": 2.0, "no-such-system": 1.0, "pregated": None})
    assert [row[0] for row in rows] == ["on-demand", "no-such-system", "pregated"]
    assert rows[1][1:] == ["1", "absent", ""]
    assert float(rows[0][3]) == pytest.approx(float(rows[0][2]) / 2, abs=0.01)
    assert rows[2][1] == rows[2][3] == ""
    relative = _rows(setting(), 0.25, {"on-demand": 1.0, "mixtral-offloading": None}, relative=True)
    assert float(relative[0][2]) == 1.0
    assert float(relative[1][2]) < 1.0


def test_a_load_is_fitted_to_a_published_time() -> None:
    found = _fitted(setting(), "pregated", 0.030)
    assert found.run("pregated", 0.5).tpot == pytest.approx(0.030, rel=0.01)


def test_every_split_has_the_same_pages_and_prefetching() -> None:
    one = setting()
    cell = cell_of(one, "moepic", 0.25, (0.5, 1.0))
    assert set(cell.splits) == {0.5}
    assert cell.best == 0.5
    assert cell.gain == pytest.approx(1 - cell.splits[0.5].tpot / cell.whole.tpot)
    for run in (cell.whole, cell.splits[0.5], cell.own):
        assert run.prefetch_bytes.sum() > 0
    assert one.run(CACHE_ONLY, 0.25).prefetch_bytes.sum() == 0
    assert cell.whole.tpot < one.run(CACHE_ONLY, 0.25).tpot
    assert one.run(split_system(0.5), 0.25).tpot == cell.splits[0.5].tpot


def test_calibrated_predictions_help_and_predictions_in_random_order_are_as_accurate() -> None:
    ordered, mixed = setting(), setting(ordered=False)
    assert ordered.run("mixtral-offloading", 0.25).tpot < mixed.run("mixtral-offloading", 0.25).tpot


def test_shuffled_sequences_are_the_same_sequences() -> None:
    trace = Trace(ROUTING.trace(30).experts, np.array([0, 7, 12, 30]), 16)
    found = shuffled(trace, 1)
    assert sorted(np.diff(found.offsets)) == [5, 7, 18]
    rows = {
        trace.experts[start:end].tobytes()
        for start, end in zip(trace.offsets, trace.offsets[1:], strict=False)
    }
    assert rows == {
        found.experts[start:end].tobytes()
        for start, end in zip(found.offsets, found.offsets[1:], strict=False)
    }


def test_the_script_prints_a_table_with_theirs_and_ours(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
        )

    done = run("moe-infinity", "hits", "--quick")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    on_demand = next(line for line in lines if line[:1] == ["on-demand"])
    assert on_demand[1] == "2"
    assert 5 < float(on_demand[2]) < 30
    assert "there are no traces" in done.stdout
    assert run("nothing").returncode == 2
