"""GPUs, as a management library reports them that stands in for NVIDIA's."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_nvml import GPUS, fake_pynvml

from moechat.hardware import identity as identity_room
from moechat.hardware.gpu import find_gpus
from moechat.hardware.identity import this_machine
from moechat.hardware.measured_file import Measurement, load_measurement, save_measurement
from moechat.hardware.profile import Figure, HardwareProfile

GIB = 1 << 30


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    def install(*arguments: Any, **named: Any) -> ModuleType:
        module = fake_pynvml(*arguments, **named)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return install


def test_of_two_gpus_the_larger_one_is_in_the_profile(
    installed: Callable[..., Any],
) -> None:
    module = installed(GPUS)
    report = find_gpus({})
    assert [device.name for device in report.devices] == [
        "NVIDIA GeForce RTX 3060",
        "NVIDIA GeForce RTX 4090",
    ]
    assert report.driver == "570.86.16"
    assert not report.why
    assert report.best is report.devices[1]
    figures = report.best.figures()
    assert (figures.vram.value, figures.vram_free.value) == (24 * GIB, 20 * GIB)
    assert figures.vram.origin == "measured"
    # An idle GPU runs its slot at generation 1; what counts is what it rises to. Lanes do not change.
    assert (figures.pcie_generation, figures.pcie_lanes) == (4, 16)
    assert report.devices[0].figures().pcie_lanes == 8
    assert module.shutdowns == 1


def test_rates_are_marked_as_estimates_and_follow_the_data_sheets(installed: Callable[..., Any]) -> None:
    installed(GPUS)
    small, large = find_gpus({}).devices
    # 360 GB/s and 1008 GB/s are what the maker states.
    assert small.memory_bandwidth == pytest.approx(360e9, rel=0.001)
    assert large.memory_bandwidth == pytest.approx(1008e9, rel=0.001)
    figures = large.figures()
    assert (figures.bandwidth.origin, figures.flops.origin, figures.launch.origin) == ("estimate",) * 3
    assert figures.bandwidth.value < 1008e9
    # What torch reaches on these two; see profiles/.
    assert figures.flops.value == pytest.approx(170e12, rel=0.05)
    assert small.figures().flops.value == pytest.approx(25.5e12, rel=0.05)


def test_unreported_properties_are_named_and_assumed_low(installed: Callable[..., Any]) -> None:
    installed(
        GPUS[:1],
        unsupported=(
            "nvmlDeviceGetCurrPcieLinkGeneration",
            "nvmlDeviceGetMaxPcieLinkGeneration",
            "nvmlDeviceGetCurrPcieLinkWidth",
            "nvmlDeviceGetMaxPcieLinkWidth",
            "nvmlDeviceGetMaxClockInfo",
            "nvmlDeviceGetUUID",
        ),
    )
    (device,) = find_gpus({}).devices
    assert device.unknown == ["PCIe generation", "PCIe lanes", "memory clock", "cores and their clock"]
    figures = device.figures()
    assert figures.bandwidth.origin == "estimate"
    assert "assumed" in figures.bandwidth.source
    assert figures.pcie_generation >= 1
    assert device.identity


def test_a_lost_gpu_is_left_out(installed: Callable[..., Any]) -> None:
    installed(GPUS, lost=1)
    assert [device.index for device in find_gpus({}).devices] == [0]


def test_a_gpu_without_memory_information_is_left_out(installed: Callable[..., Any]) -> None:
    installed(GPUS[:1], unsupported=("nvmlDeviceGetMemoryInfo",))
    report = find_gpus({})
    assert report.best is None
    assert report.why == "the NVIDIA driver 570.86.16 reports no usable GPU"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", [1]),
        ("1,0", [1, 0]),
        ("0,7,1", [0]),  # CUDA stops at the first that is not there
        ("GPU-2222", [1]),
        ("GPU-", []),  # names both
        ("1,1", [1]),
        ("", []),
        ("-1", []),
        ("MIG-1", []),
    ],
)
def test_only_visible_gpus_count(installed: Callable[..., Any], visible: str, expected: list[int]) -> None:
    installed(GPUS)
    report = find_gpus({"CUDA_VISIBLE_DEVICES": visible})
    assert [device.index for device in report.devices] == expected
    assert ("CUDA_VISIBLE_DEVICES" in report.why) == (not expected)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("LibraryNotFound", "no NVIDIA driver is installed"),
        ("DriverNotLoaded", "the NVIDIA driver is not loaded"),
        ("NoPermission", "may not access"),
        ("LibRmVersionMismatch", "restart"),
        ("Unknown", "does not answer: NVMLError_Unknown"),
    ],
)
def test_a_missing_driver_is_reported_without_an_error(
    installed: Callable[..., Any], error: str, why: str
) -> None:
    installed(GPUS, init=error)
    report = find_gpus({})
    assert report.best is None
    assert not report.devices
    assert why in report.why


def test_a_missing_library_is_reported_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name == "pynvml":
            raise ImportError("No module named 'pynvml'")
        return real(name, *arguments, **named)

    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    report = find_gpus({})
    assert report.best is None
    assert "not installed" in report.why


def test_unique_numbers_are_hashed_and_change_the_key(installed: Callable[..., Any]) -> None:
    installed(GPUS)
    two = find_gpus({})
    identity = this_machine(two)
    assert "11111111" not in json.dumps(identity.to_json())
    other = [dict(GPUS[0], uuid="GPU-99999999-aaaa-bbbb-cccc-000000000009"), GPUS[1]]
    installed(other)
    assert this_machine(find_gpus({})).key != identity.key
    assert this_machine(two).key == identity.key


def test_the_free_memory_of_a_stored_gpu_is_updated(
    installed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOECHAT_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    installed(GPUS)
    identity_room._gpus.cache_clear()
    try:
        report, key = find_gpus(), this_machine().key
        assert report.best is not None
        some = Figure(1e9, "measured", "a test")
        profile = HardwareProfile(
            "m", "M", "cpu", 2, "avx2", some, some, {4: {2: some}}, gpu=report.best.figures(), key=key
        )
        saved = Measurement(profile, facts={"gpus": report.facts()})
        save_measurement(saved)
        assert load_measurement() == saved
        installed([GPUS[0], dict(GPUS[1], memory=(24 * GIB, 3 * GIB))])
        found = load_measurement()
        assert found is not None
        assert found.profile.gpu is not None
        assert found.profile.gpu.vram_free.value == 3 * GIB
        assert found.facts["gpus"][1]["vram_free_bytes"] == 3 * GIB
        assert found.profile.gpu.vram == report.best.figures().vram
    finally:
        identity_room._gpus.cache_clear()
