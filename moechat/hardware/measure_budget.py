"""How long measuring a machine may take, and what of it it may use."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of one transfer, and of what lies together and is asked for together: a block (216 KiB for a hidden
# size of 2048 at 4 bits), an expert, and as much as several experts.
RECORD_BYTES = 256 << 10
EXPERT_BYTES = 4 << 20
LARGE_BYTES = 32 << 20


@dataclass(frozen=True)
class Budget:
    """How long, and how much memory and disk, measuring may take.

    Attributes:
        scratch_bytes: Size of the file to read from, where no store is large enough.
        least_scratch: Smallest file that tells anything.
        keep_free: Bytes of the disk that are never used.
        write_seconds: After so long the file is no longer written, if it has the least size.
        link_seconds: For each size.
        latency_seconds: Of the idle link, for each size; a slow link may take three times as long.
        memory_bytes: For expert kernels; 0: twice the largest cache, 256 MiB to 1 GiB.
        stream_seconds: For reading memory.
        compute_seconds: For each number of bits and threads.
        many_seconds: For many tokens, for each number of bits.
        together_seconds: Link and kernels, for each number of bits.
        bits: Encodings.
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
