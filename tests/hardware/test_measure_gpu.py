"""Measuring a GPU whose speeds are known: the figures are those speeds, and nothing that fails is raised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from played_card import PlayedCard, Speeds

from moechat.hardware.card_rounds import CardRounds
from moechat.hardware.measure_budget import Budget
from moechat.hardware.measure_cpu import ExpertMemory
from moechat.hardware.measure_gpu import measure_gpu
from moechat.hardware.measure_gpu_link import measure_gpu_link
from moechat.hardware.profile import Figure, GpuFigures, LinkFigures

MIB = 1 << 20
KIB = 1 << 10
BUDGET = Budget(
    gpu_cell_seconds=0.09,
    gpu_together_seconds=0.09,
    gpu_link_bytes=8 * MIB,
    gpu_transfers=(64 * KIB, MIB),
    gpu_depths=(1, 4),
    bits=(2, 4),
    pin_chunk=16 * MIB,
    pin_most=64 * MIB,
)
ASSUMED = GpuFigures(
    name="Played GPU",
    vram=Figure(8 << 30, "measured", "NVML"),
    vram_free=Figure(8 << 30, "measured", "NVML"),
    bandwidth=Figure(200e9, "estimate", "assumed"),
    flops=Figure(20e12, "estimate", "assumed"),
    launch=Figure(5e-6, "estimate", "assumed"),
    pcie_generation=4,
    pcie_lanes=16,
)


def gpu(card: PlayedCard, budget: Budget = BUDGET) -> tuple[GpuFigures, CardRounds]:
    rounds = CardRounds(card, budget, lambda _: None)
    return measure_gpu(rounds, ASSUMED), rounds


@pytest.fixture(scope="module")
def measured() -> GpuFigures:
    found, rounds = gpu(PlayedCard(), replace(BUDGET, bits=(2, 3, 4, 6, 8, 16)))
    assert rounds.missing == {}
    return found


@pytest.fixture(scope="module")
def memory() -> ExpertMemory:
    return ExpertMemory(64 * MIB)


def test_host_times_are_those_of_the_gpu(measured: GpuFigures) -> None:
    speeds = Speeds()
    for figure, expected in (
        (measured.launch, speeds.launch),
        (measured.call, speeds.call),
        (measured.graph_launch, speeds.graph_launch),
        (measured.graph_node, speeds.graph_node),
        (measured.round_trip, speeds.round_trip),
        (measured.sync, speeds.small + speeds.wake),
    ):
        assert figure is not None
        assert figure.origin == "measured"
        assert figure.value == pytest.approx(expected, rel=0.05)


def test_rates_are_those_of_the_gpu(measured: GpuFigures) -> None:
    speeds = Speeds()
    assert measured.bandwidth.value == pytest.approx(speeds.bandwidth, rel=0.03)
    assert measured.copy is not None
    assert measured.copy.value == pytest.approx(speeds.copied, rel=0.03)
    assert measured.flops.value == pytest.approx(speeds.flops, rel=0.03)
    for bits in (16, 8, 4):
        assert measured.dense_rate[bits].value == pytest.approx(0.85 * speeds.bandwidth, rel=0.03)
        assert measured.dense_flops[bits].value == pytest.approx(speeds.flops, rel=0.03)
    assert list(measured.expert_rate) == [2, 3, 4, 6, 8, 16]
    for bits, by_tokens in measured.expert_rate.items():
        assert list(by_tokens) == [1, 2, 4, 8, 16, 64, 512]
        assert by_tokens[1].value == pytest.approx(0.75 * speeds.bandwidth, rel=0.03)
        assert measured.expert_flops[bits][512].value == pytest.approx(0.5 * speeds.flops, rel=0.03)


def test_medians_lie_within_their_range(measured: GpuFigures) -> None:
    figure = measured.bandwidth
    assert figure.low is not None
    assert figure.high is not None
    assert figure.low < figure.value < figure.high
    assert 1.001 < figure.high / figure.low < 1.04


def test_the_chip_is_what_the_driver_reports(measured: GpuFigures) -> None:
    assert (measured.capability, measured.sms, measured.l2_bytes) == ((8, 6), 28, 3 * MIB)
    assert measured.context is not None
    assert measured.context.value == 300 * MIB


def test_a_part_that_fails_keeps_what_is_assumed_and_says_why() -> None:
    found, rounds = gpu(PlayedCard(fails=("read", "graph")))
    assert found.bandwidth == ASSUMED.bandwidth
    assert found.graph_node is None
    assert rounds.missing == {
        "gpu memory": "read does not work on this GPU",
        "gpu graphs": "graph does not work on this GPU",
    }
    assert found.launch.origin == "measured"
    assert found.expert_rate


def test_a_gpu_that_answers_nothing_is_left_as_assumed() -> None:
    found, rounds = gpu(PlayedCard(fails=("facts",)))
    assert found == ASSUMED
    assert rounds.missing == {"gpu kernels": "facts does not work on this GPU"}


def test_too_little_free_memory_is_said_and_not_taken() -> None:
    found, rounds = gpu(PlayedCard(free=512 * MIB))
    assert found.bandwidth == ASSUMED.bandwidth
    assert "128 MiB of its memory may be used" in rounds.missing["gpu memory"]


def test_kernels_are_built_within_their_time_the_most_wanted_first() -> None:
    # A second for each; the call, six dense products, then experts of 4 bits: a token, a prompt.
    found, rounds = gpu(PlayedCard(Speeds(build=1.0)), replace(BUDGET, build_seconds=8.5))
    assert list(found.expert_rate) == [4]
    assert list(found.expert_rate[4]) == [1, 512]
    missing = rounds.missing["gpu experts"]
    assert missing.startswith("no time was left for 4 bits, 2 tokens, 4 bits, 4 tokens")
    assert "2 bits, 512 tokens" in missing


def test_a_slow_gpu_ends_in_time() -> None:
    card = PlayedCard(Speeds(bandwidth=1e9, copied=1e9, flops=1e9))
    begun = card.clock()
    _, rounds = gpu(card, replace(BUDGET, gpu_seconds=30.0))
    # The last figure may run over: a dense product of 512 tokens takes 131 s here.
    assert card.clock() - begun < 30 + 4 * 131
    assert "no time was left" in rounds.missing["gpu experts"]


def link(card: PlayedCard, memory: ExpertMemory, budget: Budget = BUDGET) -> tuple[LinkFigures, CardRounds]:
    rounds = CardRounds(card, budget, lambda _: None)
    found = measure_gpu_link(rounds, memory, 1)
    assert found is not None
    return found, rounds


@pytest.fixture(scope="module")
def linked(memory: ExpertMemory) -> tuple[LinkFigures, CardRounds, PlayedCard]:
    card = PlayedCard()
    return *link(card, memory), card


def test_the_links_rates_and_waits_are_those_programmed(linked: Any) -> None:
    found, rounds, _ = linked
    speeds = Speeds()
    assert rounds.missing == {}
    for nbytes in BUDGET.gpu_transfers:
        wait = speeds.link_latency + nbytes / speeds.link
        assert found.latencies[nbytes].value == pytest.approx(wait, rel=0.25)
        assert found.by_depth[nbytes][1].value == pytest.approx(nbytes / wait, rel=0.25)
    assert found.staged[MIB].value == pytest.approx(speeds.staged_share * speeds.link, rel=0.15)
    assert found.bandwidth[MIB].value == pytest.approx(speeds.link, rel=0.15)
    assert found.latency == found.latencies[64 * KIB]
    assert found.back[MIB].value == pytest.approx(speeds.back, rel=0.05)
    assert found.back_together is not None


def test_more_in_flight_hides_latency(linked: Any) -> None:
    found, _, _ = linked
    assert found.by_depth[64 * KIB][4].value > 2 * found.by_depth[64 * KIB][1].value


def test_link_and_cpu_are_measured_together(linked: Any) -> None:
    found, _, _ = linked
    assert list(found.experts) == [2, 4]
    assert all(rate.value > 0 and rate.origin == "measured" for rate in found.experts.values())
    assert found.together is not None
    # This link takes nothing from the CPU's memory.
    assert found.together.value == pytest.approx(Speeds().link, rel=0.3)
    assert found.together.value <= found.bandwidth[MIB].value


def test_pinned_memory_is_given_back_and_its_amount_is_a_bound(linked: Any) -> None:
    found, rounds, card = linked
    assert card.held == 0
    assert card.most_held == found.pinned.value == 64 * MIB
    assert found.pins_more
    assert rounds.remarks == []


def test_a_system_that_pins_little_is_remarked(memory: ExpertMemory) -> None:
    card = PlayedCard(Speeds(pinned=40 * MIB))
    found, rounds = link(card, memory, replace(BUDGET, gpu_cell_seconds=0.01, bits=(4,)))
    assert found.pinned is not None
    assert found.pinned.value == 32 * MIB
    assert not found.pins_more
    assert "CUDA_ERROR_OUT_OF_MEMORY" in found.pinned.source
    assert "pins no more than about 32 MiB" in rounds.remarks[0]
    assert card.held == 0


def test_a_system_that_pins_nothing_has_no_link_figures_and_says_why(memory: ExpertMemory) -> None:
    rounds = CardRounds(PlayedCard(Speeds(pinned=0)), BUDGET, lambda _: None)
    assert measure_gpu_link(rounds, memory, 1) is None
    assert "pins no memory" in rounds.missing["link gpu"]


def test_a_link_that_fails_is_named_and_nothing_stays_pinned(memory: ExpertMemory) -> None:
    card = PlayedCard(fails=("link",))
    rounds = CardRounds(card, BUDGET, lambda _: None)
    assert measure_gpu_link(rounds, memory, 1) is None
    assert rounds.missing == {"link gpu": "link does not work on this GPU"}
    assert card.held == 0
