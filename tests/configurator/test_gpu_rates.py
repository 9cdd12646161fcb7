"""Measured figures of a GPU take the place of assumed ones, in every cost of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_estimate import GB, GPU, PC, SHAPE, measured

from moechat.configurator import gpu_rates
from moechat.configurator.estimate import cost_figures
from moechat.configurator.gpu_pattern import (
    DENSE_KERNELS,
    EAGER_CALL,
    EAGER_KERNELS,
    GRAPH_KERNEL,
    HEAD_KERNELS,
    LAYER_ACCOUNT,
    LAYER_HOST,
    STREAM_KERNEL,
    gpu_calls,
    runs_ahead,
)
from moechat.hardware.profile import GpuFigures

assert PC.gpu is not None
ASSUMED: GpuFigures = PC.gpu
MEASURED = replace(
    ASSUMED,
    dense_rate={16: measured(460 * GB), 8: measured(430 * GB), 4: measured(400 * GB)},
    dense_flops={16: measured(60e12), 4: measured(55e12)},
    expert_rate={4: {1: measured(380 * GB), 4: measured(300 * GB), 16: measured(200 * GB)}},
    expert_flops={4: {1: measured(1e12), 4: measured(4e12), 512: measured(30e12)}},
    call=measured(33e-6),
    graph_launch=measured(8e-6),
    graph_node=measured(1.5e-6),
    round_trip=measured(12e-6),
)


def test_costs_rest_on_measured_figures_by_hand() -> None:
    costs = cost_figures(replace(PC, gpu=MEASURED), SHAPE, near="gpu", context=1000).costs
    # 16-bit weights; a graph of 9 kernels, its start, the round trip, the host's decision.
    dense = 45e6 + 9e6 / 2
    assert costs.attention == pytest.approx(dense / (460 * GB) + 9 * 1.5e-6 + 12e-6 + 12e-6 + 30e-6)
    # Half of the measured call for the kernel, half for the sum.
    reading = 3 * 10e6 / (380 * GB)
    assert costs.moe == pytest.approx(6e-6 + 16.5e-6 + 4e-6 + reading + 3e-6 + 3e-6)
    assert costs.head == pytest.approx(18e6 / (460 * GB) + 6 * 1.5e-6 + 12e-6 + 12e-6 + 200e-6)
    assert costs.call == pytest.approx(costs.moe - reading)


def test_packed_dense_weights_have_rates_of_their_own() -> None:
    assert gpu_rates.dense_rate(MEASURED, 0.56).value == 400 * GB
    assert gpu_rates.dense_rate(MEASURED, 1.03).value == 430 * GB
    assert gpu_rates.dense_rate(MEASURED, 2.0).value == 460 * GB
    assert gpu_rates.dense_rate(ASSUMED, 0.56).value == pytest.approx(450 * GB)


def test_rates_of_experts_are_interpolated_by_tokens() -> None:
    def flops(tokens: float) -> float:
        return gpu_rates.expert_flops(MEASURED, 4, tokens).value

    assert (flops(1), flops(4), flops(512), flops(4096)) == (1e12, 4e12, 30e12, 30e12)
    assert flops(2) == pytest.approx(2.5e12)  # half way on a logarithmic scale
    assert gpu_rates.expert_rate(MEASURED, 4, 8).value == pytest.approx(250 * GB)
    assert gpu_rates.expert_rate(MEASURED, 4).origin == "measured"


def test_other_bits_are_taken_from_the_nearest_as_an_estimate() -> None:
    found = gpu_rates.expert_rate(MEASURED, 3)
    assert (found.value, found.origin) == (380 * GB, "estimate")
    assert found.source.startswith("as with 4 bits")


def test_without_measurements_shares_of_the_memory_are_assumed() -> None:
    found = gpu_rates.expert_rate(ASSUMED, 4)
    assert (found.value, found.origin) == (pytest.approx(400 * GB), "estimate")
    assert gpu_rates.expert_flops(ASSUMED, 4).value == pytest.approx(25e12)
    assert gpu_rates.expert_flops(ASSUMED, 16).value == 50e12


def test_the_cpus_rate_beside_a_link_is_that_of_this_link() -> None:
    beside = {4: measured(7 * GB)}
    links = {"file": replace(PC.links["file"], experts=beside), "gpu": GPU}
    pc = replace(PC, links=links)
    # That of the link to the GPU is known of the machine only.
    found = cost_figures(pc, SHAPE, near="gpu").costs
    assert found.compute_together == pytest.approx(10e6 / (10 * GB))
    faster = replace(pc, links={**links, "gpu": replace(GPU, experts={4: measured(20 * GB)})})
    assert cost_figures(faster, SHAPE, near="gpu").costs.compute_together == pytest.approx(10e6 / (20 * GB))
    assert cost_figures(pc, SHAPE, near="ram").costs.near_slowdown == pytest.approx(25 / 7)


RING = replace(GPU, staged={1 << 24: measured(6 * GB)}, pinned=measured(SHAPE.all_expert_bytes / 4))


def test_experts_that_cannot_be_pinned_go_through_the_ring() -> None:
    """A quarter of the bytes is pinned; the rest moves at the ring's rate."""
    pc = replace(PC, links={**PC.links, "gpu": RING})
    alone = cost_figures(PC, SHAPE, near="gpu").costs
    found = cost_figures(pc, SHAPE, near="gpu")
    ring = SHAPE.expert_bytes / (6 * GB)
    assert found.costs.load == pytest.approx(alone.load / 4 + 0.75 * ring)
    assert found.costs.both_loads / found.costs.load == pytest.approx(alone.both_loads / alone.load)
    assert "25 % of the experts in RAM can be pinned" in found.figures["load"].source


def test_fewer_experts_in_ram_need_fewer_pinned_bytes() -> None:
    pc = replace(PC, links={**PC.links, "gpu": RING})
    alone = cost_figures(PC, SHAPE, near="gpu").costs.load
    ring = SHAPE.expert_bytes / (6 * GB)
    half = cost_figures(pc, SHAPE, near="gpu", in_ram=0.5).costs.load
    assert half == pytest.approx((alone + ring) / 2)
    assert cost_figures(pc, SHAPE, near="gpu", in_ram=0.25).costs.load == alone


def test_a_measurement_that_ended_without_a_refusal_says_nothing_about_what_can_be_pinned() -> None:
    for link in (replace(RING, pins_more=True), replace(RING, pinned=None), replace(RING, staged={})):
        pc = replace(PC, links={**PC.links, "gpu": link})
        assert cost_figures(pc, SHAPE, near="gpu").costs == cost_figures(PC, SHAPE, near="gpu").costs


def test_a_token_waits_for_the_host_at_no_layer_where_every_block_has_a_page() -> None:
    assert runs_ahead(10, 10, graphs=True, wanted=None)
    assert runs_ahead(11, 10, graphs=True, wanted=True)
    assert not runs_ahead(9, 10, graphs=True, wanted=True)
    assert not runs_ahead(10, 10, graphs=False, wanted=None)
    assert not runs_ahead(10, 10, graphs=True, wanted=False)


def test_layers_take_the_time_of_their_kernels_and_of_torch_where_it_launches_them() -> None:
    plain, more = gpu_calls(1e-6), gpu_calls(1e-6, dense_kernels=35)
    assert more.layer(1e-4) - plain.layer(1e-4) == pytest.approx((35 - DENSE_KERNELS) * GRAPH_KERNEL)
    assert gpu_calls(1e-6, graphs=False).dense_kernels == EAGER_KERNELS
    eager = gpu_calls(1e-6, dense_kernels=35, graphs=False)
    # The host launches them while the GPU reads weights.
    assert eager.layer(0.0) - eager.dense - eager.choice == pytest.approx(35 * EAGER_CALL)
    assert eager.layer(1.0) - eager.dense - eager.choice == pytest.approx(1.0 + 35 * STREAM_KERNEL)
    assert eager.head(0.0) > plain.head(0.0)
    assert gpu_calls(1e-6, ahead_layers=4, dense_kernels=35).layer(0.0) == pytest.approx(35 * GRAPH_KERNEL)


def test_the_host_accounts_for_layers_while_the_head_is_computed() -> None:
    behind, ahead = gpu_calls(1e-6), gpu_calls(1e-6, ahead_layers=10)
    assert not behind.ahead
    assert ahead.ahead
    # The kernels of a layer, as nodes of a graph, and no call between them.
    assert ahead.layer(1e-4) == pytest.approx(1e-4 + DENSE_KERNELS * GRAPH_KERNEL)
    assert ahead.experts(1e-4) == pytest.approx(1e-4 + 3 * GRAPH_KERNEL)
    assert behind.layer(1e-4) > ahead.layer(1e-4) + LAYER_HOST
    quick, slow = ahead.head(0.0), ahead.head(1.0)
    assert slow - quick == pytest.approx(1.0 + HEAD_KERNELS * GRAPH_KERNEL - ahead.account)
    assert ahead.account > 10 * LAYER_ACCOUNT
    longer = gpu_calls(1e-6, ahead_layers=20)
    assert longer.head(0.0) - quick == pytest.approx(10 * LAYER_ACCOUNT)
    assert longer.head(1.0) == pytest.approx(slow)
