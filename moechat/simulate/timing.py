"""Times of the parts of a simulated token, as input of the native timeline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from moechat.configurator.costs import Costs
from moechat.configurator.gpu_pattern import GpuCalls
from moechat.hardware.profile import LinkFigures

Launch = Literal["host", "card", "graphs"]
# As in native/src/link/file_link.cc: the smallest value with nearly the full bandwidth of a disk.
IN_FLIGHT_BYTES = 6 << 20
# Most prefetched bytes in flight on the link to a GPU; as in native/src/link/cuda_link.cc.
GPU_IN_FLIGHT_BYTES = 12 << 20
# Most adjacent blocks moved by one copy to a GPU: those of a batch; as kCudaBatchCopies in cuda_link.h.
GPU_MERGED_BLOCKS = 64
# Most bytes of adjacent blocks moved by one operation, as in file_link.cc.
OPERATION_BYTES = 1 << 20


@dataclass(frozen=True)
class Timing:
    """Times in seconds; the last four attributes are not times.

    Attributes:
        attention: A layer without its routed experts.
        head: Everything outside the layers.
        call: Near tier: overhead of computing any number of blocks.
        compute: Near tier: computing n blocks for one token, n = 1, 2, ...; beyond, extrapolated linearly.
        far_block: Far tier: computing one block; ``None`` if it cannot compute.
        far_block_shared: The same while the link is busy.
        latency: From the start of a transfer to its first byte.
        link: Moving n adjacent blocks in one operation, n = 1, 2, ..., up to the largest operation.
        link_shared: The same while the far tier computes.
        in_flight_bytes: Most bytes in flight; prefetches use at most a third. On a GPU the limit is for
            prefetches only.
        far_call: Handing a layer's input to the far tier and its sums back.
        near_slowdown: Factor of the near tier's times while the link is busy.
        far_threads: Threads of the far tier.
        launch: How the near tier computes: ``host``, blocks as they arrive; ``card``, resident blocks
            first, then the others behind their copies; ``graphs``, on a card that holds every block and waits
            for the host at no layer.
        calls: Of a card: times of the host and of small copies, which the times above leave out.

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
    far_call: float = 0.0
    near_slowdown: float = 1.0
    far_threads: int = 1
    launch: Launch = "host"
    calls: GpuCalls = field(default_factory=GpuCalls)

    def __post_init__(self) -> None:
        if not self.compute or not self.link:
            raise ValueError("compute and link need at least one value each")
        if self.link_shared and len(self.link_shared) != len(self.link):
            raise ValueError(f"link has {len(self.link)} values, link_shared {len(self.link_shared)}")
        far = (self.far_block, self.far_block_shared, self.far_call)
        single = (self.attention, self.head, self.call, self.latency)
        for value in (*self.compute, *self.link, *self.link_shared, *single, *far):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{value} is not a valid time")
        if not 1 <= self.near_slowdown < math.inf:
            raise ValueError(f"near_slowdown is {self.near_slowdown}; it must be at least 1")
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
    far_threads: int = 1,
    launch: Launch = "host",
) -> Timing:
    """Derive times of single blocks from the costs of a token.

    Args:
        costs: Costs of the machine and the model.
        top_k: K, experts per token.
        blocks: B, blocks per expert.
        block_bytes: Bytes of a block record.
        link: Figures by size, for transfers of one or a few blocks; ``None``: every block takes its share of
            ``costs.load``.
        bandwidth: Bytes per second, replacing both.
        far_threads: As :class:`Timing`.
        launch: As :class:`Timing`; on a card, ``costs.calls`` say whether layers wait for the host.
    """
    pairs, calls = top_k * blocks, costs.calls
    call = min(costs.call, costs.moe / 2)
    block = (costs.moe - call) / pairs
    attention, head = costs.attention, costs.head
    on_card = launch != "host"
    if on_card and calls.ahead:
        launch, call = "graphs", calls.kernels
    elif on_card and calls.launch > 0:
        # The timeline adds the host's calls, where the GPU does not hide them.
        call = calls.kernels
        attention = max(0.0, attention - calls.dense - calls.choice)
        head = max(0.0, head - calls.dense - calls.choice)
    merged = GPU_MERGED_BLOCKS if on_card else max(1, OPERATION_BYTES // block_bytes)
    shared = costs.both_loads / costs.load
    if bandwidth is not None:
        moving = tuple(count * block_bytes / bandwidth for count in range(1, merged + 1))
    elif link is not None:
        sizes = [count * block_bytes for count in range(1, merged + 1)]
        moving = tuple(size / link.rate(size) for size in sizes)
    else:
        # Each copy to a GPU takes a time of its own besides its bytes, also that of a whole expert.
        copy = min(calls.list_copy, costs.load / 2) if on_card else 0.0
        moved = (costs.load - copy) / blocks
        moving = tuple(copy + count * moved for count in range(1, merged + 1))
    return Timing(
        attention=attention,
        head=head,
        call=call,
        compute=(block,),
        far_block=costs.compute_far / blocks if costs.far_computes else None,
        far_block_shared=costs.both_computes / blocks if costs.far_computes else None,
        latency=costs.latency,
        link=moving,
        link_shared=tuple(shared * seconds for seconds in moving),
        in_flight_bytes=GPU_IN_FLIGHT_BYTES if on_card else IN_FLIGHT_BYTES,
        far_call=costs.far_call,
        near_slowdown=costs.near_slowdown,
        far_threads=far_threads,
        launch=launch,
        calls=calls if on_card else GpuCalls(),
    )
