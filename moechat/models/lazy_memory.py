"""Tensors whose memory the system assigns at the first write."""

from __future__ import annotations

import math
import mmap

import torch

# Not shared with children: shared memory would count in /dev/shm, and stay where a child writes.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def unwritten(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that takes memory only where it is written, and gives it back to the system when it is freed.

    The heap would keep freed pieces of less than 32 MiB, into which later tensors of other sizes do not fit.
    On other devices than the CPU, and where the system refuses, it is torch's own.

    Raises:
        RuntimeError: There is no memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, nbytes, **_PRIVATE)
    except OSError:
        return torch.empty(shape, dtype=dtype)  # torch's error says how much is missing
    return torch.frombuffer(memory, dtype=dtype).view(shape)
