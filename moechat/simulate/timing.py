"""What the parts of a simulated token take, in the form that the timeline wants."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moechat.configurator.costs import Costs
from moechat.hardware.profile import LinkFigures

# As the file link: the least that keeps nearly all of a disk's bandwidth; see native/src/link/file_link.cc.
IN_FLIGHT_BYTES = 6 << 20
# Neighbouring blocks are moved together up to so many bytes, as there.
OPERATION_BYTES = 1 << 20


@dataclass(frozen=True)
class Timing:
    """Seconds, but for the last attribute.

    Attributes:
        attention: A layer without its routed experts.
        head: What comes once a token.
        call: Near tier: for computing anything at all.
        compute: Near tier: computing n blocks for one token, n = 1, 2, ...; beyond, the last step goes on.
        far_block: Far tier: computing one block where it lies; ``None`` where it cannot compute.
        far_block_shared: The same while the link is busy.
        latency: From the start of a transfer to its first byte.
        link: Moving n neighbouring blocks at once, n = 1, 2, ..., as many as are moved at once at most.
        link_shared: The same while the far tier computes.
        in_flight_bytes: Most bytes in flight, of which prefetches take a third.

    Raises:
        ValueError: A list is empty or a value is negative or not a number.
    """

    attention: float
    head: float
    compute: tuple[float, ...]
    link: tuple[float, ...]
    call: float = 0.0
    far_block: float | None = None
    far_block_shared: float | None = None
    latency: float = 0.0
    link_shared: tuple[float, ...] = ()
    in_flight_bytes: int = IN_FLIGHT_BYTES

    def __post_init__(self) -> None:
        if not self.compute or not self.link:
            raise ValueError("compute and link need at least one value each")
        if self.link_shared and len(self.link_shared) != len(self.link):
            raise ValueError(f"link has {len(self.link)} values, link_shared {len(self.link_shared)}")
        single = (self.attention, self.head, self.call, self.latency, self.far_block, self.far_block_shared)
        for value in (*self.compute, *self.link, *self.link_shared, *single):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{value} is no time")
        if self.in_flight_bytes < 1:
            raise ValueError(f"in_flight_bytes is {self.in_flight_bytes}; it must be at least 1")


def timing_of(
    costs: Costs,
    *,
    top_k: int,
    blocks: int,
    block_bytes: int,
    link: LinkFigures | None = None,
    bandwidth: float | None = None,
    call: float = 0.0,
) -> Timing:
    """Times of single blocks out of what a token costs.

    Args:
        costs: Of the machine and the model.
        top_k: K, experts a token.
        blocks: B, blocks of an expert.
        block_bytes: Bytes of a block record.
        link: Figures by size, for transfers of one and of a few blocks; without them every block takes its
            share of ``costs.load``.
        bandwidth: Bytes a second in place of both.
        call: Part of ``costs.moe`` that computing a single block costs as well.
    """
    pairs = top_k * blocks
    call = min(call, costs.moe / 2)
    block = (costs.moe - call) / pairs
    merged = max(1, OPERATION_BYTES // block_bytes)
    shared = costs.both_loads / costs.load
    if bandwidth is not None:
        moving = tuple(count * block_bytes / bandwidth for count in range(1, merged + 1))
    elif link is not None:
        sizes = [count * block_bytes for count in range(1, merged + 1)]
        moving = tuple(size / link.rate(size) for size in sizes)
    else:
        moving = tuple(count * costs.load / blocks for count in range(1, merged + 1))
    computes = math.isfinite(costs.compute_far)
    return Timing(
        attention=costs.attention,
        head=costs.head,
        call=call,
        compute=(block,),
        far_block=costs.compute_far / blocks if computes else None,
        far_block_shared=costs.both_computes / blocks if computes else None,
        latency=costs.latency,
        link=moving,
        link_shared=tuple(shared * seconds for seconds in moving),
    )
