"""Memory to measure with: private, at the beginning of a page, in huge pages where the system gives them."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

_PART = 32 << 20


def touched_pages(rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Zeros uint8 ``[rows, columns]`` that lie in memory already, as the near tier's pages do.

    Raises:
        MemoryError: The system refuses it.
    """
    try:
        memory = mmap.mmap(-1, rows * columns, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refuses {rows * columns} bytes") from error
    with contextlib.suppress(OSError, AttributeError):  # a wish
        memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.ndarray((rows, columns), dtype=np.uint8, buffer=memory)
    flat = pages.reshape(-1)
    # In parts: where the system gives memory out slowly, an interrupt need not wait for the last one.
    for begin in range(0, flat.size, _PART):
        flat[begin : begin + _PART] = 0
    return pages
