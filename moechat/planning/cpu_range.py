"""The range of a plan's speed where the rate of the CPU's experts is an estimate with a range.

Rates of a reference machine are derived, not measured, and the plan rests on them twice: in the time of a
token, and in the choice of C and θ. So the plan is made again at both ends of the range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moechat.configurator.estimate import expert_rate
from moechat.hardware.profile import End, Figure
from moechat.planning.cases import Case, Cases
from moechat.planning.memory import Far
from moechat.planning.words import bottleneck
from moechat.simulate.shared_draws import in_threads


@dataclass(frozen=True)
class CpuEnd:
    """One end of the range.

    Attributes:
        bytes_per_s: Bytes of expert blocks that the CPU computes a second.
        tokens_per_s: Speed of the plan made for that rate.
        same_plan_tokens_per_s: Speed there with the targets and the strategy of the plan as it is.
        changed_layers: Layers for which the plan made for that rate has other targets.
        bottleneck: Largest part of a token's time there, for people.
        strategy: Strategy that ``auto`` chooses there, for people; empty where nothing is chosen.
    """

    bytes_per_s: float
    tokens_per_s: float
    same_plan_tokens_per_s: float
    changed_layers: int
    bottleneck: str
    strategy: str


@dataclass(frozen=True)
class CpuRange:
    """The rate of the CPU's experts, and its range.

    Attributes:
        bytes_per_s: The rate that the plan rests on.
        low: With the lowest rate.
        high: With the highest.
    """

    bytes_per_s: float
    low: CpuEnd
    high: CpuEnd

    @property
    def same_plan_rates(self) -> tuple[float, float]:
        """Tokens a second at both ends with the targets and the strategy of the plan as it is."""
        return self.low.same_plan_tokens_per_s, self.high.same_plan_tokens_per_s


def cpu_range(cases: Cases, case: Case, far: Far | None, ram_share: float) -> CpuRange | None:
    """The speed at both ends of the range of the CPU's experts.

    Args:
        cases: The model on the machine.
        case: The outcome of the plan's budget.
        far: Place of the experts that are not near.
        ram_share: Share of all experts that RAM holds behind a GPU.

    Returns:
        ``None`` where the rate has no range, or where the CPU computes no experts.
    """
    rate = _rate(cases, far)
    if rate is None or rate.low is None or rate.high is None:
        return None
    low = _end(cases, case, "low", rate.low, far, ram_share)
    high = _end(cases, case, "high", rate.high, far, ram_share)
    return CpuRange(rate.value, low, high)


def cpu_rates(cases: Cases, case: Case, far: Far | None, ram_share: float) -> tuple[float, float] | None:
    """Tokens a second of a plan at both ends of the range; arguments and ``None`` as :func:`cpu_range`."""
    if _rate(cases, far) is None:
        return None
    memory, ends = case.memory, [_at(cases, "low"), _at(cases, "high")]

    def rate(there: Cases) -> float:
        if case.allocation is not None:
            return there.decode_at(case, ram_share).rate
        return there.case(memory.whole_budget, ctx=memory.context, ram_share=ram_share).decode.rate

    low, high = in_threads(rate, ends)
    return low, high


def _rate(cases: Cases, far: Far | None) -> Figure | None:
    """The rate of the CPU's experts; ``None`` if it has no range, or the CPU computes none."""
    profile = cases.machine.figures
    computes = cases.machine.near == "ram" or (far is not None and cases.settings.miss != "fetch")
    if profile is None or not computes:
        return None
    rate = expert_rate(profile.with_grids(cases.shape.grids), cases.shape.bits)
    return None if rate.low is None or rate.high is None else rate


def _at(cases: Cases, end: End) -> Cases:
    """The model on the machine with the rate at one end."""
    machine = cases.machine
    assert machine.profile is not None  # _rate() has looked
    return cases.on(replace(machine, profile=machine.profile.with_experts_at(end)))


def _end(cases: Cases, case: Case, end: End, rate: float, far: Far | None, ram_share: float) -> CpuEnd:
    there, memory = _at(cases, end), case.memory
    made = there.case(memory.whole_budget, ctx=memory.context, ram_share=ram_share)
    kept, changed = made.decode, 0
    if case.allocation is not None and made.allocation is not None:
        changed = int(np.any(case.allocation.targets != made.allocation.targets, axis=1).sum())
        if changed or case.strategy != made.strategy:
            kept = there.decode_with(case, made.costs)
    words = bottleneck(made.decode, far, cases.settings)
    title = "" if made.strategy is None else made.strategy.title
    return CpuEnd(rate, made.decode.rate, kept.rate, changed, words, title)
