"""The machine that a plan is for: this one, a reference profile, or one that the user describes in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moechat import _native
from moechat.budget.gpu_sizes import CONTEXT_BYTES
from moechat.budget.held_experts import HOST_BYTES
from moechat.budget.memory_plan import MEBI, Budget, automatic_budget, gpu_budget
from moechat.budget.needs import GpuMemory, HostMemory, Memory
from moechat.config import cuda_graphs_wanted
from moechat.configurator.estimate import Near
from moechat.errors import DoesNotFitError, UsageError
from moechat.hardware.gpu import GpuDevice, find_gpus
from moechat.hardware.known_gpus import gpu_machine
from moechat.hardware.measured_file import load_measured
from moechat.hardware.memory import available_bytes, process_bytes
from moechat.hardware.profile import GpuFigures, HardwareProfile
from moechat.hardware.profile_file import read_profile, reference_profile
from moechat.options import LoadOptions
from moechat.planning.memory import PROCESS_BYTES, SYSTEM_BYTES

# Tolerance: the reported memory of a GPU is a little below or above its nominal size.
_SAME_VRAM = 1.03


@dataclass(frozen=True)
class Machine:
    """The place where a model would run.

    Attributes:
        profile: Its figures; ``None`` if it is this one and nothing was measured yet.
        here: Whether it is this machine.
        near: Tier that computes.
        remarks: Reasons why measurements are not used.
    """

    profile: HardwareProfile | None
    here: bool
    near: Near
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short name."""
        return "this machine" if self.here or self.profile is None else self.profile.name

    @property
    def title(self) -> str:
        """Name for people."""
        return "this machine" if self.profile is None else self.profile.title

    @property
    def figures(self) -> HardwareProfile | None:
        """The profile, if it has the figures that a speed needs."""
        needed = "gpu" if self.near == "gpu" else "file"
        return None if self.profile is None or needed not in self.profile.links else self.profile

    @property
    def gpu(self) -> GpuFigures | None:
        """The GPU that computes; ``None`` where the CPU does."""
        if self.near != "gpu":
            return None
        assert self.profile is not None  # find_machine() has checked both
        assert self.profile.gpu is not None
        return self.profile.gpu

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability of the GPU; ``None`` where it is not known."""
        present = self._present_gpu()
        if present is not None and present.capability is not None:
            return present.capability
        return None if self.gpu is None else self.gpu.capability

    @property
    def context_bytes(self) -> int:
        """Bytes that a CUDA context takes of the GPU's memory: measured, or usual."""
        known = None if self.gpu is None else self.gpu.context
        return CONTEXT_BYTES if known is None else int(known.value)

    def memory(self, options: LoadOptions) -> Memory:
        """The memory that computes, before anything is loaded."""
        if self.near == "gpu":
            graphs = cuda_graphs_wanted() and not options.deterministic
            measured = self.gpu is not None and self.gpu.context is not None
            return GpuMemory(
                self.context_bytes, graphs, not options.deterministic, "measured" if measured else "estimate"
            )
        if self.here or self.profile is None:
            return HostMemory(process_bytes(), options.threads or _native.num_threads())
        return HostMemory(PROCESS_BYTES, options.threads or self.profile.cores, "estimate")

    def ram_budget(self, wanted: int | None, base: int) -> Budget:
        """RAM for the whole process, as ``moechat run`` takes it.

        Args:
            wanted: Bytes that the user gave, or ``None``.
            base: Bytes of the process where it computes in RAM.

        Raises:
            DoesNotFitError: ``wanted`` exceeds the memory of another machine.
        """
        if self.here or self.profile is None:
            return automatic_budget(available_bytes(), process_bytes()) if wanted is None else Budget(wanted)
        ram = int(self.profile.ram.value)
        if wanted is None:
            base = HOST_BYTES if self.near == "gpu" else base
            return automatic_budget(max(0, ram - min(SYSTEM_BYTES, ram // 2) - base), base)
        if wanted > ram:
            raise DoesNotFitError(
                f"{self.title} has {ram // MEBI} MiB of RAM; {wanted // MEBI} MiB are asked for",
                hint="give less with --ram (ram=), or name another machine with --gpu (profile=)",
            )
        return Budget(wanted)

    def vram_budget(self, wanted: int | None) -> tuple[Budget, str]:
        """Graphics memory that may be spent; see :func:`moechat.budget.memory_plan.gpu_budget`.

        Raises:
            DoesNotFitError: ``wanted`` exceeds the memory of the GPU.
        """
        gpu = self.gpu
        assert gpu is not None
        if wanted is not None and wanted > gpu.vram.value * _SAME_VRAM:
            raise DoesNotFitError(
                f"{gpu.name} has {int(gpu.vram.value) // MEBI} MiB of memory; "
                f"{wanted // MEBI} MiB are asked for",
                hint="give less with --vram (vram=), or name another GPU with --gpu (profile=)",
            )
        # The profile has only the memory that was free when it was measured.
        present = self._present_gpu()
        free = int(gpu.vram_free.value) if present is None else present.vram_free
        return gpu_budget(wanted, free - self.context_bytes, self.context_bytes)

    def _present_gpu(self) -> GpuDevice | None:
        return find_gpus().best if self.here and self.near == "gpu" else None


def find_machine(profile: str | Path | HardwareProfile | None, *, gpu: bool | None) -> Machine:
    """The machine of a plan.

    Args:
        profile: Name of a reference profile, a ``.toml`` file of that form, a profile, or ``None`` for this
            machine.
        gpu: Whether a GPU computes; ``None``: the GPU of another machine, if it has one.

    Raises:
        UsageError: There is no such profile, or the machine has no GPU.
    """
    if profile is None:
        remarks: list[str] = []
        if not gpu:
            return Machine(load_measured(remarks.append), True, "ram", tuple(remarks))
        here = gpu_machine(remarks.append)
        if here is None:
            raise UsageError(
                "--vram needs a GPU, and this machine has none that moechat can use",
                hint="--gpu NAME plans for another machine (--list-gpus shows them); without both the plan "
                "is for this one; `moechat doctor` shows why a GPU that is here cannot be used",
            )
        return Machine(here, True, "gpu", tuple(remarks))
    found = profile if isinstance(profile, HardwareProfile) else _described(profile)
    if found.gpu is None and gpu:
        raise UsageError(f"{found.title} has no GPU", hint="plan for it without --vram (vram=)")
    return Machine(found, False, "ram" if found.gpu is None or gpu is False else "gpu")


def _described(profile: str | Path) -> HardwareProfile:
    text = str(profile)
    if text.endswith(".toml") or "/" in text:
        return read_profile(Path(text).expanduser())
    return reference_profile(text.lower())
