"""Limits of time, memory and disk for measuring a machine."""

from __future__ import annotations

from dataclasses import dataclass

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
    bits: tuple[int, ...] = (2, 3, 4, 8, 16)


def format_size(nbytes: int) -> str:
    """``256 KiB``, ``32 MiB``, ``1.5 GiB``."""
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.1f} GiB"
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
