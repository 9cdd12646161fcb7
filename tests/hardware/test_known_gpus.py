"""What is assumed of a GPU before it is measured: the driver's figures, a reference profile's, rules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import GPUS, fake_pynvml, one_gpu_here

from moechat.hardware import identity as identity_room
from moechat.hardware.gpu import GpuDevice, find_gpus
from moechat.hardware.known_gpus import assumed_link, assumed_machine, gpu_figures, gpu_machine, with_gpu_link
from moechat.hardware.measured_file import Measurement, save_measurement
from moechat.hardware.profile_file import reference_names, reference_profile

GIB = 1 << 30


def device(**more: Any) -> GpuDevice:
    return GpuDevice(0, "NVIDIA GeForce RTX 3060", "id", 12 * GIB, 11 * GIB, **more)


def test_what_the_driver_hides_comes_from_the_profile_of_that_gpu() -> None:
    found, known = gpu_figures(device()), reference_profile("rtx3060-12g").gpu
    assert known is not None
    assert (found.bandwidth.value, found.flops.value) == (known.bandwidth.value, known.flops.value)
    assert "reference profile of the NVIDIA GeForce RTX 3060" in found.bandwidth.source
    assert (found.capability, found.sms, found.l2_bytes) == ((8, 6), 28, 3 << 20)
    assert found.vram.origin == "measured"


def test_what_the_driver_reports_goes_before_estimates_but_not_before_published_rates() -> None:
    found = gpu_figures(device(memory_bandwidth=360e9, capability=(8, 7), sms=30))
    assert found.bandwidth.value == pytest.approx(0.914 * 360e9)
    assert (found.capability, found.sms) == ((8, 7), 30)
    large = GpuDevice(0, "NVIDIA GeForce RTX 4090", "id", 24 * GIB, 20 * GIB, memory_bandwidth=1e12)
    assert gpu_figures(large).bandwidth.value == 921.3e9


def test_another_amount_of_memory_is_another_gpu() -> None:
    small = replace(device(), vram=8 * GIB)
    assert gpu_figures(small) == small.figures()
    assert gpu_figures(replace(device(), name="NVIDIA Unheard")).bandwidth.value == 200e9


@pytest.mark.parametrize("name", [name for name in reference_names() if reference_profile(name).gpu])
def test_assumed_links_are_near_those_of_the_profiles(name: str) -> None:
    profile = reference_profile(name)
    assert profile.gpu is not None
    known, found = profile.links["gpu"], assumed_link(profile.gpu)
    for size in (256 << 10, 16 << 20):
        assert found.rate(size) == pytest.approx(known.rate(size), rel=0.15)
    assert found.latency.value == pytest.approx(known.latency.value, rel=0.15)
    assert not found.measured


def test_only_a_missing_link_is_assumed() -> None:
    profile = reference_profile("rtx3060-12g")
    assert with_gpu_link(profile) is profile
    found = with_gpu_link(replace(profile, links={"file": profile.links["file"]}))
    assert found.links["file"] == profile.links["file"]
    assert found.links["gpu"].bandwidth[16 << 20].origin == "estimate"
    for bits, rate in found.expert_rate_together.items():
        assert rate.origin == "estimate"
        assert rate.value < profile.expert_rate[bits][profile.cores].value


@pytest.mark.parametrize(
    ("name", "capability", "factor"),
    [
        ("NVIDIA GeForce RTX 3060", (8, 6), 2),
        ("NVIDIA RTX A6000", (8, 6), 4),
        ("NVIDIA L4", (8, 9), 4),
        ("NVIDIA GeForce RTX 2080 Ti", (7, 5), 4),
        ("NVIDIA GeForce GTX 1660", (7, 5), 2),
        ("NVIDIA A100-PCIE-40GB", (8, 0), 16),
    ],
)
def test_tensor_cores_differ_by_chip_and_market(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], factor: int
) -> None:
    one = {**GPUS[0], "name": name, "capability": capability, "cores": 1024, "clock": 1000}
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml([one]))
    (found,) = find_gpus({}).devices
    assert found.flops == 2 * 1024 * 1e9 * factor
    assert found.sms == (16 if capability in ((7, 5), (8, 0)) else 8)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    with one_gpu_here(monkeypatch):
        yield


def test_a_machine_that_was_not_measured_is_assumed_from_its_gpu(here: None) -> None:
    found = gpu_machine()
    assert found is not None
    assert found.gpu is not None
    assert found.gpu.name == "NVIDIA GeForce RTX 3060"
    assert found.title.endswith("not measured")
    # 8 of 16 lanes of generation 4.
    assert found.links["gpu"].rate(256 << 20) == pytest.approx(0.81 * 8 * 1.969e9, rel=0.01)
    assert all(rate.origin == "estimate" for rates in found.expert_rate.values() for rate in rates.values())


def test_a_measured_machine_is_not_assumed(here: None) -> None:
    machine = replace(reference_profile("rtx3060-12g"), key=identity_room.this_machine().key)
    save_measurement(Measurement(machine))
    found = gpu_machine()
    assert found is not None
    assert found.links == machine.links


def test_without_a_gpu_nothing_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml([]))
    said: list[str] = []
    assert assumed_machine(said.append) is None
    assert "no usable GPU" in said[0]
