"""Words for people in a plan: the bottleneck and the notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moechat.budget.memory_plan import MEBI
from moechat.configurator.systems import CacheSettings
from moechat.hardware.memory import total_bytes
from moechat.hardware.profile import Figure, Origin
from moechat.hardware.wsl import MORE_PINNED, PINNED_SHARE, in_wsl2
from moechat.planning.machine import Machine
from moechat.planning.memory import Far
from moechat.planning.speed import Decode

_MISSES = {
    "fetch": "moved from RAM",
    "compute": "computed in RAM by the CPU",
    "seldom": "computed in RAM by the CPU, and seldom moved",
    "stay": "computed in RAM by the CPU, and hardly ever moved",
    "cpu": "computed in RAM by the CPU, and never moved",
    "both": "moved from RAM or computed there by the CPU",
}

_KINDS: Mapping[Origin, str] = {
    "measured": "measured",
    "published": "published",
    "datasheet": "published",
    "estimate": "assumed",
}
_BOTH = "moved from RAM and the disk"
_GPU_IS_NEW = "running on a GPU is new, and no speed of it has been measured yet"
_ASSUMED_COSTS = "C and θ rest on assumed costs"
_ASSUMED = "assumed, not measured: "
UNMEASURED = "this machine has not been measured, so no speed is given: `moechat profile` measures it"
NO_DISK_SPEED = (
    "the speed of the disk could not be measured, so none is given here: `moechat profile` gives the reason"
)


def bottleneck(decode: Decode, far: Far | None, settings: CacheSettings) -> str:
    """The largest part of a token's time, with its share."""
    waiting = "missing experts"
    if far is not None:
        where = {"ram": _MISSES[settings.miss], "disk": "read from the disk", "ram+disk": _BOTH}
        waiting += ", " + where[far.kind]
    parts = {
        waiting: decode.waiting,
        "experts that are near": decode.experts,
        "attention and the other dense weights": decode.dense,
        "the head": decode.head,
    }
    name = max(parts, key=lambda key: parts[key])
    return f"{name}: {100 * parts[name] / decode.seconds:.0f} % of a token's time"


def by_origin(figures: Mapping[str, Figure]) -> dict[str, list[str]]:
    """Names of figures: ``measured`` on the machine, ``published`` by maker or others, or ``assumed``: by a
    rule or from another machine.
    """
    found: dict[str, list[str]] = {"measured": [], "published": [], "assumed": []}
    for name, figure in figures.items():
        found[_KINDS[figure.origin]].append(name)
    return found


def assumed_note(machine: Machine, figures: Mapping[str, Figure]) -> str:
    """What of a plan on a GPU is assumed, and how to measure it; empty if nothing is, or nothing can be."""
    kinds = by_origin(figures)
    if machine.near != "gpu" or not machine.here or not figures or len(kinds["measured"]) == len(figures):
        return ""
    names = [name.partition(",")[0] for name in (*kinds["assumed"], *kinds["published"])]
    shown = ", ".join(dict.fromkeys(names))
    return f"{_ASSUMED}{shown}; `moechat profile --refresh` measures this GPU"


def is_detail(note: str) -> bool:
    """Whether a note is about how a plan was made, not about the model or the memory."""
    return note in (UNMEASURED, NO_DISK_SPEED, _GPU_IS_NEW) or note.startswith((_ASSUMED_COSTS, _ASSUMED))


def notes(
    machine: Machine,
    far: Far | None,
    ram: int | None,
    remarks: Iterable[str],
    figures: Mapping[str, Figure],
    *,
    pinned: int,
) -> tuple[str, ...]:
    """Remarks for the user.

    Args:
        machine: The machine.
        far: Place of the experts that are not near.
        ram: Bytes of RAM that the user gave.
        remarks: Remarks on the model; empty ones are dropped.
        figures: Figures that the speed rests on.
        pinned: Bytes of experts that are to be pinned for a GPU.
    """
    assumed = assumed_note(machine, figures)
    sentences = [remark for remark in (*remarks, *machine.remarks, assumed) if remark]
    profile = machine.profile
    if machine.here and ram is not None and ram > total_bytes():
        sentences.append(f"this machine has {total_bytes() // MEBI} MiB of RAM; {ram // MEBI} MiB were given")
    if machine.near == "gpu":
        sentences.append(_GPU_IS_NEW)
    if far is not None and far.kind == "ram+disk":
        sentences.append(
            f"RAM holds {100 * far.share:.0f} % of the experts; the others are read from the disk first"
        )
    most = int(PINNED_SHARE * total_bytes())
    if machine.here and pinned > most and in_wsl2():
        sentences.append(
            f"WSL2 pins about {most // MEBI} MiB of the {pinned // MEBI} MiB of experts in RAM; the rest is "
            f"copied more slowly: {MORE_PINNED}"
        )
    if profile is None:
        sentences.append(UNMEASURED)
    elif machine.figures is None:
        sentences.append(NO_DISK_SPEED)
    if machine.figures is None and far is not None:
        sentences.append(f"{_ASSUMED_COSTS} of link, memory and experts, not on figures of {machine.title}")
    if machine.here and machine.near == "ram" and profile is not None and profile.gpu is not None:
        sentences.append(f"--vram plans for the {profile.gpu.name} of this machine")
    return tuple(sentences)
