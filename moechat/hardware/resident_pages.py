"""Memory for measurements: private, page-aligned, in huge pages if available."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

_PART = 32 << 20


def touched_pages(rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Allocate zeroed, resident uint8 ``[rows, columns]``, like the near tier's pages.

    Raises:
        MemoryError: The system has not enough memory.
    """
    try:
        memory = mmap.mmap(-1, rows * columns, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refuses {rows * columns} bytes") from error
    with contextlib.suppress(OSError, AttributeError):  # optional
        memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.ndarray((rows, columns), dtype=np.uint8, buffer=memory)
    flat = pages.reshape(-1)
    # In parts, so that an interrupt is handled quickly if page faults are slow.
    for begin in range(0, flat.size, _PART):
        flat[begin : begin + _PART] = 0
    return pages
