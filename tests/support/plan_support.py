"""A machine to plan for, so that no test depends on the shipped profiles."""

from __future__ import annotations

from dataclasses import replace

from moechat.hardware.profile import Figure, GpuFigures, HardwareProfile, LinkFigures

GIB = 1 << 30


def figure(value: float) -> Figure:
    return Figure(value, "datasheet", "made up for tests")


def desktop(*, vram: float = 12 * GIB, ram: float = 32 * GIB, gpu: bool = True) -> HardwareProfile:
    """A desktop with a GPU of 300 GB/s behind a link of 20 GB/s, and a disk of 4 GB/s."""
    figures = GpuFigures(
        name="Test GPU",
        vram=figure(vram),
        vram_free=figure(vram),
        bandwidth=figure(300e9),
        flops=figure(30e12),
        launch=figure(5e-6),
        pcie_generation=4,
        pcie_lanes=16,
    )
    links = {"file": LinkFigures("file", {1 << 20: figure(4e9)}, figure(300e-6))}
    if gpu:
        links["gpu"] = LinkFigures("gpu", {1 << 20: figure(20e9)}, figure(60e-6), figure(18e9))
    return HardwareProfile(
        name="test-desktop",
        title="A desktop",
        cpu="Test CPU",
        cores=6,
        isa="avx2",
        ram=figure(ram),
        ram_bandwidth=figure(40e9),
        expert_rate={4: {1: figure(10e9), 6: figure(30e9)}},
        expert_rate_together={4: figure(15e9)},
        expert_flops={4: figure(200e9)},
        links=links,
        gpu=figures if gpu else None,
    )


def without_disk(profile: HardwareProfile) -> HardwareProfile:
    return replace(profile, links={kind: link for kind, link in profile.links.items() if kind != "file"})
