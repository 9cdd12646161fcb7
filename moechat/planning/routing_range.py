"""The range of a plan's speed for a model whose routing was never recorded.

The plan is made for the expected routing. How fast it then is depends on the real one, so the time of a token
is computed again, with the same experts kept and the same strategy, for routing at both ends of what is
plausible. :func:`moechat.configurator.routing_families.family_bounds` decides what that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moechat.planning.cases import Case, Cases
from moechat.planning.speed import Decode
from moechat.simulate.shared_draws import in_threads


@dataclass(frozen=True)
class RoutingEnd:
    """One end of the range.

    Attributes:
        tokens_per_s: Decoded tokens a second.
        hit_rate: Share of activated experts, by bytes, that are kept near.
    """

    tokens_per_s: float
    hit_rate: float


@dataclass(frozen=True)
class RoutingRange:
    """The speed at both ends; the expected speed lies between them.

    Attributes:
        low: With experts that are used almost evenly, and hard to predict.
        high: With a few experts that are used most, and are easy to predict.
    """

    low: RoutingEnd
    high: RoutingEnd


def routing_range(cases: Cases, case: Case, ram_share: float) -> RoutingRange | None:
    """The range of the speed of a case.

    Args:
        cases: The model on the machine.
        case: The outcome of the plan's budget.
        ram_share: Share of all experts that RAM holds behind a GPU.

    Returns:
        ``None`` where the routing is known, or where all experts are near, so that it does not matter.
    """
    bounds = cases.routing.bounds
    if bounds is None or case.allocation is None:
        return None
    low, high = in_threads(lambda end: cases.on(statistics=end).decode_at(case, ram_share), bounds)
    return RoutingRange(_end(low, case.decode, min), _end(high, case.decode, max))


def _end(found: Decode, expected: Decode, furthest: Callable[[float, float], float]) -> RoutingEnd:
    # Simulations draw their routing: ends that hardly differ could change places.
    return RoutingEnd(furthest(found.rate, expected.rate), furthest(found.hit_rate, expected.hit_rate))
