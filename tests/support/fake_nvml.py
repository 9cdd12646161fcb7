"""A module that stands in for NVIDIA's management library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moechat.hardware import identity

GIB = 1 << 30
GPUS = [
    {
        "name": b"NVIDIA GeForce RTX 3060",
        "uuid": b"GPU-11111111-aaaa-bbbb-cccc-000000000001",
        "memory": (12 * GIB, 11 * GIB),
        "pcie": (1, 4, 8, 16),
        "memory_clock": 7501,
        "bus": 192,
        "cores": 3584,
        "clock": 2100,
        "capability": (8, 6),
    },
    {
        "name": "NVIDIA GeForce RTX 4090",
        "uuid": "GPU-22222222-aaaa-bbbb-cccc-000000000002",
        "memory": (24 * GIB, 20 * GIB),
        "pcie": (1, 4, 16, 16),
        "memory_clock": 10501,
        "bus": 384,
        "cores": 16384,
        "clock": 3105,
        "capability": (8, 9),
    },
]


def fake_pynvml(
    gpus: list[dict[str, Any]], *, init: str = "", unsupported: tuple[str, ...] = (), lost: int = -1
) -> ModuleType:
    """A module with the functions, the values and the errors of ``nvidia-ml-py``."""
    module: Any = ModuleType("pynvml")

    class NVMLError(Exception):
        def __init__(self, text: str = "") -> None:
            super().__init__(text or type(self).__name__)

    module.NVMLError = NVMLError
    for name in (
        "LibraryNotFound",
        "DriverNotLoaded",
        "NoPermission",
        "LibRmVersionMismatch",
        "NotSupported",
        "GpuIsLost",
        "Unknown",
    ):
        setattr(module, f"NVMLError_{name}", type(f"NVMLError_{name}", (NVMLError,), {}))
    module.NVML_CLOCK_MEM, module.shutdowns = 2, 0

    def nvml_init() -> None:
        if init:
            raise getattr(module, f"NVMLError_{init}")

    def handle(index: int) -> int:
        if index == lost:
            raise module.NVMLError_GpuIsLost
        return index

    def shutdown() -> None:
        module.shutdowns += 1

    def max_clock(at: int, kind: int) -> int:
        return int(gpus[at]["memory_clock" if kind == 2 else "clock"])

    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": nvml_init,
        "nvmlShutdown": shutdown,
        "nvmlSystemGetDriverVersion": lambda: b"570.86.16",
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetName": lambda at: gpus[at]["name"],
        "nvmlDeviceGetUUID": lambda at: gpus[at]["uuid"],
        "nvmlDeviceGetMemoryInfo": lambda at: SimpleNamespace(
            total=gpus[at]["memory"][0],
            free=gpus[at]["memory"][1],
            used=gpus[at]["memory"][0] - gpus[at]["memory"][1],
        ),
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda at: gpus[at]["pcie"][0],
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda at: gpus[at]["pcie"][1],
        "nvmlDeviceGetCurrPcieLinkWidth": lambda at: gpus[at]["pcie"][2],
        "nvmlDeviceGetMaxPcieLinkWidth": lambda at: gpus[at]["pcie"][3],
        "nvmlDeviceGetMaxClockInfo": max_clock,
        "nvmlDeviceGetMemoryBusWidth": lambda at: gpus[at]["bus"],
        "nvmlDeviceGetNumGpuCores": lambda at: gpus[at]["cores"],
        "nvmlDeviceGetCudaComputeCapability": lambda at: gpus[at]["capability"],
    }

    def refuse(*arguments: Any) -> Any:
        raise module.NVMLError_NotSupported

    for name, function in answers.items():
        setattr(module, name, refuse if name in unsupported else function)
    return module


@contextmanager
def one_gpu_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine as if NVIDIA's library reported the first of :data:`GPUS`."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml(GPUS[:1]))
    identity._gpus.cache_clear()
    yield
    identity._gpus.cache_clear()
