"""What a machine can do: the figures that plans and predictions are made from.

A profile is measured (``moechat profile``) or written down for a machine that is not at hand (``profiles/``).
Every figure says where it comes from. Bytes are bytes, rates are bytes a second, times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Origin = Literal["measured", "datasheet", "published", "estimate"]
# Bytes, seconds, bytes and operations a second of any machine lie within. What is read from a file and does
# not is damage, and would make infinite times.
LEAST_VALUE, MOST_VALUE = 1e-9, 1e21


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from.

    Attributes:
        value: In the unit that the field it stands in says.
        origin: ``measured`` on that machine by moechat, ``datasheet`` of the maker, ``published`` measurement
            of others, or ``estimate``: ours, by the rule in ``source``.
        source: Address, tool and settings, or the rule of an estimate.
    """

    value: float
    origin: Origin
    source: str = ""


@dataclass(frozen=True)
class LinkFigures:
    """A link from a far tier to a near one.

    Attributes:
        kind: ``file``: store to RAM. ``gpu``: RAM to VRAM.
        bandwidth: By bytes of one transfer, ascending, many of them in flight: bytes a second.
        latency: Seconds from asking the idle link for the smallest of these to its last byte.
        together: Bytes a second, for the largest of these, while the CPU computes experts with all threads;
            ``None``: not known.
        latencies: By bytes asked for at once, ascending: seconds from asking the idle link to the last byte;
            empty: not known but for :attr:`latency`.
    """

    kind: Literal["file", "gpu"]
    bandwidth: Mapping[int, Figure]
    latency: Figure
    together: Figure | None = None
    latencies: Mapping[int, Figure] = field(default_factory=dict)

    def rate(self, nbytes: int) -> float:
        """Bytes a second for transfers of ``nbytes``: linear between measured sizes, constant beyond."""
        sizes = sorted(self.bandwidth)
        if nbytes <= sizes[0]:
            return self.bandwidth[sizes[0]].value
        for low, high in pairwise(sizes):
            if nbytes <= high:
                share = (nbytes - low) / (high - low)
                return self.bandwidth[low].value * (1 - share) + self.bandwidth[high].value * share
        return self.bandwidth[sizes[-1]].value


@dataclass(frozen=True)
class GpuFigures:
    """A graphics card.

    Attributes:
        name: As its driver or its maker says.
        vram: Bytes in all.
        vram_free: Bytes that nobody uses; equal to ``vram`` for a machine that is not at hand.
        bandwidth: Bytes a second from its memory, sustained.
        flops: 16-bit operations a second with tensor cores, dense, sustained; for prefill.
        launch: Seconds that starting one kernel costs.
        pcie_generation: Of the slot as it runs.
        pcie_lanes: As it runs.
    """

    name: str
    vram: Figure
    vram_free: Figure
    bandwidth: Figure
    flops: Figure
    launch: Figure
    pcie_generation: int
    pcie_lanes: int


@dataclass(frozen=True)
class HardwareProfile:
    """A machine.

    Attributes:
        name: Short: of the file in ``profiles/``, or of the machine.
        title: For people.
        cpu: Model of the processor.
        cores: Physical cores that may be used.
        isa: Instruction set that the expert kernels use.
        ram: Bytes in all.
        ram_bandwidth: Bytes a second that all cores together read.
        expert_rate: By bits of an expert weight, then by threads: bytes of blocks a second that the CPU
            computes at one token, from memory too large for caches.
        expert_rate_together: By bits, with all threads, while the link into the near tier is busy.
        expert_flops: By bits: multiplications and additions a second with many tokens, all threads; for
            prefill.
        links: By kind, as far as present.
        gpu: Its graphics card, if any.
        created: When it was measured or written down, ISO 8601.
        key: Identity of hardware and software versions that it holds for; empty for files of ``profiles/``.
    """

    name: str
    title: str
    cpu: str
    cores: int
    isa: str
    ram: Figure
    ram_bandwidth: Figure
    expert_rate: Mapping[int, Mapping[int, Figure]]
    expert_rate_together: Mapping[int, Figure] = field(default_factory=dict)
    expert_flops: Mapping[int, Figure] = field(default_factory=dict)
    links: Mapping[str, LinkFigures] = field(default_factory=dict)
    gpu: GpuFigures | None = None
    created: str = ""
    key: str = ""


@dataclass(frozen=True)
class ModelTimes:
    """Times of one model on one machine at one decoded token, with all experts resident (MoEpic, section
    3.4.1).

    Attributes:
        attention: ``T_att``: seconds of a layer without its routed experts.
        moe: ``T_moe``: seconds of a layer's K experts.
        head: ``T_head``: seconds of what comes once a token.
    """

    attention: Figure
    moe: Figure
    head: Figure
