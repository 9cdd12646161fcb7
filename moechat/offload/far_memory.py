"""Where a card's link reads experts from: host memory of their own, pinned as far as the system allows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.errors import MoechatError, MoechatWarning
from moechat.store.store import ExpertExtent, Store

_PIECE = 16 << 20
_READERS = 4
# With pinned buffers: so many of one block each, so that threads fill some while others are copied.
_BUFFERS = 16

Region = tuple[npt.NDArray[np.uint8] | None, int, bool, str, int]


class FarMemory:
    """The experts of a store in host memory, one piece a layer, for one card.

    A layer is read from the store, then pinned: registered memory is the only one that a card copies by
    itself at full speed. When the system refuses to pin more (WSL2 does near half of the memory), the rest
    goes through pinned buffers, with a warning, still to the card. Without memory for all of them experts
    are read from their files, through the page cache.

    Args:
        store: Verified.
        ordinal: Number of the card.
        in_memory: Read all experts now; else they stay in their files.
        progress: Called with bytes read and bytes in all.

    Attributes:
        pinned_bytes: Of the experts.

    Raises:
        MoechatError: A file cannot be read.
    """

    def __init__(
        self,
        store: Store,
        *,
        ordinal: int,
        in_memory: bool,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._ordinal = ordinal
        self._process = os.getpid()
        self._pinned: list[npt.NDArray[np.uint8]] = []
        self._regions: list[Region] = []
        self._record_bytes = store.geometry.record_bytes
        extents = [store.expert_extent(record.layer) for record in store.layers]
        total, done = sum(extent.nbytes for extent in extents), 0
        refused = ""
        try:
            for extent in extents:
                path, offset = str(extent.path), extent.offset
                if not in_memory:
                    self._regions.append((None, extent.nbytes, False, path, offset))
                    continue
                layer = _native.huge_empty(extent.nbytes)
                _read(extent, layer)
                if not refused:
                    refused = self._pin(layer)
                    if refused:
                        self._leave_room()
                self._regions.append((layer, extent.nbytes, not refused, path, offset))
                done += extent.nbytes
                if progress is not None:
                    progress(done, total)
        except BaseException:
            self.close()
            raise
        if refused:
            warnings.warn(
                f"the system pins no more than {self.pinned_bytes >> 20} MiB of {total >> 20} MiB of experts "
                f"({refused}); the rest is copied through pinned buffers, which is slower",
                MoechatWarning,
                stacklevel=2,
            )

    @property
    def pinned_bytes(self) -> int:
        """Bytes of experts that the card reads by itself."""
        return sum(layer.nbytes for layer in self._pinned)

    def records(self) -> list[npt.NDArray[np.uint8]]:
        """Of each layer, from which the CPU can compute; none where experts are read from their files."""
        return [layer for layer, *_ in self._regions if layer is not None]

    def link(self) -> _native.Link:
        """A link from here into the card's memory; this object outlives it."""
        return _native.cuda_link(
            self._regions,
            device=self._ordinal,
            buffer_bytes=self._record_bytes,
            buffers=_BUFFERS,
        )

    def close(self) -> None:
        """Give the memory back, after the link has stopped; harmless when repeated."""
        while self._pinned:
            # A card that has failed refuses everything; the process gives the memory back at its end.
            with suppress(_native.CudaError, _native.CudaUnavailableError):
                _native.cuda_unpin(self._pinned.pop(), self._ordinal)
        self._regions.clear()

    def __del__(self) -> None:
        # Registered memory must not be freed before it is unregistered, whatever went wrong on the way.
        if "_pinned" in self.__dict__ and os.getpid() == self._process:
            self.close()

    def _leave_room(self) -> None:
        """The buffers have to be pinned too: the last layer that was makes room for them."""
        if not self._pinned:
            return
        _native.cuda_unpin(self._pinned.pop(), self._ordinal)
        layer, nbytes, _, path, offset = self._regions.pop()
        self._regions.append((layer, nbytes, False, path, offset))

    def _pin(self, layer: npt.NDArray[np.uint8]) -> str:
        """Empty, or why it was refused."""
        try:
            _native.cuda_pin(layer, self._ordinal)
        except _native.CudaError as error:
            if error.sticky:
                raise
            return str(error)
        self._pinned.append(layer)
        return ""


def _read(extent: ExpertExtent, into: npt.NDArray[np.uint8]) -> None:
    """All bytes of a layer, in pieces, by several threads; the page cache keeps nothing of them.

    Raises:
        MoechatError: The file cannot be read, or has become shorter.
    """
    view = memoryview(into)  # type: ignore[arg-type]

    def piece(start: int) -> None:
        end = min(start + _PIECE, extent.nbytes)
        while start < end:
            count = os.preadv(file, [view[start:end]], extent.offset + start)
            if count == 0:
                raise OSError(0, "the file has become shorter")
            start += count

    try:
        file = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with ThreadPoolExecutor(_READERS) as readers:
                list(readers.map(piece, range(0, extent.nbytes, _PIECE)))
            os.posix_fadvise(file, extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    except OSError as error:
        raise MoechatError(
            f"experts cannot be read from {extent.path}: {error.strerror}",
            hint="check the disk that holds the store, then try again",
        ) from error
