"""What is known of a GPU before it is measured: from the reference profiles, by its name, and by rule.

The driver's library does not report everything on every machine (WSL2 reports no clocks, say). Then the
figures of a reference profile with the same GPU are better than those of a weak GPU. The rules for links are
those of ``profiles/README.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import psutil

from moechat.errors import MoechatError
from moechat.geometry import SUPPORTED_BITS
from moechat.hardware.gpu import GpuDevice, find_gpus
from moechat.hardware.identity import this_machine
from moechat.hardware.measured_file import Notice, load_measured
from moechat.hardware.profile import Figure, GpuFigures, HardwareProfile, LinkFigures
from moechat.hardware.profile_file import reference_names, reference_profile

# A GPU of the same name with another amount of memory may have another bus: the RTX 3060 with 8 GB.
_SAME_VRAM = 0.05
# Bytes per second of a PCIe lane after line coding, by generation.
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
# Share of it that copies from pinned memory reach: 13.27 of 15.75 GB/s (profiles/laptop-rtx4060-8g.toml);
# 25.6 of 31.5 are usual for 16 lanes.
_LINK_SHARE = 0.81
_TRANSFER_SECONDS = 2e-6
_START_SECONDS = 10e-6
_TOGETHER = 0.9
_SIZES = (256 << 10, 16 << 20, 256 << 20)
# Of an unknown CPU: bytes per second that a core computes (AVX2, scripts/bench/profile_rates.py), its memory.
_CORE_RATE, _RAM_RATE, _RAM_SHARE = 10e9, 0.8 * 51.2e9, 0.77


@cache
def known_gpus() -> Mapping[str, tuple[GpuFigures, ...]]:
    """The GPUs of the reference profiles by name; a damaged profile is passed over."""
    found: dict[str, tuple[GpuFigures, ...]] = {}
    for name in reference_names():
        try:
            gpu = reference_profile(name).gpu
        except MoechatError:
            continue
        if gpu is not None:
            found[gpu.name] = (*found.get(gpu.name, ()), gpu)
    return found


def known_gpu(name: str, vram: float) -> GpuFigures | None:
    """The figures of a reference profile with that GPU; ``None`` if there is none.

    Args:
        name: As the driver reports it.
        vram: Bytes of its memory.
    """
    same = (
        gpu for gpu in known_gpus().get(name, ()) if math.isclose(gpu.vram.value, vram, rel_tol=_SAME_VRAM)
    )
    return next(same, None)


def gpu_figures(device: GpuDevice) -> GpuFigures:
    """The figures of a GPU that was not measured.

    Rates that were published for this GPU come first, then those that follow from what the driver reports,
    then the reference profile's estimates, then those of a weak GPU.
    """
    figures = device.figures()
    known = known_gpu(device.name, device.vram)
    if known is None:
        return figures

    def better(ours: Figure, reported: bool, theirs: Figure) -> Figure:
        if theirs.origin != "published" and reported:
            return ours
        return replace(theirs, source=f"{theirs.source} (reference profile of the {known.name})")

    return replace(
        figures,
        bandwidth=better(figures.bandwidth, device.memory_bandwidth is not None, known.bandwidth),
        flops=better(figures.flops, device.flops is not None, known.flops),
        capability=figures.capability or known.capability,
        sms=figures.sms or known.sms,
        l2_bytes=figures.l2_bytes or known.l2_bytes,
    )


def assumed_link(gpu: GpuFigures) -> LinkFigures:
    """The link to a GPU that was not measured, from its PCIe generation and lanes."""
    generation, lanes = gpu.pcie_generation, gpu.pcie_lanes
    lane = _LANE[min(max(_LANE), max(min(_LANE), generation))]
    whole = _LINK_SHARE * lane * lanes
    base = f"{_LINK_SHARE:g} x {lanes} lanes of PCIe {generation}"
    bandwidth = {
        size: Figure(size / (size / whole + _TRANSFER_SECONDS), "estimate", f"{base}, 2 us for each transfer")
        for size in _SIZES
    }
    latency = Figure(_START_SECONDS + _SIZES[0] / whole, "estimate", f"10 us to start a copy; {base}")
    together = Figure(_TOGETHER * bandwidth[_SIZES[-1]].value, "estimate", f"{_TOGETHER:g} of the rate alone")
    return LinkFigures("gpu", bandwidth, latency, together)


def with_gpu_link(profile: HardwareProfile) -> HardwareProfile:
    """The profile of a machine with a GPU, with :func:`assumed_link` where its link was not measured."""
    if profile.gpu is None or "gpu" in profile.links:
        return profile
    link = assumed_link(profile.gpu)
    assert link.together is not None
    # The CPU was measured while the disk was read. The link to a GPU is faster and leaves it less bandwidth.
    return replace(
        profile,
        links={**profile.links, "gpu": link},
        expert_rate_together=_beside(profile, link.together.value),
    )


def assumed_machine(notice: Notice = lambda _: None) -> HardwareProfile | None:
    """Figures assumed of this machine before it is measured; ``None`` without a GPU.

    The GPU's figures are those of :func:`gpu_figures`. Of the CPU only the cores are known: each is assumed
    to compute as a slow one measured for ``profiles/``, from two channels of DDR4-3200.

    Args:
        notice: Called with the reason if there is no GPU.
    """
    report = find_gpus()
    if report.best is None:
        notice(report.why)
        return None
    identity = this_machine(report)
    ram = Figure(_RAM_RATE, "estimate", "0.8 x 51.2 GB/s of two channels of DDR4-3200; not measured")
    rate = Figure(
        min(identity.cores * _CORE_RATE, _RAM_SHARE * _RAM_RATE),
        "estimate",
        f"{identity.cores} cores of {_CORE_RATE / 1e9:g} GB/s, at most {_RAM_SHARE:g} of the memory's rate",
    )
    return with_gpu_link(
        HardwareProfile(
            name=f"machine-{identity.key[:8]}",
            title=f"{identity.cpu}, {report.best.name}; not measured",
            cpu=identity.cpu,
            cores=identity.cores,
            isa=identity.isa,
            ram=Figure(psutil.virtual_memory().total, "measured", "as the system reports it"),
            ram_bandwidth=ram,
            expert_rate={bits: {identity.cores: rate} for bits in SUPPORTED_BITS},
            gpu=gpu_figures(report.best),
        )
    )


def gpu_machine(notice: Notice = lambda _: None) -> HardwareProfile | None:
    """Figures of this machine for computing on its GPU: measured where there are some, else assumed.

    ``plan`` and ``run`` both use it, so they choose the same plan. ``None`` if no GPU is found.

    Args:
        notice: Called with the reason, in a sentence, if a measurement is not used.
    """
    measured = load_measured(notice)
    if measured is None or measured.gpu is None:
        return assumed_machine()
    return with_gpu_link(measured)


def _beside(profile: HardwareProfile, link: float) -> dict[int, Figure]:
    """Rates of the CPU while a link reads the memory: what it leaves, and no more than alone."""
    ram = profile.ram_bandwidth.value
    left = max(ram - link, ram / 2) / ram
    return {
        bits: Figure(
            left * rates[max(rates)].value, "estimate", f"{left:.2g} of the rate alone: what the link leaves"
        )
        for bits, rates in profile.expert_rate.items()
    }
