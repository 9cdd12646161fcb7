"""Performance figures of a machine, the input of plans and predictions.

A profile is measured (``moechat profile``) or written by hand for a reference machine (``profiles/``). Every
figure has a source. Units are bytes, bytes per second and seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

Origin = Literal["measured", "datasheet", "published", "estimate"]
# End of a range.
End = Literal["low", "high"]
# Range of all figures of real machines. Values outside mean a damaged file and would lead to infinite times.
LEAST_VALUE, MOST_VALUE = 1e-9, 1e21
# How many times as long a core takes for a byte of encodings with grids as for one of 2 bits. Measured on a
# core of a Zen 4, out of its caches: 2.6 to 3.6 for IQ2 and IQ3 with AVX-512 VBMI, 4.8 to 7.5 without; 6 to
# 8.7 for IQ1.
_GRID_SLOWDOWN, _GRID_SLOWDOWN_VBMI = 5.5, 3.2
# Sets of processors that nearly all have VBMI: all with AVX-512 VNNI since Ice Lake and Zen 4.
_MOSTLY_VBMI = frozenset({"avx512-vnni", "amx"})


@dataclass(frozen=True)
class Figure:
    """A number and its source.

    Attributes:
        value: The value, in the unit of its field.
        origin: ``measured`` on that machine by moechat, ``datasheet`` of the vendor, ``published`` by others,
            or ``estimate`` by the rule in ``source``.
        source: URL, tool and settings, or the rule of an estimate.
        low: The least that the value may be; ``None``, like ``high``, if no range is known.
        high: The most that it may be.

    Raises:
        ValueError: One end of the range is missing, or the value is outside.
    """

    value: float
    origin: Origin
    source: str = ""
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            return
        if self.low is None or self.high is None:
            raise ValueError(f"a range from {self.low} to {self.high} has only one end")
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value:.6g} is outside of its range, {self.low:.6g} to {self.high:.6g}")

    def derived(self, value: float) -> Figure:
        """Another value with the origin and source of this one, without its range."""
        return Figure(value, self.origin, self.source)

    def at(self, end: End) -> Figure:
        """The figure at one end of its range, without a range; itself if it has none."""
        value = self.low if end == "low" else self.high
        return self if value is None else self.derived(value)


@dataclass(frozen=True)
class LinkFigures:
    """A link from a far tier to a near one.

    Attributes:
        kind: ``file``: store to RAM. ``gpu``: RAM to VRAM.
        bandwidth: Bytes per second by bytes of one transfer, ascending, with many transfers in flight.
        latency: Seconds from a request of the smallest of these sizes on the idle link to its last byte.
        together: Bytes per second for the largest size while the CPU computes experts with all threads;
            ``None``: unknown.
        latencies: Seconds from a request on the idle link to its last byte, by requested bytes, ascending;
            empty: unknown except for :attr:`latency`.
        by_depth: Bytes per second by bytes of one transfer, then by transfers in flight; empty: unknown.
        back: Bytes per second from the near tier to the far one, by bytes of one copy; empty: unknown.
        back_together: The same for the largest size while the CPU computes experts with all threads.
        staged: Bytes per second from memory that is not pinned, through a ring of pinned buffers, by bytes of
            one transfer; empty: unknown.
        experts: By bits: bytes of blocks per second that the CPU computes with all threads while this link
            is busy; empty: unknown.
        pinned: Bytes of host memory that the system pinned when it was measured; ``None``: unknown.
        pins_more: Whether it may pin more than that: nothing was refused.
    """

    kind: Literal["file", "gpu"]
    bandwidth: Mapping[int, Figure]
    latency: Figure
    together: Figure | None = None
    latencies: Mapping[int, Figure] = field(default_factory=dict)
    by_depth: Mapping[int, Mapping[int, Figure]] = field(default_factory=dict)
    back: Mapping[int, Figure] = field(default_factory=dict)
    back_together: Figure | None = None
    staged: Mapping[int, Figure] = field(default_factory=dict)
    experts: Mapping[int, Figure] = field(default_factory=dict)
    pinned: Figure | None = None
    pins_more: bool = False

    @property
    def measured(self) -> bool:
        """Whether its bandwidth was measured on that machine."""
        return all(figure.origin == "measured" for figure in self.bandwidth.values())

    def rate(self, nbytes: int) -> float:
        """Bytes per second for transfers of ``nbytes``.

        Times are linear between measured sizes, and the rate is constant beyond. A transfer takes a time of
        its own and that of its bytes, so between 256 KiB and 16 MiB the rate rises faster than linearly.
        """
        return _rate_at(self.bandwidth, nbytes)

    def staged_rate(self, nbytes: int) -> float | None:
        """The same from memory that is not pinned; ``None``: unknown."""
        return _rate_at(self.staged, nbytes) if self.staged else None

    def pinned_share(self, nbytes: int) -> float:
        """Share of ``nbytes`` of host memory that the system pins; 1 where none was refused."""
        if self.pinned is None or self.pins_more:
            return 1.0
        return min(1.0, self.pinned.value / nbytes) if nbytes else 1.0


def _rate_at(rates: Mapping[int, Figure], nbytes: int) -> float:
    sizes = sorted(rates)
    if nbytes <= sizes[0]:
        return rates[sizes[0]].value
    for low, high in pairwise(sizes):
        if nbytes <= high:
            share = (nbytes - low) / (high - low)
            times = low / rates[low].value, high / rates[high].value
            return nbytes / (times[0] * (1 - share) + times[1] * share)
    return rates[sizes[-1]].value


@dataclass(frozen=True)
class GpuFigures:
    """A GPU.

    Attributes:
        name: Name by driver or vendor.
        vram: Total bytes.
        vram_free: Free bytes; equal to ``vram`` for a reference machine.
        bandwidth: Sustained memory bandwidth, bytes per second.
        flops: Sustained dense 16-bit operations per second with tensor cores, for prefill.
        launch: Seconds to start one kernel.
        pcie_generation: PCIe generation.
        pcie_lanes: PCIe lanes.
        capability: CUDA compute capability; ``None``: unknown.
        sms: Streaming multiprocessors; ``None``: unknown.
        l2_bytes: Second-level cache; ``None``: unknown.
        context: Bytes that a CUDA context with torch takes; ``None``, as every figure below, and empty
            mappings: not measured.
        copy: Bytes that a copy within the GPU's memory reads and writes per second.
        dense_rate: By bits of a dense weight: bytes of weights per second at one token.
        dense_flops: By bits: operations per second of dense products with hundreds of tokens.
        expert_rate: By bits, then by tokens of each expert: bytes of blocks per second.
        expert_flops: The same in operations per second.
        call: Host seconds to start the kernels of a layer's experts for one token.
        graph_launch: Host seconds to start the replay of a CUDA graph.
        graph_node: Seconds of the GPU for a node of a graph whose kernel does nothing.
        sync: Seconds from recording an event behind a small kernel to the wake-up of the host, beyond
            :attr:`launch`.
        round_trip: Seconds for the copy of a few numbers to the host, as the host sees it.
    """

    name: str
    vram: Figure
    vram_free: Figure
    bandwidth: Figure
    flops: Figure
    launch: Figure
    pcie_generation: int
    pcie_lanes: int
    capability: tuple[int, int] | None = None
    sms: int | None = None
    l2_bytes: int | None = None
    context: Figure | None = None
    copy: Figure | None = None
    dense_rate: Mapping[int, Figure] = field(default_factory=dict)
    dense_flops: Mapping[int, Figure] = field(default_factory=dict)
    expert_rate: Mapping[int, Mapping[int, Figure]] = field(default_factory=dict)
    expert_flops: Mapping[int, Mapping[int, Figure]] = field(default_factory=dict)
    call: Figure | None = None
    graph_launch: Figure | None = None
    graph_node: Figure | None = None
    sync: Figure | None = None
    round_trip: Figure | None = None


@dataclass(frozen=True)
class HardwareProfile:
    """A machine.

    Attributes:
        name: Short name: that of the file in ``profiles/``, or of the machine.
        title: Name to show.
        cpu: Model of the processor.
        cores: Physical cores that may be used.
        isa: Instruction set of the expert kernels.
        ram: Total bytes.
        ram_bandwidth: Read bandwidth of all cores together, bytes per second.
        expert_rate: By bits per expert weight, then by threads: bytes of blocks per second that the CPU
            computes at one token, from memory larger than the caches.
        expert_rate_together: By bits: the same with all threads while the link into the near tier is busy.
        expert_flops: By bits: operations per second with many tokens and all threads, for prefill.
        links: The links by kind.
        gpu: Its GPU, if any.
        created: Time of measurement or writing, ISO 8601.
        key: Key of the :class:`~moechat.hardware.identity.Identity` it is valid for; empty for ``profiles/``.
        clock: Clock of a core under load, in Hz, ranging from base to boost clock; ``None``: unknown.
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
    clock: Figure | None = None

    def with_grids(self, share: float) -> HardwareProfile:
        """The machine as it computes experts of which a share has encodings with grids.

        A core unpacks fewer of their bytes in a second than of others, see :data:`_GRID_SLOWDOWN`; where all
        cores together still outrun the memory, nothing changes.

        Args:
            share: :attr:`moechat.geometry.ExpertGeometry.grid_share`.
        """
        if share == 0:
            return self
        slowdown = _GRID_SLOWDOWN_VBMI if self.isa in _MOSTLY_VBMI else _GRID_SLOWDOWN

        def slowed(rate: Figure, of_core: Figure, threads: int) -> Figure:
            most = threads * of_core.value / slowdown
            if most >= rate.value:
                return rate
            value = 1 / ((1 - share) / rate.value + share / most)
            by = value / rate.value
            return Figure(
                value,
                "estimate",
                f"{rate.source}; numbers of grids take a core {slowdown:g} times as long",
                None if rate.low is None else by * rate.low,
                None if rate.high is None else by * rate.high,
            )

        def one(bits: int) -> Figure | None:
            return self.expert_rate.get(bits, {}).get(1)

        def beside(rates: Mapping[int, Figure]) -> dict[int, Figure]:
            return {
                bits: rate if (core := one(bits)) is None else slowed(rate, core, self.cores)
                for bits, rate in rates.items()
            }

        rates = {
            bits: {
                threads: rate if (core := one(bits)) is None else slowed(rate, core, threads)
                for threads, rate in by_threads.items()
            }
            for bits, by_threads in self.expert_rate.items()
        }
        return replace(
            self,
            expert_rate=rates,
            expert_rate_together=beside(self.expert_rate_together),
            links={kind: replace(link, experts=beside(link.experts)) for kind, link in self.links.items()},
        )

    def with_experts_at(self, end: End) -> HardwareProfile:
        """The machine if all its rates of experts on the CPU are at one end of their ranges."""

        def ends(rates: Mapping[int, Figure]) -> dict[int, Figure]:
            return {number: rate.at(end) for number, rate in rates.items()}

        return replace(
            self,
            expert_rate={bits: ends(rates) for bits, rates in self.expert_rate.items()},
            expert_rate_together=ends(self.expert_rate_together),
            expert_flops=ends(self.expert_flops),
        )


@dataclass(frozen=True)
class ModelTimes:
    """Times of one model on one machine per decoded token, with all experts resident (MoEpic, section 3.4.1).

    Attributes:
        attention: ``T_att``: seconds of a layer without its routed experts.
        moe: ``T_moe``: seconds of a layer's K experts.
        head: ``T_head``: seconds of everything outside the layers.
    """

    attention: Figure
    moe: Figure
    head: Figure
