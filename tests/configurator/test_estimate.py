"""Times from a machine's figures against numbers computed by hand, and their origins."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moechat.configurator.estimate import CostFigures, ModelShape, cost_figures, costs_of, expert_rate
from moechat.errors import UsageError
from moechat.hardware.profile import Figure, GpuFigures, HardwareProfile, LinkFigures, ModelTimes
from moechat.hardware.profile_file import reference_names, reference_profile

MB = 10**6
GB = 10**9


def measured(value: float) -> Figure:
    return Figure(value, "measured", "here")


# 2 expert layers of 8 experts of 10 blocks of 1 MB; 90 MB of dense weights, 18 MB of head.
SHAPE = ModelShape(
    layers=2,
    experts=8,
    top_k=3,
    bits=4,
    block_bytes=MB,
    blocks_per_expert=10,
    expert_weights=18 * MB,
    dense_bytes=90 * MB,
    head_bytes=18 * MB,
    dense_itemsize=2,
    kv_bytes=9000,
    hidden_size=2048,
)
FILE = LinkFigures(
    kind="file",
    bandwidth={MB: measured(1 * GB), 19 * MB: measured(3 * GB)},
    latency=measured(1.1e-3),
    together=measured(0.8 * GB),
)
GPU = LinkFigures(
    kind="gpu",
    bandwidth={MB: measured(10 * GB), 10 * MB: measured(20 * GB)},
    latency=measured(120e-6),
    together=measured(16 * GB),
)
PC = HardwareProfile(
    name="pc",
    title="A PC",
    cpu="CPU",
    cores=4,
    isa="avx2",
    ram=measured(32 * 2**30),
    ram_bandwidth=measured(40 * GB),
    expert_rate={4: {1: measured(8 * GB), 4: measured(25 * GB)}, 16: {4: measured(32 * GB)}},
    expert_rate_together={4: measured(10 * GB)},
    links={"file": FILE, "gpu": GPU},
    gpu=GpuFigures(
        name="gpu",
        vram=measured(8 * 2**30),
        vram_free=measured(8 * 2**30),
        bandwidth=measured(500 * GB),
        flops=measured(50e12),
        launch=measured(5e-6),
        pcie_generation=4,
        pcie_lanes=16,
    ),
)
TIMES = ModelTimes(attention=measured(1e-3), moe=measured(2e-3), head=measured(3e-3))


def test_near_ram_by_hand() -> None:
    costs = costs_of(PC, SHAPE, near="ram", context=1000)
    # 45 MB a layer and 9 MB / 2 of cache at 0.7 of 40 GB/s, and 600 us.
    assert costs.attention == pytest.approx(49.5 * MB / (28 * GB) + 600e-6)
    assert costs.moe == pytest.approx(30 * MB / (25 * GB) + 100e-6)
    assert costs.head == pytest.approx(18 * MB / (28 * GB) + 800e-6)
    # 1 MB takes 1 ms, 19 MB take 19/3 ms; 10 MB lie half way.
    load = (1e-3 + 19e-3 / 3) / 2
    assert costs.load == pytest.approx(load)
    # The CPU leaves 0.8 of the 3 GB/s of the largest transfers.
    assert costs.load_together == pytest.approx(load * 3 / 0.8)
    # 1.1 ms to the last byte of 1 MB, which takes 1 ms of them.
    assert costs.latency == pytest.approx(0.1e-3)
    assert costs.compute_far == math.inf
    assert costs.compute_together is None


def test_near_gpu_by_hand() -> None:
    costs = costs_of(PC, SHAPE, near="gpu", context=1000)
    # A copy of 1 MB takes 50 us besides its bytes at 20 GB/s.
    # 0.9 of 500 GB/s; 9 kernels of a graph, its call and start; the choice, the host wakes up and decides.
    choice = 50e-6 + 3e-6 + 30e-6
    assert costs.attention == pytest.approx(49.5 * MB / (450 * GB) + 9 * 1.9e-6 + 12e-6 + choice)
    # Lists and the launch; 0.8 of 500 GB/s, the kernel and the sum: the host is done before.
    assert costs.moe == pytest.approx(6e-6 + 8.9e-6 + 30 * MB / (400 * GB) + 3e-6 + 3e-6)
    assert costs.head == pytest.approx(18 * MB / (450 * GB) + 6 * 1.9e-6 + 12e-6 + choice - 30e-6 + 200e-6)
    assert costs.load == pytest.approx(0.5e-3)
    assert costs.load_together == pytest.approx(0.625e-3)
    assert costs.latency == pytest.approx(20e-6)
    assert costs.compute_far == pytest.approx(0.4e-3)
    assert costs.compute_together == pytest.approx(1e-3)


@pytest.mark.parametrize("blocks", [1, 3, 10, 40])
@pytest.mark.parametrize("near", ["gpu", "ram"])
def test_small_experts_are_not_moved_faster_while_the_cpu_computes(near: Any, blocks: int) -> None:
    link = GPU if near == "gpu" else FILE
    assert link.together is not None
    share = link.together.value / link.bandwidth[max(link.bandwidth)].value
    costs = costs_of(PC, replace(SHAPE, blocks_per_expert=blocks), near=near)
    assert costs.load / costs.both_loads == pytest.approx(share)


def test_small_experts_on_a_gpu_take_the_time_that_the_host_launches() -> None:
    slow = replace(PC, gpu=replace(PC.gpu, call=measured(40e-6)))
    costs = costs_of(slow, replace(SHAPE, block_bytes=1000), near="gpu")
    # The sum is launched while the kernel runs, which takes no time.
    assert costs.moe == pytest.approx(6e-6 + 24e-6 + 20e-6)


def test_the_context_is_read_once_a_token() -> None:
    short, long = (costs_of(PC, SHAPE, near="gpu", context=tokens) for tokens in (0, 100_000))
    assert long.attention - short.attention == pytest.approx(4500 * 100_000 / (450 * GB))
    assert replace(long, attention=short.attention) == short


@pytest.mark.parametrize("near", ["gpu", "ram"])
def test_measured_times_take_the_place_of_estimates(near: Any) -> None:
    found = cost_figures(PC, SHAPE, times=TIMES, near=near)
    assert (found.costs.attention, found.costs.moe, found.costs.head) == (1e-3, 2e-3, 3e-3)
    assert found.costs.load == costs_of(PC, SHAPE, near=near).load
    assert found.measured


def test_every_time_has_its_origin() -> None:
    found = cost_figures(PC, SHAPE, near="gpu")
    origins = {name: figure.origin for name, figure in found.figures.items()}
    assert origins == {
        "load": "measured",
        "latency": "measured",
        "load_together": "measured",
        "compute_far": "measured",
        "compute_together": "measured",
        "attention": "estimate",
        "moe": "estimate",
        "head": "estimate",
    }
    assert not found.measured
    for name, figure in found.figures.items():
        assert figure.value == getattr(found.costs, name)
    assert "us of calls and waits" in found.figures["attention"].source
    assert "30 MB at 400 GB/s (0.8 of its memory's rate" in found.figures["moe"].source


def test_near_ram_expert_times_take_the_origin_of_the_kernel_rate() -> None:
    assert cost_figures(PC, SHAPE, near="ram").figures["moe"].origin == "measured"
    other = replace(SHAPE, bits=8)
    found = cost_figures(PC, other, near="ram").figures["moe"]
    assert found.origin == "estimate"
    assert found.source.startswith("as with ")


def test_an_interpolated_rate_takes_the_weaker_of_two_origins() -> None:
    guess = Figure(3 * GB, "estimate", "a rule")
    link = replace(FILE, bandwidth={MB: measured(GB), 19 * MB: guess})
    pc = replace(PC, links={"file": link})
    assert cost_figures(pc, SHAPE, near="ram").figures["load"] == Figure(
        pytest.approx((1e-3 + 19e-3 / 3) / 2), "estimate", "a rule"
    )
    small = replace(SHAPE, blocks_per_expert=1)
    assert cost_figures(pc, small, near="ram").figures["load"].origin == "measured"


def test_rates_not_measured_together_are_left_out() -> None:
    pc = replace(PC, links={"gpu": replace(GPU, together=None)}, expert_rate_together={})
    costs = costs_of(pc, SHAPE, near="gpu")
    assert costs.load_together is None
    assert costs.compute_together is None
    assert costs.both_loads == costs.load


def test_other_bits_take_the_nearest_rate() -> None:
    assert expert_rate(PC, 3).value == 25 * GB
    assert expert_rate(PC, 2).value == 25 * GB
    assert expert_rate(PC, 16) == measured(32 * GB)
    assert expert_rate(PC, 4) == measured(25 * GB)


def test_missing_parts_of_a_machine_are_named_in_the_error() -> None:
    with pytest.raises(UsageError, match="A PC has no GPU"):
        costs_of(replace(PC, gpu=None), SHAPE, near="gpu")
    with pytest.raises(UsageError, match="link between the disk and RAM"):
        costs_of(replace(PC, links={"gpu": GPU}), SHAPE, near="ram")
    with pytest.raises(UsageError, match="says nothing about the CPU's expert kernels"):
        costs_of(replace(PC, expert_rate={}), SHAPE, near="ram")


@pytest.mark.parametrize("changes", [{"layers": 0}, {"top_k": 9}, {"dense_bytes": -1}, {"block_bytes": 0}])
def test_an_impossible_shape_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"is -?\d|are not valid"):
        replace(SHAPE, **changes)


def test_a_shape_counts_its_bytes() -> None:
    assert SHAPE.expert_bytes == 10 * MB
    assert SHAPE.all_expert_bytes == 160 * MB
    assert SHAPE.layer_dense_bytes == 45 * MB


# Mixtral 8x7B at 4 bits: 224 blocks of 108 x 4096 bytes; 1.6 billion dense weights, a head of 32000 x 4096.
MIXTRAL = ModelShape(
    layers=32,
    experts=8,
    top_k=2,
    bits=4,
    block_bytes=108 * 4096,
    blocks_per_expert=224,
    expert_weights=3 * 4096 * 14336,
    dense_bytes=2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096),
    head_bytes=2 * 32000 * 4096,
    dense_itemsize=2,
    kv_bytes=2 * 2 * 32 * 1024,
    hidden_size=4096,
)


def resident(found: CostFigures) -> float:
    """Seconds a token with all experts near."""
    return MIXTRAL.layers * (found.costs.attention + found.costs.moe) + found.costs.head


def test_faster_machines_are_faster() -> None:
    slow, fast = (
        cost_figures(reference_profile(name), MIXTRAL, near="gpu") for name in ("rtx3060-12g", "rtx4090-24g")
    )
    assert resident(fast) < 0.5 * resident(slow)
    assert fast.costs.compute_far < slow.costs.compute_far
    wide, narrow = (
        cost_figures(reference_profile(name), MIXTRAL, near="gpu").costs.load
        for name in ("rtx4070ti-super-16g", "rtx4060ti-16g")
    )
    assert wide < 0.6 * narrow
    assert cost_figures(reference_profile("rtx5090-32g"), MIXTRAL, near="gpu").costs.load < 0.5 * wide
    nvme, sata = (
        costs_of(reference_profile(name), MIXTRAL, near="ram").load
        for name in ("ssd-only-16g", "old-desktop-32g")
    )
    assert nvme < 0.25 * sata


@pytest.mark.parametrize("name", reference_names())
def test_reference_machines_give_plausible_times_and_no_measured_ones(name: str) -> None:
    profile = reference_profile(name)
    near: Any = "ram" if profile.gpu is None else "gpu"
    found = cost_figures(profile, MIXTRAL, near=near)
    assert not found.measured
    # All of Mixtral at 4 bits is 7.3 GB a token if it were near, and memory has 20 to 1,800 GB/s.
    assert 1 < 1 / resident(found) < 200
    assert 1e-3 < found.costs.load < 0.3
    assert costs_of(profile, MIXTRAL, near="ram").compute_far == math.inf
    if near == "gpu":
        # The CPU computes misses in RAM at a rate of the same order as the link's.
        assert 0.2 < found.costs.compute_far / found.costs.load < 3
        assert found.costs.both_loads >= found.costs.load
        assert found.costs.both_computes >= found.costs.compute_far


@given(
    experts=st.integers(1, 256),
    blocks=st.integers(1, 300),
    bits=st.sampled_from([2, 3, 4, 6, 8, 16]),
    context=st.integers(0, 1 << 20),
    name=st.sampled_from(reference_names()),
    near=st.sampled_from(["gpu", "ram"]),
)
def test_larger_experts_take_longer(
    experts: int, blocks: int, bits: int, context: int, name: str, near: Any
) -> None:
    profile = reference_profile(name)
    if near == "gpu" and profile.gpu is None:
        near = "ram"
    shape = replace(MIXTRAL, experts=experts, top_k=min(2, experts), bits=bits, blocks_per_expert=blocks)
    small = costs_of(profile, shape, near=near, context=context)
    large = costs_of(profile, replace(shape, blocks_per_expert=blocks + 1), near=near, context=context)
    assert large.load > small.load
    # On a GPU the host may take longer to launch the kernels than they run.
    assert large.moe > small.moe or (near == "gpu" and large.moe == small.moe)
    assert large.compute_far >= small.compute_far
    assert (large.attention, large.head, large.latency) == (small.attention, small.head, small.latency)


def test_grids_bound_what_cores_compute_but_not_what_the_memory_delivers() -> None:
    pc = reference_profile("rtx3060-12g")
    assert pc.with_grids(0) is pc
    before, after = pc.expert_rate[2], pc.with_grids(1).expert_rate[2]
    core = before[1].value
    assert after[1].value == pytest.approx(core / 5.5)
    assert after[6].value == pytest.approx(6 * core / 5.5)
    assert after[6].low is not None
    assert after[6].low < after[6].value
    assert after[6].origin == "estimate"
    half = pc.with_grids(0.5).expert_rate[2][6].value
    assert half == pytest.approx(2 / (1 / before[6].value + 1 / after[6].value))
    # So many cores that the memory is the limit.
    fast = replace(pc, expert_rate={2: {1: before[1], 64: before[6]}})
    assert fast.with_grids(1).expert_rate[2][64] == before[6]
    # Processors with AVX-512 VBMI unpack faster.
    assert replace(pc, isa="avx512-vnni").with_grids(1).expert_rate[2][1].value > after[1].value


def test_grids_of_experts_raise_the_time_of_the_cpu_alone() -> None:
    pc = reference_profile("rtx3060-12g")
    shape = replace(SHAPE, bits=2)
    plain, grids = (costs_of(pc, replace(shape, grids=share), near="gpu") for share in (0.0, 1.0))
    assert grids.compute_far > 1.5 * plain.compute_far
    assert (grids.load, grids.attention, grids.head) == (plain.load, plain.attention, plain.head)
