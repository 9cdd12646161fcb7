"""Divides the memories of a machine for a model: budgets of tiers, and the place of the other experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moechat.options import LoadOptions
from moechat.planning.cases import Case, Cases
from moechat.planning.memory import Far, Tier, far_in_ram


@dataclass(frozen=True)
class Placed:
    """A model in the memories of a machine.

    Attributes:
        case: The outcome of the budget of the tier that computes.
        tiers: Memories and their parts, the near one first.
        far: Place of the experts that are not near; ``None`` if all are.
        ram_share: Share of all experts that RAM holds behind a GPU.
        pinned: Bytes of experts that are to be pinned for a GPU.
        short: Why the budget is smaller than the one that was given; empty if it is not.
    """

    case: Case
    tiers: tuple[Tier, ...]
    far: Far | None
    ram_share: float
    pinned: int
    short: str


def place(cases: Cases, options: LoadOptions, *, brief: bool = False) -> Placed:
    """Place a model in the memories that the options give, or that the machine has.

    Args:
        cases: The model on the machine.
        options: For loading it.
        brief: Take the usual strategy where the settings leave a choice, not the fastest.

    Raises:
        DoesNotFitError: They are too small.
    """
    machine, shape = cases.machine, cases.shape
    near: Literal["vram", "ram"] = "vram" if machine.near == "gpu" else "ram"
    budget, short = machine.ram_budget(options.ram, cases.needs.base), ""
    behind: tuple[Tier, Far] | None = None
    if near == "vram":
        behind = far_in_ram(shape.layers * shape.experts, shape.expert_bytes, budget)
        budget, short = machine.vram_budget(options.vram)
    ram_share = 0.0 if behind is None else behind[1].share
    strategy = cases.usual_strategy if brief else None
    case = cases.case(budget, ctx=cases.ctx, ram_share=ram_share, strategy=strategy)
    memory = case.memory
    tiers = [
        Tier(
            near,
            memory.budget,
            memory.given,
            memory.parts,
            beyond=memory.beyond_bytes,
            lent=memory.lent_bytes,
        )
    ]
    far: Far | None = None
    pinned = 0
    if behind is not None and not memory.mapped:
        tiers.append(behind[0])
        far, pinned = behind[1], behind[0].parts[-1].nbytes
    elif not memory.mapped:
        far = Far("disk", 0.0, memory.total - memory.expert_bytes + shape.all_expert_bytes)
    return Placed(case, tuple(tiers), far, ram_share, pinned, short)
