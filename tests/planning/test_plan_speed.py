"""Speeds against hand-computed examples and drawn routing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_support import desktop

from moechat.configurator.allocation import Allocation
from moechat.configurator.costs import Costs
from moechat.configurator.estimate import ModelShape
from moechat.configurator.exposure import EngineModel
from moechat.configurator.systems import CacheSettings
from moechat.planning.speed import (
    PrefillRates,
    behind_disk,
    decode_speed,
    expected_exposed,
    kept_share,
    prefill_rates,
    prompt_seconds,
)
from moechat.routing.statistics import RoutingStatistics

SHAPE = ModelShape(
    layers=2,
    experts=4,
    top_k=2,
    bits=4,
    block_bytes=1000,
    blocks_per_expert=10,
    expert_weights=20_000,
    dense_bytes=8_000,
    head_bytes=2_000,
    dense_itemsize=2,
    kv_bytes=100,
    hidden_size=16,
)
COSTS = Costs(attention=1e-3, moe=2e-3, head=4e-3, load=8e-3)


def statistics(ranks: list[int], tokens: int = 100) -> RoutingStatistics:
    """Two layers of four experts whose hits are distributed like ``ranks``; nothing is predicted."""
    counts = np.array([ranks, ranks], dtype=np.int64)
    return RoutingStatistics(
        policy="lru",
        top_k=2,
        tokens=tokens,
        predicted=np.zeros(2, dtype=np.int64),
        activations=counts,
        ranks=counts,
        hits_of_prediction=np.zeros((2, 0), dtype=np.int64),
        ranks_of_prediction=np.zeros((2, 0, 4), dtype=np.int64),
    )


def allocation(*targets: tuple[int, int], loaded: float, exposed: float = 0.0) -> Allocation:
    layers = len(targets)
    return Allocation(
        "uniform", np.array(targets, dtype=np.int32), np.full(layers, loaded), np.full(layers, exposed)
    )


def test_with_all_experts_near_a_token_takes_the_sum_of_its_parts() -> None:
    decode = decode_speed(COSTS, SHAPE, statistics([50, 25, 15, 10]))
    assert decode.seconds == pytest.approx(4e-3 + 2 * (1e-3 + 2e-3))
    assert (decode.waiting, decode.hit_rate, decode.far_bytes) == (0.0, 1.0, 0.0)
    assert decode.rate == pytest.approx(100.0)


def test_hits_are_weighted_by_the_split() -> None:
    counts = statistics([50, 25, 15, 10])
    found = allocation((2, 10), (4, 5), loaded=1.0)
    assert kept_share(found, counts, 10) == pytest.approx([0.75, 0.5])
    decode = decode_speed(COSTS, SHAPE, counts, found, np.array([3e-3, 5e-3]))
    assert decode.hit_rate == pytest.approx(0.625)
    assert decode.far_bytes == pytest.approx(2 * 10_000 * (0.25 + 0.5))
    assert decode.waiting == pytest.approx(8e-3)
    assert decode.seconds == pytest.approx(10e-3 + 8e-3)


@pytest.mark.parametrize("miss", ["fetch", "both"])
@pytest.mark.parametrize("kept", [(2, 10), (3, 6), (1, 10)])
def test_the_expected_wait_is_the_mean_over_drawn_tokens(miss: str, kept: tuple[int, int]) -> None:
    settings = CacheSettings(policy="lru", prefetch="none", miss=miss)  # type: ignore[arg-type]
    costs = replace(COSTS, load=0.9e-3, compute_far=1.5e-3)
    counts = statistics([50, 25, 15, 10])
    hit = float(counts.hit_rate[0, kept[0]])
    theta = kept[1] / 10
    found = allocation(kept, kept, loaded=2 * hit * theta)
    expected = expected_exposed(settings, costs, SHAPE, counts, found)

    drawn = np.random.default_rng(1).random((200_000, 2)) < hit
    missing = np.where(drawn, 1 - theta, 1.0).sum(axis=1)
    exposed, _ = EngineModel.of(settings, costs, 2, 10).times(2 - missing)
    assert expected == pytest.approx([float(exposed.mean())] * 2, rel=0.02)
    of_the_mean, _ = EngineModel.of(settings, costs, 2, 10).times(np.array([2 * hit * theta]))
    assert expected[0] >= of_the_mean[0] - 1e-12


def test_prefetched_blocks_cost_no_wait() -> None:
    settings = CacheSettings(policy="lru", prefetch="none")
    counts = statistics([50, 25, 15, 10])
    late = expected_exposed(settings, COSTS, SHAPE, counts, allocation((2, 10), (2, 10), loaded=1.5))
    half = expected_exposed(settings, COSTS, SHAPE, counts, allocation((2, 10), (2, 10), loaded=1.75))
    ready = expected_exposed(settings, COSTS, SHAPE, counts, allocation((2, 10), (2, 10), loaded=2.0))
    assert (late > half).all()
    assert (half > ready).all()
    assert ready == pytest.approx([0.0, 0.0])


def test_experts_not_in_ram_are_read_first() -> None:
    counts = statistics([50, 25, 15, 10])
    costs = replace(COSTS, load=1e-3, compute_far=3e-3, load_together=2e-3, compute_together=4e-3)
    arguments = {"near_share": 0.25, "disk_rate": 10_000 / 2.5e-3}
    slower = behind_disk(costs, SHAPE, counts, ram_share=0.5, **arguments)
    disk = (1 - 0.9) / (1 - 0.5)
    assert slower.load == pytest.approx((1 - disk) * 1e-3 + disk * 2.5e-3)
    assert slower.load_together == pytest.approx((1 - disk) * 2e-3 + disk * 2.5e-3)
    assert slower.compute_far == pytest.approx(3e-3)  # reading is hidden behind it
    assert behind_disk(costs, SHAPE, counts, ram_share=1.0, **arguments) is costs
    assert behind_disk(costs, SHAPE, counts, ram_share=0.75, **arguments).load == pytest.approx(1e-3)


def test_a_prompt_takes_the_longer_of_computing_and_streaming() -> None:
    counts = statistics([25, 25, 25, 25])
    instant = PrefillRates(dense=1e30, experts=1e30, width=1e30, stream=1e6)
    none_kept = allocation((0, 1), (0, 1), loaded=0.0)
    # Each expert is chosen by half of the tokens: of 20, all four are, but for one part in a million.
    streamed = prompt_seconds(20, 100, 0, SHAPE, instant, counts, none_kept, COSTS)
    assert streamed == pytest.approx(4e-3 + 2 * 4 * 10_000 / 1e6, rel=1e-4)
    twice = prompt_seconds(20, 10, 0, SHAPE, instant, counts, none_kept, COSTS)
    assert twice == pytest.approx(4e-3 + 2 * 2 * 4 * (1 - 2**-10) * 10_000 / 1e6, rel=1e-4)
    one_wave = prompt_seconds(20, 10, 20, SHAPE, instant, counts, none_kept, COSTS)
    assert one_wave == pytest.approx(streamed), "two passes through a layer move its experts once"
    half_kept = prompt_seconds(
        20, 100, 0, SHAPE, instant, counts, allocation((4, 5), (4, 5), loaded=1.0), COSTS
    )
    assert half_kept == pytest.approx(4e-3 + 4 * 10_000 / 1e6, rel=1e-4)
    slow = replace(instant, experts=1e6)
    computed = prompt_seconds(20, 100, 0, SHAPE, slow, counts, None, COSTS)
    assert prompt_seconds(20, 10, 20, SHAPE, slow, counts, None, COSTS) == pytest.approx(computed)
    assert computed == pytest.approx(4e-3 + 2 * 2 * 20 * 2 * 20_000 / 1e6, rel=1e-4)


def test_prompts_need_figures_of_many_tokens() -> None:
    machine = desktop(gpu=False)
    rates = prefill_rates(machine, SHAPE, "ram", 1e9)
    assert rates is not None
    assert (rates.experts, rates.width) == (200e9, 30e9)
    assert prefill_rates(replace(machine, expert_flops={}), SHAPE, "ram", 1e9) is None
    gpu = prefill_rates(desktop(), SHAPE, "gpu", 1e9)
    assert gpu is not None
    assert gpu.dense == 30e12
    assert gpu.experts < gpu.dense
