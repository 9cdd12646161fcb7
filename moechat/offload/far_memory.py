"""The far memory of a GPU: all experts in host memory, pinned as far as the system allows."""

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

# Takes bytes read and bytes in all.
ReadProgress = Callable[[int, int], None]
_PIECE = 16 << 20
_READERS = 4
# Pinned buffers of one block each: threads fill some while others are copied.
_BUFFERS = 16

Region = tuple[npt.NDArray[np.uint8] | None, int, bool, str, int]


class FarMemory:
    """The experts of a store in host memory, one piece a layer, for one GPU.

    A layer is read from the store, then pinned: a GPU copies pinned memory by itself at full speed. When the
    system refuses to pin more (WSL2 does at about half of the memory), the rest is copied through pinned
    buffers, with a warning. Experts that do not all fit into memory are read from their files, through the
    page cache.

    Args:
        store: Verified.
        ordinal: Index of the GPU.
        in_memory: Read all experts now; else they stay in their files.
        progress: Called with bytes read and bytes in all.

    Attributes:
        pinned_bytes: Pinned bytes of experts.

    Raises:
        MoechatError: A file cannot be read.
    """

    def __init__(
        self,
        store: Store,
        *,
        ordinal: int,
        in_memory: bool,
        progress: ReadProgress | None = None,
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
        """Bytes of experts that the GPU copies by itself."""
        return sum(layer.nbytes for layer in self._pinned)

    def records(self) -> list[npt.NDArray[np.uint8]]:
        """Records of each layer in memory; empty where experts are read from their files."""
        return [layer for layer, *_ in self._regions if layer is not None]

    def link(self) -> _native.Link:
        """A link from here into the GPU's memory; REQUIRES: this object outlives it."""
        return _native.cuda_link(
            self._regions,
            device=self._ordinal,
            buffer_bytes=self._record_bytes,
            buffers=_BUFFERS,
        )

    def close(self) -> None:
        """Free the memory; REQUIRES: the link has stopped. Harmless when repeated."""
        while self._pinned:
            # A failed GPU refuses all calls; the memory is freed when the process ends.
            with suppress(_native.CudaError, _native.CudaUnavailableError):
                _native.cuda_unpin(self._pinned.pop(), self._ordinal)
        self._regions.clear()

    def __del__(self) -> None:
        # Pinned memory must be unpinned before it is freed, after errors too.
        if "_pinned" in self.__dict__ and os.getpid() == self._process:
            self.close()

    def _leave_room(self) -> None:
        """Unpin the last layer, since the buffers have to be pinned too."""
        if not self._pinned:
            return
        _native.cuda_unpin(self._pinned.pop(), self._ordinal)
        layer, nbytes, _, path, offset = self._regions.pop()
        self._regions.append((layer, nbytes, False, path, offset))

    def _pin(self, layer: npt.NDArray[np.uint8]) -> str:
        """Pin a layer; returns the reason of a refusal, or an empty text."""
        try:
            _native.cuda_pin(layer, self._ordinal)
        except _native.CudaError as error:
            if error.sticky:
                raise
            return str(error)
        self._pinned.append(layer)
        return ""


def _read(extent: ExpertExtent, into: npt.NDArray[np.uint8]) -> None:
    """Read all bytes of a layer, in pieces, by several threads, without filling the page cache.

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
