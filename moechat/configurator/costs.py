"""What a token costs on a machine: the times that a plan is made from (MoEpic, section 3.4.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of one decoded token take.

    Where transfers and computation of missing experts go on at the same time they share the memory, so each
    is slower than alone; ``load_together`` and ``compute_together`` are measured that way.

    Attributes:
        attention: ``T_att``: all of a layer but its routed experts.
        moe: ``T_moe``: the K experts of a layer, all of them resident.
        head: ``T_head``: what comes once a token: final norm, head, drawing, embedding.
        load: ``T_load``: one expert over the link.
        latency: From asking the idle link for a block to its first byte.
        compute_far: One expert computed where it lies; infinite where the far tier cannot compute.
        load_together: ``load`` while missing experts are computed.
        compute_together: ``compute_far`` while the link is busy.

    Raises:
        ValueError: A time is negative or not a number, or ``load`` or ``moe`` is 0 or infinite.
    """

    attention: float
    moe: float
    head: float
    load: float
    latency: float = 0.0
    compute_far: float = math.inf
    load_together: float | None = None
    compute_together: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value >= 0:
                raise ValueError(f"{name} is {value}; a time is at least 0")
        for name in ("load", "moe"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 and finite")

    @property
    def both_loads(self) -> float:
        """``load_together``, or ``load`` where it was not measured."""
        return self.load if self.load_together is None else self.load_together

    @property
    def both_computes(self) -> float:
        """``compute_together``, or ``compute_far`` where it was not measured."""
        return self.compute_far if self.compute_together is None else self.compute_together
