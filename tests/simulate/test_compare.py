"""Systems over one trace: their inputs, their limits, and how they compare."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moechat.config import RUN_AHEAD_VARIABLE
from moechat.configurator.costs import Costs
from moechat.configurator.estimate import ModelShape
from moechat.configurator.gpu_pattern import LAYER_HOST
from moechat.configurator.systems import SYSTEMS
from moechat.configurator.transit_reserve import in_transit
from moechat.errors import UsageError
from moechat.geometry import ExpertGeometry
from moechat.hardware.profile import HardwareProfile
from moechat.hardware.profile_file import reference_profile
from moechat.routing import Trace
from moechat.simulate import Timing, timing_of
from moechat.simulate.compare import Comparison, SimulateOptions
from moechat.simulate.predictions import (
    accuracy_by_layer,
    draw_rankings,
    measured_accuracy,
    perfect_rankings,
)
from moechat.simulate.simulated_model import SimulatedModel, shape_of_trace
from moechat.simulate.systems import settings_for

LAYERS, EXPERTS, K = 6, 16, 2
SURE = 1e-9


def local_trace(tokens: int = 400, seed: int = 0, layers: int = LAYERS) -> Trace:
    """Routing with popular experts and locality: the next tokens use the experts of a token more often."""
    rng = np.random.default_rng(seed)
    popular = rng.permuted(np.tile(1.5 * np.log(1.0 / (1 + np.arange(EXPERTS))), (layers, 1)), axis=1)
    warm = np.zeros((layers, EXPERTS))
    chosen = np.empty((tokens, layers, K), np.int32)
    for token in range(tokens):
        keys = popular + 2.5 * warm + rng.gumbel(size=(layers, EXPERTS))
        chosen[token] = np.argsort(-keys, axis=-1)[:, :K]
        warm *= 0.7
        np.put_along_axis(warm, chosen[token].astype(np.int64), 1.0, axis=-1)
    return Trace(chosen, np.array([0, tokens // 2, tokens]), EXPERTS)


def model() -> SimulatedModel:
    geometry = ExpertGeometry(hidden_size=2048, intermediate_size=768, num_experts=EXPERTS, bits=4)
    shape = ModelShape(
        layers=LAYERS,
        experts=EXPERTS,
        top_k=K,
        bits=4,
        block_bytes=geometry.record_bytes,
        blocks_per_expert=geometry.blocks_per_expert,
        expert_weights=3 * 2048 * 768,
        dense_bytes=LAYERS * 40_000_000,
        head_bytes=100_000_000,
        dense_itemsize=2,
        kv_bytes=0,
        hidden_size=2048,
    )
    return SimulatedModel("small", shape, geometry)


def profile() -> HardwareProfile:
    return reference_profile("rtx3060-12g")


def compare(trace: Trace | None = None, near: Any = None, **options: Any) -> list[dict[str, Any]]:
    chosen = SimulateOptions(**{"systems": tuple(SYSTEMS), "fractions": (0.25, 0.5), **options})
    return list(Comparison(trace or local_trace(), model(), profile(), chosen, near=near).cases())


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    return compare()


def of(cases: list[dict[str, Any]], system: str, fraction: float = 0.25) -> dict[str, Any]:
    return next(case for case in cases if (case["system"], case["fraction"]) == (system, fraction))


def test_there_is_one_result_for_each_system_and_fraction(cases: list[dict[str, Any]]) -> None:
    assert [(case["system"], case["fraction"]) for case in cases] == [
        (system, fraction) for fraction in (0.25, 0.5) for system in SYSTEMS
    ]
    for case in cases:
        rates = [case[f"{kind}_hit_rate"] for kind in ("full", "prefetch", "top")] + [case["miss_rate"]]
        assert sum(rates) == pytest.approx(1)
        assert case["hit_rate"] == pytest.approx(rates[0] + rates[1])
        parts = case["stall_ms"] + case["compute_ms"] + case["dense_ms"]
        assert parts == pytest.approx(case["tpot_ms"])
        costs = case["costs"]
        assert case["dense_ms"] == pytest.approx(1000 * (LAYERS * costs["attention"] + costs["head"]))
        assert case["bytes_per_token"] == pytest.approx(
            case["demand_bytes_per_token"] + case["prefetch_bytes_per_token"]
        )
        assert 0 <= case["link_busy"] <= 1
        assert 0 <= case["far_busy"] <= 1


def test_no_system_is_faster_than_the_oracle(cases: list[dict[str, Any]]) -> None:
    """It may have fewer hits: where copies cost the host time, the CPU computes more of what is missing."""
    for fraction in (0.25, 0.5):
        oracle = of(cases, "oracle", fraction)
        for system in SYSTEMS:
            other = of(cases, system, fraction)
            assert other["tpot_ms"] >= oracle["tpot_ms"] - SURE, system


def test_systems_behave_as_published(cases: list[dict[str, Any]]) -> None:
    assert of(cases, "on-demand")["prefetch_bytes_per_token"] == 0
    assert of(cases, "mixtral-offloading")["prefetch_bytes_per_token"] > 0
    for still in ("fiddler", "static"):
        assert of(cases, still)["bytes_per_token"] == 0
        assert of(cases, still)["far_blocks_per_token"] > 0
    # A quarter is one of six layers whole, and the popular half of the second one.
    assert 1.5 / 6 < of(cases, "static")["hit_rate"] < 2 / 6
    assert of(cases, "fiddler")["hit_rate"] > 0.3
    assert of(cases, "moepic")["top_hit_rate"] + of(cases, "moepic")["prefetch_hit_rate"] > 0
    # Auto may as well choose to fetch everything.
    shared = compare(systems=("auto:miss=both",))
    assert of(shared, "auto:miss=both")["far_blocks_per_token"] > 0
    # A system that keeps nothing takes no memory and gains nothing from it.
    small, large = of(cases, "pregated", 0.25), of(cases, "pregated", 0.5)
    assert small["tpot_ms"] == large["tpot_ms"]
    settings = settings_for("pregated")
    assert large["pages"] == in_transit(model().geometry, K, settings)
    assert of(cases, "on-demand", 0.5)["hit_rate"] > of(cases, "on-demand", 0.25)["hit_rate"]


def test_without_far_computing_every_miss_is_fetched() -> None:
    cases = compare(near="ram", systems=("fiddler", "auto"), fractions=(0.25,))
    for case in cases:
        assert case["near"] == "ram"
        assert case["costs"]["compute_far"] is None
        assert case["far_blocks_per_token"] == 0
        assert case["demand_bytes_per_token"] > 0


def test_a_system_sees_only_what_comes_before_the_tokens_that_are_timed() -> None:
    # The same beginning, then other routing: same plans, same chosen sets.
    first, other = local_trace(300), local_trace(300, seed=9)
    experts = np.concatenate([first.experts[:200], other.experts[200:]])
    mixed = Trace(experts, np.array([0, 200, 300]), EXPERTS)
    options = SimulateOptions(("auto", "moepic", "adapmoe", "fiddler", "brainstorm"), warmup=200, tokens=100)
    one, two = (Comparison(trace, model(), profile(), options) for trace in (first, mixed))
    for name in options.systems:
        settings = settings_for(name)
        mine, theirs = one.statistics(settings), two.statistics(settings)
        assert np.array_equal(mine.activations, theirs.activations)
        assert np.array_equal(mine.ranks, theirs.ranks)
        assert mine.tokens == 200


def test_results_repeat_and_follow_the_seed() -> None:
    options = {"systems": ("moepic",), "fractions": (0.25,)}
    assert compare(**options) == compare(**options)
    assert compare(**options)[0]["tpot_ms"] != compare(**options, seed=1)[0]["tpot_ms"]


def test_the_lookahead_of_another_system_changes_no_result() -> None:
    alone = compare(systems=("moepic",), fractions=(0.25,))
    beside = compare(systems=("auto:lookahead=3,prefetch_experts=5", "moepic"), fractions=(0.25,))
    assert beside[1] == alone[0]


def test_a_faster_link_and_better_predictions_help(cases: list[dict[str, Any]]) -> None:
    def time(**options: Any) -> float:
        (case,) = compare(systems=("mixtral-offloading",), fractions=(0.25,), **options)
        return float(case["tpot_ms"])

    assert time(bandwidth=4e9) > time(bandwidth=8e9) > time(bandwidth=32e9)
    assert time(accuracy=0.2) > time(accuracy=0.9)
    slow = compare(systems=("mixtral-offloading",), fractions=(0.25,), bandwidth=4e9)[0]
    assert slow["link_bandwidth"] == pytest.approx(4e9)
    assert slow["costs"]["load"] == pytest.approx(slow["expert_bytes"] / 4e9)


def test_a_trace_of_another_shape_is_mapped() -> None:
    (case,) = compare(local_trace(layers=3), systems=("on-demand",), fractions=(0.5,))
    assert "was mapped to 6 layers" in case["mapping"]


def test_a_short_trace_is_used_as_far_as_it_goes() -> None:
    (case,) = compare(local_trace(30), systems=("on-demand",), fractions=(0.5,))
    assert (case["warmup"], case["tokens"]) == (10, 20)
    with pytest.raises(UsageError, match="30 of which come before timing"):
        compare(local_trace(30), systems=("on-demand",), warmup=30)


@pytest.mark.parametrize(
    "changes",
    [
        {"systems": ()},
        {"systems": ("auto", "auto")},
        {"systems": ("nonsense",)},
        {"fractions": ()},
        {"fractions": (0.0,)},
        {"fractions": (1.5,)},
        {"fractions": (float("nan"),)},
        {"fractions": (0.5, 0.5)},
        {"accuracy": 1.1},
        {"accuracy": float("nan")},
        {"tokens": 0},
        {"warmup": -1},
        {"seed": -1},
        {"bandwidth": 0.0},
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SimulateOptions(**{"systems": ("auto",), **changes})


def test_a_gpu_that_holds_every_expert_waits_for_the_host_at_no_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def played() -> dict[str, Any]:
        (case,) = compare(systems=("moepic",), fractions=(1.0,))
        return case

    monkeypatch.delenv(RUN_AHEAD_VARIABLE, raising=False)
    ahead = played()
    monkeypatch.setenv(RUN_AHEAD_VARIABLE, "0")
    behind = played()
    assert ahead["full_hit_rate"] == behind["full_hit_rate"] == 1.0
    assert ahead["bytes_per_token"] == 0
    assert behind["tpot_ms"] - ahead["tpot_ms"] > 1000 * LAYERS * LAYER_HOST


def test_a_machine_without_a_gpu_cannot_compute_on_one() -> None:
    options = SimulateOptions(("auto",))
    with pytest.raises(UsageError, match="no GPU"):
        Comparison(local_trace(), model(), reference_profile("ssd-only-16g"), options, near="gpu")


# ---- predictions


@pytest.mark.parametrize("mean", [0.0, 0.3, 0.7, 0.85, 1.0])
def test_the_first_layers_predict_worse_and_the_mean_is_kept(mean: float) -> None:
    by_layer = accuracy_by_layer(24, mean)
    assert by_layer.mean() == pytest.approx(mean)
    assert (np.diff(by_layer) >= -SURE).all()
    assert by_layer.min() >= 0
    assert by_layer.max() <= 1 + SURE
    if 0 < mean < 1:
        assert by_layer[0] < by_layer[-1]


def test_drawn_predictions_have_the_requested_accuracy() -> None:
    trace = local_trace(1000)
    accuracy = accuracy_by_layer(LAYERS, 0.7)
    found = draw_rankings(trace, accuracy, width=5, lookahead=2)
    assert found.shape == (2, 1000, LAYERS, 5)
    assert measured_accuracy(trace, found) == pytest.approx(0.7, abs=0.02)
    assert measured_accuracy(trace, found, ahead=2) == pytest.approx(0.7 * 0.85, abs=0.02)
    best = found[0, :, :, :K]
    right = (trace.experts[..., :, None] == best[..., None, :]).any(axis=-1).mean(axis=(0, 2))
    assert right == pytest.approx(accuracy, abs=0.05)
    assert (np.diff(np.sort(found, axis=-1), axis=-1) > 0).all()  # none twice
    assert found.min() >= 0
    assert found.max() < EXPERTS


def test_the_edges_of_accuracy_are_exact() -> None:
    trace = local_trace(50)
    always = draw_rankings(trace, np.ones(LAYERS), width=K)
    assert measured_accuracy(trace, always) == 1.0
    assert measured_accuracy(trace, perfect_rankings(trace)) == 1.0
    assert measured_accuracy(trace, draw_rankings(trace, np.zeros(LAYERS), width=K)) == 0.0


def test_rankings_can_be_as_wide_as_a_layer() -> None:
    trace = local_trace(20)
    found = draw_rankings(trace, accuracy_by_layer(LAYERS, 0.5), width=EXPERTS + 3)
    assert found.shape[-1] == EXPERTS
    assert (np.sort(found, axis=-1) == np.arange(EXPERTS)).all()


# ---- times


def test_a_block_takes_its_share_of_an_experts_time() -> None:
    costs = Costs(attention=1.0, moe=8.0, head=2.0, load=6.0, latency=0.5, compute_far=4.0, load_together=9.0)
    costs = dataclasses.replace(costs, call=1.0, far_call=0.25)
    timing = timing_of(costs, top_k=2, blocks=2, block_bytes=1 << 19)
    assert timing.call == 1.0
    assert timing.compute == (7.0 / 4,)
    assert timing.link == (3.0, 6.0)
    assert timing.link_shared == (4.5, 9.0)
    assert (timing.far_block, timing.far_block_shared, timing.far_call) == (2.0, 2.0, 0.25)
    assert timing_of(costs, top_k=2, blocks=2, block_bytes=1 << 22).link == (3.0,)


@pytest.mark.parametrize(
    "changes",
    [{"compute": ()}, {"link": ()}, {"attention": -1.0}, {"link_shared": (1.0, 2.0)}, {"in_flight_bytes": 0}],
)
def test_impossible_times_are_refused(changes: dict[str, Any]) -> None:
    timing = Timing(attention=0.0, head=0.0, compute=(1.0,), link=(1.0,))
    with pytest.raises(ValueError, match=r".+"):
        dataclasses.replace(timing, **changes)


def test_the_model_is_found_from_the_trace() -> None:
    def trace(layers: int, experts: int, k: int) -> Trace:
        chosen = np.broadcast_to(np.arange(k, dtype=np.int32), (2, layers, k))
        return Trace(np.ascontiguousarray(chosen), np.array([0, 2]), experts)

    assert shape_of_trace(trace(24, 32, 4)) == "gpt-oss-20b"
    assert shape_of_trace(trace(26, 64, 6)) == "deepseek-v2-lite"
    assert shape_of_trace(trace(32, 8, 2)) == "mixtral-8x7b"
    with pytest.raises(UsageError, match="no known model has the trace's 5 layers"):
        shape_of_trace(trace(5, 64, 6))
