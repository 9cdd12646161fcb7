"""Divides the memories of a machine into the parts that a model takes. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moechat.budget.held_experts import HOST_BYTES, experts_held
from moechat.budget.memory_plan import MEBI, Budget, Part

GIBI = 1 << 30
# RAM that a process without torch's CUDA libraries takes.
PROCESS_BYTES = 384 * MEBI
# RAM that the desktop and its services are assumed to take on another machine.
SYSTEM_BYTES = 2 * GIBI


@dataclass(frozen=True)
class Tier:
    """A memory and the parts that it is spent on.

    Attributes:
        name: ``vram`` or ``ram``.
        budget: Bytes that may be spent.
        given: Whether the user gave the budget; else it is all that is available.
        parts: The parts; experts last.
        beyond: Bytes of experts beyond the budget, in the page cache.
        lent: Bytes of experts in the part of the attention cache that most conversations do not use.
    """

    name: Literal["vram", "ram"]
    budget: int
    given: bool
    parts: tuple[Part, ...]
    beyond: int = 0
    lent: int = 0

    @property
    def used(self) -> int:
        """Sum of the parts."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Far:
    """The place of the experts that do not fit into the tier that computes.

    Attributes:
        kind: ``ram``, ``disk``, or ``ram+disk``: RAM holds a part, the disk all.
        share: Share of all experts that RAM holds; 0 for ``disk``.
        needed: Bytes of RAM that would hold all of them, the process included.
    """

    kind: Literal["ram", "disk", "ram+disk"]
    share: float
    needed: int


def far_in_ram(experts: int, expert_bytes: int, budget: Budget) -> tuple[Tier, Far]:
    """The parts of RAM when a GPU computes: the process, and the experts.

    As in loading, as many experts as fit beside the process are pinned; the others stay in their files.

    Args:
        experts: Experts of all layers.
        expert_bytes: Bytes of one.
        budget: RAM for the whole process.
    """
    held = experts_held(budget.nbytes, experts, expert_bytes)
    parts = (
        Part("process", HOST_BYTES, "estimate"),
        Part("experts, pinned", held * expert_bytes, "counted"),
    )
    kind: Literal["ram", "disk", "ram+disk"] = "ram" if held == experts else "ram+disk" if held else "disk"
    return Tier("ram", budget.nbytes, budget.given, parts), Far(
        kind, held / experts, HOST_BYTES + experts * expert_bytes
    )


def other_budgets(
    budget: int, resident: int, least: int, evaluate: Callable[[int], float | None]
) -> list[tuple[str, int, float | None]]:
    """Speed with less and with more memory: name and bytes of a budget, and the result of ``evaluate``.

    Args:
        budget: Budget of the plan.
        resident: Budget with which all experts fit.
        least: Smallest budget that works.
        evaluate: Returns tokens a second, or ``None`` if the model does not run with a budget.
    """
    step = 2 * GIBI if budget >= 6 * GIBI else max(64 * MEBI, budget // 4 // MEBI * MEBI)
    wanted = [("half", budget // 2)]
    if budget - step > budget // 2:
        wanted.append(("less", budget - step))
    wanted += [
        (name, size)
        for name, size in (("more", budget + step), ("much_more", budget + 2 * step))
        if size < resident
    ]
    if resident > budget:
        wanted.append(("all_experts", resident))
    return [(name, size, evaluate(size) if size >= least else None) for name, size in wanted]
