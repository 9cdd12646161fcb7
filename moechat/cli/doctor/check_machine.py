"""Sections of ``moechat doctor`` on the machine and the installation."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path

import moechat
from moechat.cli.doctor.findings import Look, Report
from moechat.cli.terminal.load_progress import format_bytes

_PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "huggingface-hub",
    "gguf",
    "numpy",
    "safetensors",
    "tokenizers",
    "rich",
)
_GIB = 1 << 30
# About the size of the smallest known models in 4 bits.
_LITTLE_MEMORY = 6 * _GIB


def _installation(report: Report, rows: dict[str, str]) -> None:
    rows["moechat"] = f"{moechat.__version__}, {Path(moechat.__file__).parent}"
    rows["python"] = f"{platform.python_version()}, {sys.executable}"
    rows["system"] = f"{platform.platform()}, {platform.machine()}"
    for name in _PACKAGES:
        rows[name] = _version(name) or "not installed"
    from moechat import _native

    rows["native core"] = f"block format {_native.BLOCK_FORMAT_VERSION}"


def _processor(report: Report, rows: dict[str, str]) -> None:
    from moechat import _native
    from moechat.config import active_isa
    from moechat.hardware.identity import cpu_model

    available = _native.available_isas()
    rows["model"] = cpu_model()
    rows["physical cores"] = f"{_native.available_cores()} may be used"
    rows["kernels"] = f"can run {', '.join(available)}"
    isa = active_isa()
    rows["in use"] = isa
    if isa != available[-1]:
        report.advice(f"MOECHAT_ISA chooses {isa} although {available[-1]} works here", "unset MOECHAT_ISA")
    if available == ["portable"]:
        report.advice(
            "this processor has none of the instruction sets that the kernels are written for",
            "answers will be slow; a processor with AVX2 has been usual since 2015",
        )


def _memory(report: Report, rows: dict[str, str]) -> None:
    import psutil

    from moechat.hardware.measure import huge_pages
    from moechat.hardware.memory import available_bytes, total_bytes

    available = available_bytes()
    rows["in all"] = format_bytes(total_bytes())
    rows["available"] = format_bytes(available)
    rows["swap in use"] = format_bytes(psutil.swap_memory().used)
    setting = huge_pages()
    rows["huge pages"] = setting or "unknown"
    if available < _LITTLE_MEMORY:
        report.advice(
            f"{format_bytes(available)} of memory are available",
            "end other programs; experts that do not fit are read from disk, which is slower",
        )
    if setting == "never":
        report.advice(
            "transparent huge pages are switched off, which costs the kernels up to a tenth",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _gpu(report: Report, rows: dict[str, str]) -> None:
    from moechat.hardware.gpu import LEAST_CAPABILITY, find_gpus
    from moechat.hardware.memory import total_bytes
    from moechat.hardware.wsl import MORE_PINNED, PINNED_SHARE, in_wsl2

    found = find_gpus()
    if not found.devices:
        rows["GPUs"] = f"none: {found.why}"
        return
    rows["driver"] = found.driver or "unknown"
    if in_wsl2():
        most = format_bytes(int(PINNED_SHARE * total_bytes()))
        report.advice(
            f"this is WSL2, where about {most} of memory can be pinned for a GPU; experts beyond that are "
            "copied more slowly",
            f"for larger models {MORE_PINNED}",
        )
    for device in found.devices:
        capability = device.capability
        rows[f"GPU {device.index}"] = (
            f"{device.name}, {format_bytes(device.vram_free)} of {format_bytes(device.vram)} free, "
            f"compute capability {'unknown' if capability is None else '.'.join(map(str, capability))}"
        )
        if capability is not None and capability < LEAST_CAPABILITY:
            report.advice(
                f"{device.name} has compute capability {capability[0]}.{capability[1]}",
                "the kernels need 7.5 (Turing) or newer: models run on the CPU",
            )
        if device.lanes and device.lanes_most and device.lanes < device.lanes_most:
            report.advice(
                f"{device.name} runs with {device.lanes} of {device.lanes_most} PCIe lanes",
                "if that does not change under load, another slot makes copies faster",
            )
    import torch

    if torch.version.cuda is None:
        report.problem(
            f"there is a GPU, but torch {torch.__version__} was built without CUDA",
            "install a build of torch with CUDA, see pytorch.org; until then models run on the CPU",
        )
        return
    rows["torch"] = f"for CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        report.problem(
            "torch finds no GPU that it can use", "python -c 'import torch; torch.cuda.init()' says why"
        )
    if _version("triton") is None:
        report.problem("Triton, which builds the kernels of a GPU, is not installed", "pip install triton")
    elif not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
        report.problem(
            "Triton finds no C compiler", "install gcc and Python's headers (python3-dev), or set CC"
        )


def _version(package: str) -> str | None:
    """Version of an installed package; ``None`` if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


MACHINE: dict[str, Look] = {
    "moechat": _installation,
    "processor": _processor,
    "memory": _memory,
    "GPU": _gpu,
}
