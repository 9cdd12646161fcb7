"""The engine over a GPU that only takes time, beside `plan` and `simulate`: ``scripts/bench/cards``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from places import SCRIPTS, SUPPORT

pytest.importorskip("triton")

from moechat.configurator import gpu_pattern as pattern

# Percent between the largest and the smallest of the three times.
SPREAD = 10.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All runs, by one process."""
    paths = os.pathsep.join(str(path) for path in (SCRIPTS / "bench", SUPPORT))
    home = tmp_path_factory.mktemp("home")
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "cards_child.py")],
        env={**os.environ, "PYTHONPATH": paths, "MOECHAT_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def case_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in found["ten"] if each["case"] == name)


def seconds_of(case: dict[str, Any]) -> float:
    return sum(case["seconds"]) / case["tokens"]


def test_the_model_of_a_gpu_by_hand(found: dict[str, Any]) -> None:
    moments = found["by hand"]
    # 1 ms to call; from 3 ms on 11 ms for the first, 2 ms for the other; 0.5 ms to wake up.
    assert moments["two copies"] == pytest.approx(1 + 2 + 11 + 2 + 0.5)
    # The second kernel and the copy were called while the first ran.
    assert moments["two kernels and a copy to the host"] == pytest.approx(1 + 1 + 4 + 4 + 2 + 0.5)
    # The CPU computes 2 ms of its 10 alone. Then both have half their speed for 16 ms, 8 of the copy's 11.
    assert moments["the CPU beside a copy"] == pytest.approx(1 + 2 + 16)
    assert moments["that copy"] == pytest.approx(1 + 2 + 16 + 3 + 0.5)


def test_plan_simulate_and_the_engine_agree_in_ten_cases(found: dict[str, Any]) -> None:
    spreads = {each["case"]: 100 * (max(each["times"]) / min(each["times"]) - 1) for each in found["ten"]}
    assert len(spreads) == 10
    assert {case: spread for case, spread in spreads.items() if spread > SPREAD} == {}


def test_the_simulation_moves_and_computes_the_same_blocks(found: dict[str, Any]) -> None:
    for each in found["ten"]:
        if each["resident"] == 1.0:
            continue  # only experts that were never chosen before are missing: too few to compare
        engine, simulated = each["engine"], each["simulated"]
        assert engine["layers_run"] == simulated["layers_run"] == each["tokens"] * each["layers"]
        for name, count in engine.items():
            # Time decides what the CPU takes, so the two differ a little.
            assert count == pytest.approx(simulated[name], rel=0.15, abs=0.02 * engine["hits_full"]), name


def test_the_same_run_takes_the_same_time(found: dict[str, Any]) -> None:
    first = case_of(found, found["again"]["case"])
    # The clock goes on between the two, so that sums round differently.
    assert found["again"]["seconds"] == pytest.approx(first["seconds"], rel=1e-9)
    again = found["again"]["counts"]
    for name, count in first["counts"].items():
        assert name == "model" or again[name] == pytest.approx(count, rel=1e-9), name


def test_the_link_drains_while_its_thread_sleeps(found: dict[str, Any]) -> None:
    usual, sleepy = found["again"], found["sleepy"]
    assert usual["engine"]["fetched_prefetch"] > usual["engine"]["fetched_demand"]
    # Nobody begins the next prefetches for a millisecond.
    assert sleepy["counts"]["drained"] > 1.5 * usual["counts"]["drained"]
    assert sleepy["counts"]["h2d_busy"] < usual["counts"]["h2d_busy"]


def test_lists_that_wait_behind_all_copies_of_the_link_hold_the_gpu(found: dict[str, Any]) -> None:
    turns, ordered = found["again"], found["ordered"]
    # The kernels over resident blocks wait for their lists, which stand behind the demands of the layer.
    assert ordered["counts"]["gpu_held"] > 1.2 * turns["counts"]["gpu_held"]
    assert seconds_of(ordered) > 1.03 * seconds_of(turns)


def test_where_experts_are_seldom_uploaded_most_layers_have_no_second_launch(found: dict[str, Any]) -> None:
    each = found["seldom"]
    assert 100 * (max(each["times"]) / min(each["times"]) - 1) < SPREAD
    engine, simulated = each["engine"], each["simulated"]
    assert engine["fetched_demand"] == pytest.approx(simulated["fetched_demand"], rel=0.05)
    assert engine["blocks_far"] > 10 * engine["fetched_demand"] > 0
    # One over resident blocks and the sum for each layer; one more where an expert comes, in one batch.
    launches, uploads = (each["counts"][name] / each["tokens"] for name in ("launches", "batches"))
    assert uploads < 0.5 * each["layers"]
    assert launches <= each["layers"] * (pattern.EXPERT_KERNELS + 1) + uploads


def test_a_layer_is_bound_by_the_host_where_its_experts_are_quick(found: dict[str, Any]) -> None:
    usual, slow = found["behind"], found["slow host"]
    assert usual["resident"] == 1.0
    longer = seconds_of(slow) - seconds_of(usual)
    assert longer == pytest.approx(usual["layers"] * (180e-6 - pattern.LAYER_HOST), rel=1e-3)
    share = slow["counts"]["gpu_starved"] / sum(slow["seconds"])
    assert share > usual["counts"]["gpu_starved"] / sum(usual["seconds"]) > 0.2


def test_plan_simulate_and_the_engine_agree_where_the_host_launches_resident_layers(
    found: dict[str, Any],
) -> None:
    times = found["behind"]["times"]
    assert 100 * (max(times) / min(times) - 1) < SPREAD


def test_a_token_whose_experts_are_all_there_waits_for_the_host_at_no_layer(found: dict[str, Any]) -> None:
    behind, ahead = found["behind"], case_of(found, "rtx4090-24g:qwen3-30b-a3b")
    # The host takes this from every layer, and the GPU runs on.
    calls = pattern.gpu_calls(0.0)
    saved = ahead["layers"] * (calls.dense + pattern.LAYER_HOST)
    for before, after in zip(behind["times"], ahead["times"], strict=True):
        assert before - after > saved
    assert ahead["counts"]["gpu_starved"] < 0.1 * behind["counts"]["gpu_starved"]
    # Nothing is decided otherwise, and what the GPU has computed by itself is counted.
    for name in ("layers_run", "hits_full", "hits_miss", "fetched_demand", "blocks_far"):
        assert ahead["engine"][name] == behind["engine"][name], name


def test_the_pattern_of_plans_is_that_of_the_engine(found: dict[str, Any]) -> None:
    """A change of the engine's calls changes :mod:`moechat.configurator.gpu_pattern` too."""
    each = found["behind"]
    counts = {name: count / each["tokens"] for name, count in each["counts"].items()}
    layers = each["layers"]
    assert counts["graphs"] == layers + 1
    # The token. The choice of every layer is copied by its graph.
    assert counts["to_host"] == 1
    assert counts["launches"] == layers * (pattern.EXPERT_KERNELS + 1)
    assert counts["small_copies"] == layers

    each = case_of(found, "rtx4090-24g:qwen3-30b-a3b")
    counts = {name: count / each["tokens"] for name, count in each["counts"].items()}
    assert counts["graphs"] == 2, "the layers, and the head"
    assert counts["to_host"] == 1, "the token"
    assert counts["launches"] == counts["small_copies"] == counts["copies"] == 0
