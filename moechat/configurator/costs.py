"""The times of a decoded token that plans are computed from (MoEpic, section 3.4.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from moechat.configurator.gpu_pattern import GpuCalls


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of one decoded token.

    Simultaneous transfers and computation of missing experts share the memory bandwidth, so each is slower
    than alone; ``load_together`` and ``compute_together`` are measured that way.

    Attributes:
        attention: ``T_att``: a layer without its routed experts.
        moe: ``T_moe``: the K experts of a layer, all resident.
        head: ``T_head``: the rest of a token: final norm, head, sampling, embedding.
        load: ``T_load``: one expert over the link.
        latency: From a request of a block on the idle link to its first byte.
        compute_far: One expert computed by the far tier; infinite if it cannot compute.
        load_together: ``load`` while missing experts are computed.
        compute_together: ``compute_far`` while the link is busy.
        call: Part of ``moe`` that computing any number of blocks takes.
        far_call: Handing a layer's input to the far tier and its sums back.
        near_slowdown: Factor of ``attention``, ``moe`` and ``head`` while the link is busy; above 1 where the
            near tier and the link share the memory.
        calls: On a GPU: the parts of ``attention``, ``moe`` and ``head`` in which the host calls it.

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
    call: float = 0.0
    far_call: float = 0.0
    near_slowdown: float = 1.0
    calls: GpuCalls = field(default_factory=GpuCalls)

    def __post_init__(self) -> None:
        for name, value in {**vars(self), **vars(self.calls)}.items():
            if isinstance(value, float | int) and not value >= 0:
                raise ValueError(f"{name} is {value}; a time is at least 0")
        for name in ("load", "moe"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 and finite")

    @property
    def far_computes(self) -> bool:
        """Whether the far tier can compute."""
        return math.isfinite(self.compute_far)

    @property
    def both_loads(self) -> float:
        """``load_together``, or ``load`` if it was not measured."""
        return self.load if self.load_together is None else self.load_together

    @property
    def both_computes(self) -> float:
        """``compute_together``, or ``compute_far`` if it was not measured."""
        return self.compute_far if self.compute_together is None else self.compute_together
