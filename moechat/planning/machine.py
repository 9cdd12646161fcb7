"""The machine that a plan is for: this one, a reference profile, or one written down by the user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moechat.configurator.estimate import Near
from moechat.errors import DoesNotFitError, UsageError
from moechat.hardware.gpu import find_gpus
from moechat.hardware.measured_file import load_measured
from moechat.hardware.memory import available_bytes, resident_bytes
from moechat.hardware.profile import HardwareProfile
from moechat.hardware.profile_file import read_profile, reference_profile
from moechat.offload.budget import MEBI, automatic_budget
from moechat.planning.memory import HOST_BYTES, PROCESS_BYTES, SYSTEM_BYTES, Part

# A card states a little less, or a little more, than its name says.
_SAME_VRAM = 1.03


@dataclass(frozen=True)
class Machine:
    """Where a model would run.

    Attributes:
        profile: Its figures; ``None`` if it is this one and nothing was measured yet.
        here: It is this one.
        near: Tier that computes.
        remarks: Why what was measured is not used, if it is not.
    """

    profile: HardwareProfile | None
    here: bool
    near: Near
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short."""
        return "this machine" if self.here or self.profile is None else self.profile.name

    @property
    def title(self) -> str:
        """For people."""
        return "this machine" if self.profile is None else self.profile.title

    @property
    def figures(self) -> HardwareProfile | None:
        """The profile, if it has what a speed needs."""
        needed = "gpu" if self.near == "gpu" else "file"
        return None if self.profile is None or needed not in self.profile.links else self.profile

    @property
    def vram(self) -> int | None:
        """Bytes of the graphics card that computes; ``None`` where none does."""
        if self.near != "gpu":
            return None
        assert self.profile is not None  # find_machine() has looked
        assert self.profile.gpu is not None
        return int(self.profile.gpu.vram.value)

    @property
    def process(self) -> Part:
        """What the process itself takes of RAM where it computes in RAM."""
        if self.here:
            return Part("process", resident_bytes(), "measured")
        return Part("process", PROCESS_BYTES, "estimate")

    def ram_budget(self, wanted: int | None) -> int:
        """RAM that the process may take: what was wanted, else by the rule of ``moechat run``.

        Raises:
            DoesNotFitError: More is wanted than a machine that is not at hand has.
        """
        if wanted is not None:
            if not self.here and self.profile is not None and wanted > self.profile.ram.value:
                raise DoesNotFitError(
                    f"{self.title} has {int(self.profile.ram.value) // MEBI} MiB of RAM; "
                    f"{wanted // MEBI} MiB are asked for",
                    hint="give less with --ram (ram=), or name another machine with --gpu (profile=)",
                )
            return wanted
        base = HOST_BYTES if self.near == "gpu" else self.process.nbytes
        if self.here or self.profile is None:
            return automatic_budget(available_bytes(), resident_bytes())
        available = int(self.profile.ram.value) - min(SYSTEM_BYTES, int(self.profile.ram.value) // 2)
        return automatic_budget(max(0, available - base), base)

    def vram_budget(self, wanted: int | None) -> int:
        """Graphics memory that may be taken: what was wanted, else what is free.

        Raises:
            DoesNotFitError: More is wanted than the card has.
        """
        assert self.profile is not None
        gpu = self.profile.gpu
        assert gpu is not None
        if wanted is None:
            # The profile says what was free when it was measured.
            present = find_gpus().best if self.here else None
            return int(gpu.vram_free.value) if present is None else present.vram_free
        if wanted > gpu.vram.value * _SAME_VRAM:
            raise DoesNotFitError(
                f"{gpu.name} has {int(gpu.vram.value) // MEBI} MiB of memory; "
                f"{wanted // MEBI} MiB are asked for",
                hint="give less with --vram (vram=), or name another card with --gpu (profile=)",
            )
        return min(wanted, int(gpu.vram.value))


def find_machine(profile: str | Path | HardwareProfile | None, *, vram: bool) -> Machine:
    """The machine of a plan.

    Args:
        profile: Name of a reference profile, a ``.toml`` file of that form, a profile, or ``None`` for this
            machine.
        vram: Graphics memory is asked for.

    Raises:
        UsageError: There is no such profile, or the machine has no graphics card.
    """
    if profile is None:
        remarks: list[str] = []
        measured = load_measured(remarks.append)
        if not vram:
            return Machine(measured, True, "ram", tuple(remarks))
        if measured is None:
            raise UsageError(
                "--vram needs a graphics card, and this machine has not been measured yet",
                hint="`moechat profile` measures it; --gpu NAME plans for another one "
                "(--list-gpus shows them)",
            )
        if measured.gpu is None:
            raise UsageError(
                "--vram needs a graphics card, and this machine has none that moechat can use",
                hint="--gpu NAME plans for another machine (--list-gpus shows them); "
                "without both the plan is for this one",
            )
        return Machine(measured, True, "gpu")
    found = profile if isinstance(profile, HardwareProfile) else _written(profile)
    if found.gpu is None and vram:
        raise UsageError(f"{found.title} has no graphics card", hint="plan for it without --vram (vram=)")
    return Machine(found, False, "gpu" if found.gpu is not None else "ram")


def _written(profile: str | Path) -> HardwareProfile:
    text = str(profile)
    if text.endswith(".toml") or "/" in text:
        return read_profile(Path(text).expanduser())
    return reference_profile(text.lower())
