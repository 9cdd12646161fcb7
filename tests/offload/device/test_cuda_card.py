"""The measured GPU over the stand-in: the real link with programmed speeds, and the real kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moechat.hardware import measure_gpu as measuring
from moechat.hardware.card_rounds import CardRounds
from moechat.hardware.measure_budget import Budget
from moechat.hardware.measure_cpu import ExpertMemory
from moechat.hardware.measure_gpu import measure_gpu
from moechat.hardware.measure_gpu_link import measure_gpu_link
from moechat.hardware.profile import Figure, GpuFigures

KIB, MIB = 1 << 10, 1 << 20
BUDGET = Budget(
    gpu_cell_seconds=0.03,
    gpu_together_seconds=0.1,
    gpu_link_bytes=8 * MIB,
    gpu_transfers=(256 * KIB, MIB),
    gpu_depths=(1, 4),
    gpu_bytes=4 * MIB,
    gpu_tokens=(1, 9),
    many_tokens=9,
    dense_bits=(16, 4),
    bits=(4,),
    pin_chunk=16 * MIB,
    pin_most=64 * MIB,
)
ASSUMED = GpuFigures(
    name="a GPU",
    vram=Figure(8e9, "measured", "NVML"),
    vram_free=Figure(8e9, "measured", "NVML"),
    bandwidth=Figure(200e9, "estimate", "assumed"),
    flops=Figure(20e12, "estimate", "assumed"),
    launch=Figure(5e-6, "estimate", "assumed"),
    pcie_generation=4,
    pcie_lanes=16,
)


@pytest.fixture
def card(gpu):
    from moechat.offload.cuda_card import CardShapes, CudaCard

    made = CudaCard(gpu, CardShapes(hidden=64, blocks=1, experts=2, dense=64, pool_bytes=1))
    yield made
    made.release()


def rounds_of(card, budget: Budget = BUDGET) -> CardRounds:
    return CardRounds(card, budget, lambda _: None)


def test_the_links_figures_are_the_speeds_of_the_driver(card, driver) -> None:
    # So slow that the scheduling of this machine adds little.
    bandwidth, latency = 50e6, 5e-3
    driver.set(bandwidth=bandwidth, latency=latency, pin_limit=60 * MIB)
    rounds = rounds_of(card)
    found = measure_gpu_link(rounds, ExpertMemory(64 * MIB), 1)
    assert found is not None
    assert rounds.missing == {}

    def slowed(value: float, programmed: float) -> bool:
        """Other programs can only slow it, and this driver cannot be faster than programmed."""
        return 0.6 * programmed < value < 1.02 * programmed

    for nbytes in BUDGET.gpu_transfers:
        # The driver makes one copy after another, each with its latency.
        rate = nbytes / (latency + nbytes / bandwidth)
        assert slowed(found.bandwidth[nbytes].value, rate)
        assert slowed(1 / found.latencies[nbytes].value, rate / nbytes)
        assert slowed(found.staged[nbytes].value, rate)
        assert found.back[nbytes].value > 0
    assert found.together is not None
    assert slowed(found.together.value, found.bandwidth[MIB].value)
    assert found.experts[4].value > 0
    # The limit holds for three chunks.
    assert found.pinned is not None
    assert (found.pinned.value, found.pins_more) == (48 * MIB, False)
    assert "OUT_OF_MEMORY" in found.pinned.source
    assert driver.get("pinned") == 0
    assert driver.get("allocated") == 0


def test_every_kernel_is_measured_on_what_the_engine_launches(card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SMALL_GRAPH", 2)
    monkeypatch.setattr(measuring, "LARGE_GRAPH", 12)
    rounds = rounds_of(card, replace(BUDGET, gpu_cell_seconds=1e-3, gpu_seconds=60.0, gpu_calls=2))
    found = measure_gpu(rounds, ASSUMED)
    assert rounds.missing == {}
    assert (found.capability, found.sms, found.l2_bytes) == ((8, 6), 2, MIB)
    for figure in (
        found.launch,
        found.call,
        found.sync,
        found.round_trip,
        found.graph_launch,
        found.graph_node,
        found.bandwidth,
        found.copy,
        *found.dense_rate.values(),
        *found.dense_flops.values(),
        *found.expert_rate[4].values(),
        *found.expert_flops[4].values(),
    ):
        assert figure is not None
        assert figure.origin == "measured"
    assert list(found.dense_rate) == list(found.dense_flops) == [16, 4]
    assert list(found.expert_rate[4]) == [1, 9]


@pytest.mark.parametrize("bits", [3, 16])
def test_a_call_of_experts_reads_all_its_blocks(card, bits: int) -> None:
    from moechat.geometry import ExpertGeometry

    task = card.experts(bits, 2)
    record = ExpertGeometry(64, 64, 2, bits).record_bytes
    # Two experts of a block, two sets, two tokens each.
    assert task.nbytes == 2 * 2 * record
    assert task.operations == 2 * (3 * 64 * 64) * 2 * 2 * 2
    task.run()
    task.run()


def test_what_a_call_computes_is_the_sum_of_its_experts(card) -> None:
    """The kernels get the lists that they get from the engine: other ones would be fast for nothing."""
    from moechat import _native
    from moechat.offload.cuda_card import _block, _Experts

    geometry, pages = card._pages(4)
    experts = _Experts(card._accelerator, geometry, card._shapes, 1, 1)
    experts.launch(pages)
    record = np.concatenate([_block(geometry)] * 2).reshape(2, 1, -1)
    x, expected = np.full((1, 64), 0.01, np.float32), np.empty((1, 64), np.float32)
    choice, weights = np.array([[0, 1]]), np.full((1, 2), 0.5, np.float32)
    _native.resident_forward(
        _native.BlockLayout(64, 64, 4), _native.Gate(), record, x, choice, weights, expected
    )
    np.testing.assert_allclose(experts._out.float().numpy(), expected, rtol=2e-2, atol=1e-6)


def test_a_pin_that_the_driver_refuses_gives_the_reason(card, driver) -> None:
    driver.set(pin_limit=MIB)
    memory = np.zeros(2 * MIB, np.uint8)
    assert "OUT_OF_MEMORY" in card.pin(memory)
    small = np.zeros(64 * KIB, np.uint8)
    assert card.pin(small) == ""
    card.unpin(small)
    assert driver.get("pinned") == 0
