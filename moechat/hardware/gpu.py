"""GPUs as reported by NVIDIA's management library (``nvidia-ml-py``), without loading CUDA.

A missing GPU, driver or library is not an error; :attr:`GpuReport.why` gives the reason.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moechat.hardware.profile import Figure, GpuFigures

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
# Tensor core operations per multiply-add of the other cores, 16 bit with 32-bit sums, dense. Of GPUs since
# Ampere those called GeForce do half of what the chip can (GA102, AD102, GB202 whitepapers). Turing has half
# as many other cores (TU102 whitepaper), and the GTX 16 series has no tensor cores. Last: GA100 and GH100.
_TENSOR_FACTOR_GEFORCE, _TENSOR_FACTOR_WORKSTATION = 2.0, 4.0
_TENSOR_FACTOR_TURING, _TENSOR_FACTOR_NONE = 4.0, 2.0
_TENSOR_FACTOR_DATACENTRE = {(8, 0): 16.0, (9, 0): 14.7, (10, 0): 15.0}
# Cores of a streaming multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities"); 128 since 8.6.
_SM_CORES = {(7, 5): 64, (8, 0): 64}
_SM_CORES_SINCE = 128
# Share of the peak rates (at the highest clocks) that programs reach; profiles/README.md gives the
# measurement. GPUs compute at about 0.85 of their reported highest clock.
_SUSTAINED_MEMORY = 0.914
_SUSTAINED_COMPUTE = 0.85
_LAUNCH_SECONDS = 5e-6
# Oldest compute capability that the kernels support: Turing.
LEAST_CAPABILITY = (7, 5)


@dataclass(frozen=True)
class GpuDevice:
    """One GPU; values that its driver does not report are ``None``.

    Attributes:
        index: Its index in the management library (order of the slots).
        name: Name reported by the driver.
        identity: Hash of its UUID.
        vram: Total bytes.
        vram_free: Bytes free now.
        generation: Current PCIe generation; lower while the GPU is idle.
        generation_most: Highest PCIe generation of GPU and slot.
        lanes: Current PCIe lanes.
        lanes_most: Most PCIe lanes of GPU and slot.
        memory_bandwidth: Bytes per second from memory clock and bus width.
        flops: 16-bit operations per second from cores and clock.
        capability: Compute capability.
        sms: Streaming multiprocessors.
    """

    index: int
    name: str
    identity: str
    vram: int
    vram_free: int
    generation: int | None = None
    generation_most: int | None = None
    lanes: int | None = None
    lanes_most: int | None = None
    memory_bandwidth: float | None = None
    flops: float | None = None
    capability: tuple[int, int] | None = None
    sms: int | None = None

    @property
    def unknown(self) -> list[str]:
        """Names of the properties that the driver does not report."""
        missing = []
        if self.generation_most is None and self.generation is None:
            missing.append("PCIe generation")
        if self.lanes is None and self.lanes_most is None:
            missing.append("PCIe lanes")
        if self.memory_bandwidth is None:
            missing.append("memory clock")
        if self.flops is None:
            missing.append("cores and their clock")
        return missing

    def figures(self) -> GpuFigures:
        """The GPU as part of a profile.

        Only its memory is measured; the rest are estimates, by the rules in their sources. Unreported values
        are those of a weak GPU: PCIe 3.0 with 8 lanes, 200 GB/s, 20 TFLOP/s.
        """
        unknown = "the driver does not tell; that of a weak GPU is assumed"
        bandwidth, flops = self.memory_bandwidth, self.flops
        return GpuFigures(
            name=self.name,
            vram=Figure(self.vram, "measured", "NVML"),
            vram_free=Figure(self.vram_free, "measured", "NVML"),
            bandwidth=Figure(200e9, "estimate", unknown)
            if bandwidth is None
            else Figure(
                _SUSTAINED_MEMORY * bandwidth,
                "estimate",
                f"{_SUSTAINED_MEMORY:g} x 2 x memory clock x bus width, as NVML reports them",
            ),
            flops=Figure(20e12, "estimate", unknown)
            if flops is None
            else Figure(
                _SUSTAINED_COMPUTE * flops,
                "estimate",
                f"{_SUSTAINED_COMPUTE:g} x 2 x cores x clock x "
                f"{_tensor_factor(self.name, self.capability):g} for tensor cores, as NVML reports them",
            ),
            launch=Figure(_LAUNCH_SECONDS, "estimate", "starting a kernel from the host"),
            # The highest generation, because idle GPUs reduce the current one.
            pcie_generation=self.generation_most or self.generation or 3,
            pcie_lanes=self.lanes or self.lanes_most or 8,
            capability=self.capability,
            sms=self.sms,
        )


@dataclass(frozen=True)
class GpuReport:
    """The GPUs that may be used.

    Attributes:
        devices: GPUs in the library's order.
        driver: Version of the driver, if there is one.
        why: Why there is no GPU; empty if there is one.
    """

    devices: tuple[GpuDevice, ...] = ()
    driver: str = ""
    why: str = ""

    @property
    def best(self) -> GpuDevice | None:
        """The GPU with the most memory, the first of several."""
        return max(self.devices, key=lambda device: (device.vram, -device.index), default=None)

    def facts(self) -> list[dict[str, Any]]:
        """Properties of each GPU as JSON types."""
        return [
            {
                "name": device.name,
                "vram_bytes": device.vram,
                "vram_free_bytes": device.vram_free,
                "pcie_generation": device.generation,
                "pcie_generation_max": device.generation_most,
                "pcie_lanes": device.lanes,
                "pcie_lanes_max": device.lanes_most,
            }
            for device in self.devices
        ]


def find_gpus(environment: Mapping[str, str] | None = None) -> GpuReport:
    """GPUs of this machine that ``CUDA_VISIBLE_DEVICES`` makes visible to this process.

    Args:
        environment: Environment variables; ``None`` takes those of the process.
    """
    variables = os.environ if environment is None else environment
    try:
        import pynvml
    except ImportError:
        return GpuReport(why="nvidia-ml-py, which detects NVIDIA GPUs, is not installed")
    except Exception as error:  # another package of that name may raise anything
        return GpuReport(why=f"nvidia-ml-py cannot be loaded: {type(error).__name__}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuReport(why=_why_not(pynvml, error))
    try:
        driver = _ask(pynvml, lambda: _text(pynvml.nvmlSystemGetDriverVersion())) or ""
        count = _ask(pynvml, lambda: int(pynvml.nvmlDeviceGetCount())) or 0
        found = [_device(pynvml, index) for index in range(count)]
        devices = [item[0] for item in found if item is not None]
        numbers = {item[0].index: item[1] for item in found if item is not None}
        wanted = variables.get(VISIBLE_VARIABLE)
        visible = devices if wanted is None else _visible(devices, numbers, wanted)
        why = ""
        if not devices:
            why = f"the NVIDIA driver {driver} reports no usable GPU"
        elif not visible:
            why = f"{VISIBLE_VARIABLE}={wanted} leaves none of the {len(devices)} GPUs"
        return GpuReport(tuple(visible), driver, why)
    finally:
        _ask(pynvml, pynvml.nvmlShutdown)


def _why_not(pynvml: Any, error: Exception) -> str:
    def is_a(name: str) -> bool:
        kind = getattr(pynvml, name, None)
        return kind is not None and isinstance(error, kind)

    if is_a("NVMLError_LibraryNotFound"):
        return "no NVIDIA driver is installed"
    if is_a("NVMLError_DriverNotLoaded"):
        return "the NVIDIA driver is not loaded"
    if is_a("NVMLError_NoPermission"):
        return "this user may not access the NVIDIA driver"
    if is_a("NVMLError_LibRmVersionMismatch"):
        return "the NVIDIA driver was replaced while it was loaded; restart the machine"
    return f"the NVIDIA driver does not answer: {error}"


def _device(pynvml: Any, index: int) -> tuple[GpuDevice, str] | None:
    """A GPU and its UUID; ``None`` if it is unusable (lost, or without memory)."""

    def ask(name: str, *arguments: Any) -> Any:
        function = getattr(pynvml, name, None)
        return None if function is None else _ask(pynvml, lambda: function(handle, *arguments))

    handle = _ask(pynvml, lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    memory = None if handle is None else ask("nvmlDeviceGetMemoryInfo")
    if memory is None:
        return None
    name, number = ask("nvmlDeviceGetName"), ask("nvmlDeviceGetUUID")
    unique = _text(number) if number is not None else f"index {index}"
    clock = ask("nvmlDeviceGetMaxClockInfo", getattr(pynvml, "NVML_CLOCK_MEM", 2))
    width = ask("nvmlDeviceGetMemoryBusWidth")
    cores, core_clock = ask("nvmlDeviceGetNumGpuCores"), ask("nvmlDeviceGetMaxClockInfo", 1)
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    capability = None if capability is None else (int(capability[0]), int(capability[1]))
    title = "NVIDIA GPU" if name is None else _text(name)
    flops = None
    if cores and core_clock:
        flops = 2.0 * cores * core_clock * 1e6 * _tensor_factor(title, capability)
    device = GpuDevice(
        index=index,
        name=title,
        identity=hashlib.sha256(unique.encode()).hexdigest()[:16],
        vram=int(memory.total),
        vram_free=int(memory.free),
        generation=_positive(ask("nvmlDeviceGetCurrPcieLinkGeneration")),
        generation_most=_positive(ask("nvmlDeviceGetMaxPcieLinkGeneration")),
        lanes=_positive(ask("nvmlDeviceGetCurrPcieLinkWidth")),
        lanes_most=_positive(ask("nvmlDeviceGetMaxPcieLinkWidth")),
        memory_bandwidth=2.0 * clock * 1e6 * width / 8 if clock and width else None,
        flops=flops,
        capability=capability,
        sms=int(cores) // _SM_CORES.get(capability, _SM_CORES_SINCE) if cores and capability else None,
    )
    return device, unique


def _tensor_factor(name: str, capability: tuple[int, int] | None) -> float:
    if capability in _TENSOR_FACTOR_DATACENTRE:
        return _TENSOR_FACTOR_DATACENTRE[capability]
    if capability == (7, 5):
        return _TENSOR_FACTOR_NONE if "GTX" in name else _TENSOR_FACTOR_TURING
    # Without a name or capability the lower one is assumed.
    workstation = capability is not None and capability >= (8, 6) and "GeForce" not in name
    return _TENSOR_FACTOR_WORKSTATION if workstation and name != "NVIDIA GPU" else _TENSOR_FACTOR_GEFORCE


def _visible(devices: list[GpuDevice], numbers: Mapping[int, str], wanted: str) -> list[GpuDevice]:
    """GPUs visible to CUDA: entries up to the first unknown one; a UUID may be abbreviated."""
    chosen: list[GpuDevice] = []
    for entry in (part.strip() for part in wanted.split(",")):
        matching = [
            device
            for device in devices
            if (entry.isascii() and entry.isdigit() and device.index == int(entry))
            or (entry.startswith("GPU-") and numbers[device.index].startswith(entry))
        ]
        if len(matching) != 1 or matching[0] in chosen:
            break
        chosen += matching
    return chosen


def _ask(pynvml: Any, function: Callable[[], Any]) -> Any:
    """Result of a library call; ``None`` if GPU or driver do not support it."""
    try:
        return function()
    except pynvml.NVMLError:
        return None


def _text(value: Any) -> str:
    # Older releases of the package return bytes.
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return " ".join(text.split())


def _positive(value: Any) -> int | None:
    return int(value) if value else None
