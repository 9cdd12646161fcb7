"""Pins host memory for a GPU in chunks, as far as the system allows.

A refusal ends nothing. ``cuMemHostRegister`` is a function of the driver: it returns its error, and unlike
those of the runtime API that torch calls, errors of the driver's functions are not kept for a later
``cudaGetLastError``. So the context and torch stay as they were, unless the GPU itself is lost, which
:meth:`Pinning.pin` asks the driver.
"""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.hardware.wsl import MORE_PINNED, PINNED_SHARE, in_wsl2

# A call pins so much: at some 100 ms a GiB it neither delays an interruption nor takes a second, a model of
# 100 GiB takes 400 of them, and a refusal leaves no more than this unpinned.
_CHUNK_BYTES = 256 << 20
_PAGE = 4096
# After so many refusals in a row the rest of a layer is left: its chunks would be refused too.
_REFUSALS = 2
# Kept free for buffers that torch pins, beside those of the link.
_TORCH_BYTES = 32 << 20

Bytes = npt.NDArray[np.uint8]


def chunk_bytes(record_bytes: int) -> int:
    """Bytes of a chunk: whole records, so that a copy of one never reaches from one registration into the
    next, which the driver refuses; and whole pages of memory, so that no page is registered twice.
    """
    step = math.lcm(record_bytes, _PAGE)
    return max(1, _CHUNK_BYTES // step) * step


class Pinning:
    """The pinned chunks of some memory.

    Args:
        ordinal: Index of the GPU.
        record_bytes: Bytes of a block record.
        buffers: Bytes that the link will pin for buffers; kept free until :meth:`release_reserve`.
        total: Bytes that may be pinned in all.

    Attributes:
        refusal: Reason of the last refusal; empty: there was none.
    """

    def __init__(self, ordinal: int, record_bytes: int, *, buffers: int, total: int) -> None:
        self._ordinal = ordinal
        self._chunk = chunk_bytes(record_bytes)
        self._pinned: list[Bytes] = []
        self.refusal = ""
        self._reserve_bytes = buffers + min(_TORCH_BYTES, total // 64)
        self._reserve: Bytes | None = None

    @property
    def nbytes(self) -> int:
        """Pinned bytes, the reserve not included."""
        return sum(chunk.nbytes for chunk in self._pinned)

    def pin(self, memory: Bytes) -> list[tuple[Bytes, bool]]:
        """Pin memory as far as the system allows.

        Args:
            memory: ``[n]``, a whole number of records, beginning at a page.

        Returns:
            Parts of it in order, each with whether it is pinned; a pinned one is a chunk.

        Raises:
            CudaError: The GPU is lost.
        """
        parts: list[tuple[Bytes, bool]] = []
        # Where not even the buffers that all others go through can be pinned, nothing takes their place.
        refusals = 0 if self._hold_reserve() else _REFUSALS
        for start in range(0, len(memory), self._chunk):
            chunk = memory[start : start + self._chunk]
            pinned = refusals < _REFUSALS and self._try(chunk)
            refusals = 0 if pinned else refusals + 1
            if pinned:
                self._pinned.append(chunk)
            parts.append((chunk, pinned))
        return parts

    def release_reserve(self) -> None:
        """Unpin what was kept free for buffers."""
        if self._reserve is not None:
            _native.cuda_unpin(self._reserve, self._ordinal)
            self._reserve = None

    def close(self) -> None:
        """Unpin everything; harmless when repeated."""
        # A failed GPU refuses all calls; the memory is freed when the process ends.
        with suppress(_native.CudaError, _native.CudaUnavailableError):
            self.release_reserve()
        while self._pinned:
            with suppress(_native.CudaError, _native.CudaUnavailableError):
                _native.cuda_unpin(self._pinned.pop(), self._ordinal)

    def _hold_reserve(self) -> bool:
        for _ in range(_REFUSALS):
            if self._reserve is None:
                memory = _native.huge_empty(self._reserve_bytes)
                self._reserve = memory if self._try(memory) else None
        return self._reserve is not None

    def _try(self, chunk: Bytes) -> bool:
        try:
            _native.cuda_pin(chunk, self._ordinal)
        except _native.CudaError as error:
            if error.sticky and not self._alive():
                raise
            self.refusal = str(error)
            return False
        return True

    def _alive(self) -> bool:
        """Whether the context still works: CUDA_ERROR_UNKNOWN may be a refusal as well as the end."""
        try:
            _native.cuda_memory(self._ordinal)
        except _native.CudaError:
            return False
        return True


def refusal_notice(pinned: int, total: int, reason: str) -> str:
    """Text for the user where the system pins a part only.

    Args:
        pinned: Pinned bytes of experts.
        total: Bytes of the experts in memory.
        reason: Reason of a refusal.
    """
    text = (
        f"the system pins no more than {pinned >> 20} MiB of {total >> 20} MiB of experts ({reason}); "
        "the rest is copied through pinned buffers, which is slower"
    )
    if in_wsl2():
        text += f". Under WSL2 about {100 * PINNED_SHARE:.0f} % of the memory can be pinned: {MORE_PINNED}"
    return text
