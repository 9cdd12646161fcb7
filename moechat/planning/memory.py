"""Where everything lies: VRAM, RAM and what has to stay on the disk. Numbers in, numbers or a refusal out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moechat.errors import DoesNotFitError
from moechat.offload.budget import MEBI, MemoryPlan, Needs, least_budget, plan_memory

GIBI = 1 << 30
# The driver's context, the kernels that torch and the libraries load into it, and the libraries' own
# workspaces. 300 to 500 MiB are usual with recent drivers.
CUDA_BYTES = 448 * MEBI
# A process with torch's CUDA libraries: what it keeps of them in RAM.
HOST_BYTES = 1280 * MEBI
# The same without: README, "Memory".
PROCESS_BYTES = 384 * MEBI
# What a desktop and its services leave to nobody on a machine that is not at hand.
SYSTEM_BYTES = 2 * GIBI

Basis = Literal["counted", "measured", "estimate"]


@dataclass(frozen=True)
class Part:
    """One use of a tier.

    Attributes:
        name: For people, and the key for programs.
        nbytes: What it takes.
        basis: ``counted`` on the model, ``measured`` on this machine, or ``estimate``.
    """

    name: str
    nbytes: int
    basis: Basis


@dataclass(frozen=True)
class Tier:
    """A memory and what it is spent on.

    Attributes:
        name: ``vram`` or ``ram``.
        budget: Bytes that may be spent.
        given: Whether the user said so; else it is what there is.
        parts: What it is spent on; experts last.
    """

    name: Literal["vram", "ram"]
    budget: int
    given: bool
    parts: tuple[Part, ...]

    @property
    def used(self) -> int:
        """Sum of the parts."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Far:
    """Where experts lie that are not near.

    Attributes:
        kind: ``ram``, ``disk``, or ``ram+disk``: RAM holds a part, the disk all.
        share: Of all experts that RAM holds; 0 for ``disk``.
        needed: Bytes of RAM that would hold all of them, the process included.
    """

    kind: Literal["ram", "disk", "ram+disk"]
    share: float
    needed: int


def near_tier(plan: MemoryPlan, name: Literal["vram", "ram"], base: Part) -> Tier:
    """The tier that computes, part by part."""
    parts = [
        base,
        Part("dense weights", plan.dense, "counted"),
        Part("attention cache", plan.kv, "counted"),
        Part("workspace", plan.workspace + plan.scratch, "estimate"),
        Part("margin", plan.margin, "estimate"),
        Part("experts", plan.expert_bytes, "counted"),
    ]
    return Tier(name, plan.budget, plan.given, tuple(parts))


def far_in_ram(experts: int, budget: int, given: bool) -> tuple[Tier, Far]:
    """RAM behind a graphics card: the process, and as many of the experts as fit.

    Args:
        experts: Bytes of all experts.
        budget: Bytes of RAM that may be spent.
        given: Whether the user said so.

    Raises:
        DoesNotFitError: Not even the process fits.
    """
    if budget < HOST_BYTES + 64 * MEBI:
        least = HOST_BYTES + 64 * MEBI
        raise DoesNotFitError(
            f"the memory budget is {budget // MEBI} MiB; the least that works is {least // MEBI} MiB: "
            f"process {HOST_BYTES // MEBI}, experts on their way {64} (all in MiB)",
            hint=f"give at least {least // MEBI}M with --ram (ram=)",
            least_bytes=least,
        )
    held = min(experts, budget - HOST_BYTES)
    parts = (Part("process", HOST_BYTES, "estimate"), Part("experts, pinned", held, "counted"))
    share = held / experts
    far = Far("ram" if held == experts else "ram+disk", share, HOST_BYTES + experts)
    return Tier("ram", budget, given, parts), far


def plan_vram(needs: Needs, budget: int, card: int, *, given: bool, ctx: int | None) -> MemoryPlan:
    """Divide a graphics card's memory by the rules of :func:`moechat.offload.budget.plan_memory`.

    Args:
        needs: What the model takes.
        budget: Bytes that may be spent.
        card: Bytes that the card has.
        given: Whether the user gave the budget.
        ctx: Context wanted, or ``None``.

    Raises:
        DoesNotFitError: It is too small; the message has every part and the least that works.
    """
    try:
        return plan_memory(needs, budget, given=given, ctx=ctx)
    except DoesNotFitError:
        least = least_budget(needs, ctx)
    context = min(needs.own_context, 4096) if ctx is None else ctx
    parts = {
        "CUDA context": needs.base,
        "dense weights": needs.dense,
        "attention cache": needs.kv(context),
        "workspace": needs.workspace(context) + needs.scratch,
        "experts": needs.min_pages * needs.page_bytes,
    }
    parts["margin"] = max(0, least - sum(parts.values()))
    listed = ", ".join(f"{name} {-(-size // MEBI)}" for name, size in parts.items())
    if least <= card:
        hints = [f"give at least {least // MEBI}M with --vram (vram=)"]
    else:
        hints = ["name a card with more memory with --gpu (profile=)"]
    if context > 256:
        hints.append(f"or a context shorter than {context} tokens with --ctx (ctx=)")
    raise DoesNotFitError(
        f"the graphics memory is {budget // MEBI} MiB; the least that works is {least // MEBI} MiB: "
        f"{listed} (all in MiB, for {context} tokens of context)",
        hint=" ".join(hints),
        least_bytes=least,
    )


def other_budgets(
    budget: int, resident: int, least: int, evaluate: Callable[[int], float | None]
) -> list[tuple[str, int, float | None]]:
    """What less and more memory would give: a name, bytes, and what ``evaluate`` makes of them.

    Args:
        budget: Of the plan.
        resident: With which all experts would be near.
        least: Below which nothing works.
        evaluate: Tokens a second, or ``None`` where it does not work.
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
