"""Measures this machine: the file link, the CPU's expert kernels, memory, link and kernels together, the GPU.

The whole takes some seconds. Parts that cannot be measured are left out of the profile, with the reason in
:attr:`Measurement.missing`; only missing memory for the kernels is an error.
"""

from __future__ import annotations

import mmap
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

import moechat
from moechat import _native
from moechat.config import user_paths
from moechat.errors import DoesNotFitError, MoechatError
from moechat.hardware.card import Card
from moechat.hardware.card_rounds import CardRounds
from moechat.hardware.disk_speed import ReadableDisk, readable_disk
from moechat.hardware.gpu import GpuDevice, GpuReport, find_gpus
from moechat.hardware.identity import Identity, disk_of, this_machine
from moechat.hardware.kernel_sweep import ROUNDS, KernelSweep
from moechat.hardware.known_gpus import gpu_figures
from moechat.hardware.measure_budget import LARGE_BYTES, Budget, format_size
from moechat.hardware.measure_cpu import (
    ExpertMemory,
    last_cache_bytes,
)
from moechat.hardware.measure_gpu import measure_gpu
from moechat.hardware.measure_gpu_link import measure_gpu_link
from moechat.hardware.measured_file import Measurement, save_measurement
from moechat.hardware.memory import available_bytes
from moechat.hardware.profile import Figure, GpuFigures, HardwareProfile, LinkFigures

Report = Callable[[str], None]

_LEAST_MEMORY = 64 << 20
_MOST_MEMORY = 1 << 30
_USUAL_MEMORY = 256 << 20
_MUCH_OF_OTHERS = 0.1
_IN_MEMORY = ("tmpfs", "ramfs")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


# Opens a GPU for measuring. Raises MoechatError if it cannot be used.
OpenCard = Callable[[GpuDevice], Card]


def measure_machine(
    report: Report = lambda _: None, *, budget: Budget | None = None, open_card: OpenCard | None = None
) -> HardwareProfile:
    """Measure this machine and store the profile for :func:`load_measured`.

    Args:
        report: Called with a short description of each step, and if the profile cannot be stored.
        budget: Limits, for tests.
        open_card: Opens the GPU; ``None``: it is not measured. It is
            :func:`moechat.offload.cuda_card.open_card`, which this room may not import.

    Raises:
        DoesNotFitError: There is too little memory for the measurement.
        UsageError: ``MOECHAT_HOME`` names something that is not a directory.
    """
    measurement = measure(report, budget=budget, open_card=open_card)
    try:
        save_measurement(measurement)
    except MoechatError as problem:
        report(f"the profile was not saved: {problem}")
    return measurement.profile


def measure(
    report: Report = lambda _: None, *, budget: Budget | None = None, open_card: OpenCard | None = None
) -> Measurement:
    """As :func:`measure_machine`, but return the whole measurement without storing it."""
    return _Measuring(report, budget or Budget(), open_card).run()


@dataclass
class _Measuring:
    report: Report
    budget: Budget
    open_card: OpenCard | None = None
    missing: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Measurement:
        started = time.perf_counter()
        gpus = find_gpus()
        identity = this_machine(gpus)
        memory = self._memory()
        others = _Others()
        with ExitStack() as stack:
            disk, figures = self._disk(stack)
            cpu = self._cpu(memory, disk, identity.cores)
        assert cpu.stream is not None
        if figures is not None:
            figures = _settled(replace(figures, together=cpu.link_together))
        links = {} if figures is None else {"file": replace(figures, experts=dict(cpu.together))}
        gpu, gpu_link = self._gpu(gpus, memory, identity.cores)
        if gpu_link is not None:
            links["gpu"] = gpu_link
            for bits, rate in gpu_link.experts.items():
                cpu.raise_alone(bits, rate, "as much as while the link to the GPU is busy")
        self._note_others(others.share())
        self._note_facts(gpus, identity)
        seconds = time.perf_counter() - started
        profile = HardwareProfile(
            name=f"machine-{identity.key[:8]}",
            title=_title(identity, gpus),
            cpu=identity.cpu,
            cores=identity.cores,
            isa=identity.isa,
            ram=_measured(psutil.virtual_memory().total, "as the system reports it"),
            ram_bandwidth=cpu.stream,
            expert_rate=cpu.rate,
            # Beside the link into the tier that computes: the GPU, where there is one.
            expert_rate_together=gpu_link.experts if gpu_link and gpu_link.experts else cpu.together,
            expert_flops=cpu.operations,
            links=links,
            gpu=gpu,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            key=identity.key,
        )
        return Measurement(profile, self.missing, tuple(self.remarks), self.facts, round(seconds, 2))

    # ---- the disk

    def _disk(self, stack: ExitStack) -> tuple[ReadableDisk | None, LinkFigures | None]:
        library = user_paths().models
        try:
            disk = stack.enter_context(readable_disk(library, self.budget, self.report))
            figures = disk.figures(self.budget, self.report)
        except OSError as problem:
            self.missing["link file"] = f"{problem.strerror or problem}: {problem.filename or 'scratch file'}"
            return None, None
        except MoechatError as problem:
            self.missing["link file"] = str(problem)
            return None, None
        self.facts |= {
            "disk_read": "stores" if disk.stores else "scratch file",
            "disk_read_bytes": disk.nbytes,
            "direct_reads": disk.direct,
        }
        file_system = disk_of(library).file_system
        if file_system in _IN_MEMORY:
            self.remarks.append(f"The model library is in memory ({file_system}), not on a disk.")
        elif not disk.direct:
            self.remarks.append(
                f"{file_system or 'The file system'} refuses direct reads; the disk was read "
                "through the page cache, emptied before."
            )
        return disk, figures

    # ---- the CPU

    def _memory(self) -> ExpertMemory:
        cache = last_cache_bytes()
        wanted = self.budget.memory_bytes or max(_USUAL_MEMORY, min(_MOST_MEMORY, 2 * cache))
        free = available_bytes()
        nbytes = min(wanted, free // 4) // 4096 * 4096
        if nbytes < min(_LEAST_MEMORY, wanted):
            raise DoesNotFitError(
                f"measuring takes {format_size(4 * _LEAST_MEMORY)} of memory; "
                f"{format_size(free)} are available",
                hint="close other programs, or raise the memory limit of this process",
            )
        if nbytes < 2 * cache:
            self.remarks.append(
                f"The kernels were measured in {format_size(nbytes)}; the largest cache has "
                f"{format_size(cache)}, so that some of their speed may be that of the cache."
            )
        self.facts |= {"last_cache_bytes": cache, "kernel_memory_bytes": nbytes}
        self.report(f"memory: taking {format_size(nbytes)}")
        try:
            return ExpertMemory(nbytes)
        except MemoryError as problem:
            raise DoesNotFitError(str(problem), hint="raise the memory limit of this process") from problem

    def _cpu(self, memory: ExpertMemory, disk: ReadableDisk | None, cores: int) -> KernelSweep:
        budget = self.budget
        sweep = KernelSweep(memory, cores, self.report)

        def busy(seed: int) -> float:
            assert disk is not None
            return disk.stream(LARGE_BYTES, budget.together_seconds / ROUNDS, seed).rate

        for _ in range(ROUNDS):
            sweep.read_memory(budget.stream_seconds / ROUNDS)
            sweep.run(
                budget.bits,
                compute_seconds=budget.compute_seconds / ROUNDS,
                many_seconds=budget.many_seconds / ROUNDS,
                link=None if disk is None else busy,
            )
        sweep.settle()
        if sweep.failure:
            self.missing["together"] = sweep.failure
        return sweep

    # ---- the GPU

    def _gpu(
        self, gpus: GpuReport, memory: ExpertMemory, cores: int
    ) -> tuple[GpuFigures | None, LinkFigures | None]:
        device = gpus.best
        if device is None:
            self.missing["gpu"] = gpus.why
            return None, None
        if device.unknown:
            self.remarks.append(f"The driver does not tell of {device.name}: {', '.join(device.unknown)}.")
        assumed = gpu_figures(device)
        if self.open_card is None:
            self.missing["link gpu"] = "`moechat profile` measures it"
            return assumed, None
        self.report("GPU: starting it")
        try:
            card = self.open_card(device)
        except Exception as problem:  # torch may fail to load, in many ways
            self.missing["link gpu"] = str(problem) or type(problem).__name__
            return assumed, None
        rounds = CardRounds(card, self.budget, self.report)
        link = measure_gpu_link(rounds, memory, cores)
        figures = measure_gpu(rounds, assumed)
        self.missing |= rounds.missing
        self.remarks += rounds.remarks
        return figures, link

    # ---- remarks and facts

    def _note_others(self, share: float) -> None:
        self.facts["others_share"] = round(share, 3)
        if share > _MUCH_OF_OTHERS:
            self.remarks.append(
                f"Meanwhile other programs took {share:.0%} of the processors, so the figures are too low, "
                "and plans that use them too slow: end those programs, then run `moechat profile --refresh`."
            )

    def _note_facts(self, gpus: GpuReport, identity: Identity) -> None:
        self.facts |= {
            "moechat": moechat.__version__,
            "block_format": identity.block_format,
            "linux": platform.release(),
            "python": platform.python_version(),
            "cpus": psutil.cpu_count() or 0,
            "instruction_sets": [name for name, present in _native.cpu_features().items() if present],
            "kernels": _native.available_isas(),
            "page_bytes": mmap.PAGESIZE,
            "huge_pages": huge_pages(),
            "memory_available_bytes": available_bytes(),
            "disk": {
                "file_system": identity.disk.file_system,
                "device": identity.disk.device,
                "bytes": identity.disk.nbytes,
            },
            "gpu_driver": gpus.driver,
            "gpus": gpus.facts(),
        }


class _Others:
    """CPU use of other programs, and of other guests of the same host, since the object was created."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        # User time includes guests.
        idle = times.idle + getattr(times, "iowait", 0.0)
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return whole, whole - idle, time.process_time()

    def share(self) -> float:
        """Share of the time of all processors, 0 to 1."""
        whole, busy, own = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return min(1.0, max(0.0, (busy - own) / whole)) if whole > 0 else 0.0


def _settled(link: LinkFigures) -> LinkFigures:
    """Raise the bandwidth measured alone to that under load, if lower; see :meth:`KernelSweep.settle`."""
    together = link.together
    if together is None or link.bandwidth[LARGE_BYTES].value >= together.value:
        return link
    alone = _measured(together.value, "as much as while kernels run")
    return replace(link, bandwidth={**link.bandwidth, LARGE_BYTES: alone})


def huge_pages(file: Path = _HUGE_PAGES) -> str:
    """Setting of transparent huge pages: ``always``, ``madvise`` or ``never``; empty if unknown."""
    try:
        return file.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except (OSError, ValueError):
        return ""


def _title(identity: Identity, gpus: GpuReport) -> str:
    cores = f"{identity.cores} core{'s' if identity.cores > 1 else ''}"
    parts = [identity.cpu, cores, f"{identity.ram / (1 << 30):.0f} GiB of memory"]
    if gpus.best is not None:
        parts.append(f"{gpus.best.name} with {gpus.best.vram / (1 << 30):.0f} GiB")
    return ", ".join(parts)


def _measured(value: float, how: str) -> Figure:
    return Figure(float(value), "measured", how)
