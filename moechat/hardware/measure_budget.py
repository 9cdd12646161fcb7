"""Limits of time, memory and disk for measuring a machine."""

from __future__ import annotations

from dataclasses import dataclass

from moechat.geometry import SUPPORTED_BITS
from moechat.hardware.memory import available_bytes

# Bytes of one transfer, about a block (216 KiB for a hidden size of 2048 at 4 bits), and of contiguous
# requests: one expert, several experts.
RECORD_BYTES = 256 << 10
EXPERT_BYTES = 4 << 20
LARGE_BYTES = 32 << 20


@dataclass(frozen=True)
class Budget:
    """Limits of one measurement.

    Attributes:
        scratch_bytes: Size of the scratch file, written if no store is large enough.
        least_scratch: Smallest useful scratch file.
        keep_free: Bytes that stay free on the disk.
        write_seconds: Time after which writing stops, if the file has the least size.
        link_seconds: Bandwidth measurement, for each size.
        latency_seconds: Latency measurement, for each size; up to three times as long for a slow link.
        memory_bytes: Memory for expert kernels; 0: twice the largest cache, 256 MiB to 1 GiB.
        stream_seconds: Memory bandwidth measurement.
        compute_seconds: Kernels, for each number of bits and threads.
        many_seconds: Kernels with many tokens, for each number of bits.
        together_seconds: Link and kernels together, for each number of bits.
        bits: Encodings to measure.
        gpu_seconds: GPU, all of it but building kernels.
        build_seconds: First runs of the GPU's kernels, which builds them where they were never used.
        gpu_cell_seconds: One figure of the GPU.
        gpu_calls: Calls in a round of what the host starts or waits for.
        gpu_together_seconds: Link to the GPU and CPU together, for each number of bits.
        gpu_bytes: Memory of the GPU for reading and copying; never more than a quarter of what is free.
        gpu_link_bytes: Pinned memory that is copied from; larger than the CPU's caches.
        gpu_transfers: Sizes of transfers to the GPU, ascending.
        gpu_depths: Transfers in flight, ascending from 1.
        gpu_tokens: Tokens of each expert.
        many_tokens: The most of them, and tokens of a dense product.
        dense_bits: Bits of dense weights.
        pin_chunk: Host memory that is pinned at a time to find how much can be.
        pin_most: Bound of that; see also :meth:`pin_bound`.
        pin_seconds: Time for it.
    """

    scratch_bytes: int = 512 << 20
    least_scratch: int = LARGE_BYTES * 2
    keep_free: int = 1 << 30
    write_seconds: float = 4.0
    link_seconds: float = 0.7
    latency_seconds: float = 0.1
    memory_bytes: int = 0
    stream_seconds: float = 0.4
    compute_seconds: float = 0.3
    many_seconds: float = 0.1
    together_seconds: float = 0.5
    bits: tuple[int, ...] = SUPPORTED_BITS
    gpu_seconds: float = 20.0
    build_seconds: float = 60.0
    gpu_cell_seconds: float = 0.05
    gpu_calls: int = 64
    gpu_together_seconds: float = 0.25
    gpu_bytes: int = 1 << 30
    gpu_link_bytes: int = 256 << 20
    gpu_transfers: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
    gpu_depths: tuple[int, ...] = (1, 4, 16, 64)
    gpu_tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 64, 512)
    many_tokens: int = 512
    dense_bits: tuple[int, ...] = (16, 8, 4)
    pin_chunk: int = 512 << 20
    pin_most: int = 8 << 30
    pin_seconds: float = 3.0

    def pin_bound(self) -> int:
        """Bytes of host memory that may be pinned for a moment: half of what is free, so that no program is
        driven out of memory, and no more than :attr:`pin_most`.
        """
        return min(self.pin_most, available_bytes() // 2)


def format_size(nbytes: int) -> str:
    """``256 KiB``, ``32 MiB``, ``1.5 GiB``."""
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.1f} GiB"
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
