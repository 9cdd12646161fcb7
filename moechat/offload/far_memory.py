"""The far memory of a GPU: experts in host memory, pinned where possible, the others in files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.errors import MoechatWarning, StoreDamagedError
from moechat.offload.pinning import Bytes, Pinning, refusal_notice
from moechat.store.file_problems import file_problem
from moechat.store.store import ExpertExtent, Store

# Takes bytes read and bytes in all.
ReadProgress = Callable[[int, int], None]
_PIECE = 16 << 20
_READERS = 4
# Pinned buffers of one block each: threads fill some while others are copied.
_BUFFERS = 16
# Threads that read experts from files into them: a disk is fast with several reads at a time.
_FILE_READERS = 4

# Memory or None (then it is in the file), bytes, pinned.
_Part = tuple[Bytes | None, int, bool]
Region = tuple[list[_Part], int, bool, str, int]


class FarMemory:
    """The experts of a store behind one GPU: of each layer some in host memory, the others in its file.

    The held experts of a layer are read into one piece of memory and pinned in chunks, then those of the next
    layer: a GPU copies pinned memory by itself at full speed. What the system refuses to pin is copied
    through pinned buffers, with a warning. Experts that memory does not hold are read from their files into
    these buffers, through the page cache.

    Args:
        store: Verified.
        ordinal: Index of the GPU.
        held: For each layer the experts to read now, int32, ascending.
        progress: Called with bytes read and bytes in all.

    Attributes:
        held: As given.
        records: uint8 of each layer: the records of its held experts.

    Raises:
        StoreDamagedError: A file cannot be read, or a record does not have its checksum.
        DoesNotFitError: There are not enough descriptors or memory.
        CudaError: The GPU is lost.
    """

    def __init__(
        self,
        store: Store,
        *,
        ordinal: int,
        held: Sequence[npt.NDArray[np.int32]],
        progress: ReadProgress | None = None,
    ) -> None:
        self._ordinal = ordinal
        self._process = os.getpid()
        self._record_bytes = store.geometry.record_bytes
        self._expert_bytes = store.geometry.expert_bytes
        self._regions: list[Region] = []
        self._checksums = [store.record_checksums(record.layer) for record in store.layers]
        self.held = list(held)
        self.records: list[Bytes] = []
        total, done = self._expert_bytes * sum(map(len, held)), 0
        self._pinning: Pinning | None = None
        if total > 0:
            buffers = _BUFFERS * self._record_bytes
            self._pinning = Pinning(ordinal, self._record_bytes, buffers=buffers, total=total)
        try:
            for record, experts in zip(store.layers, held, strict=True):
                extent = store.expert_extent(record.layer)
                memory = _native.huge_empty(len(experts) * self._expert_bytes)
                runs = list(_runs(experts))
                _read(extent, memory, runs, self._expert_bytes)
                _require_right(store, record.layer, memory, experts)
                self._add_region(extent, memory, runs)
                done += memory.nbytes
                if progress is not None and total > 0:
                    progress(done, total)
            if self._pinning is not None:
                self._pinning.release_reserve()
        except BaseException:
            self.close()
            raise
        if self._pinning is not None and self.pinned_bytes < total:
            text = refusal_notice(self.pinned_bytes, total, self._pinning.refusal)
            warnings.warn(text, MoechatWarning, stacklevel=2)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of experts that the GPU copies by itself."""
        return 0 if self._pinning is None else self._pinning.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of experts in memory."""
        return sum(records.nbytes for records in self.records)

    def link(self, copies: int = 1) -> _native.Link:
        """A link from here into the GPU's memory; REQUIRES: this object outlives it.

        Args:
            copies: See :attr:`moechat.offload.settings.LinkSettings.copies`.
        """
        return _native.cuda_link(
            self._regions,
            device=self._ordinal,
            buffer_bytes=self._record_bytes,
            buffers=_BUFFERS,
            threads=_FILE_READERS if self._reads_files else 0,
            copies=copies,
            checksums=self._checksums,
            record_bytes=self._record_bytes,
        )

    @property
    def _reads_files(self) -> bool:
        return any(memory is None for parts, *_ in self._regions for memory, *_ in parts)

    def close(self) -> None:
        """Free the memory; REQUIRES: the link has stopped. Harmless when repeated."""
        if self._pinning is not None:
            self._pinning.close()
        self._regions.clear()
        self.records.clear()

    def __del__(self) -> None:
        # Pinned memory must be unpinned before it is freed, after errors too.
        if "_pinning" in self.__dict__ and os.getpid() == self._process:
            self.close()

    def _add_region(self, extent: ExpertExtent, memory: Bytes, runs: list[tuple[int, int]]) -> None:
        """Pin a layer, and describe its parts in the order of its experts."""
        chunks = [] if self._pinning is None else self._pinning.pin(memory)
        ends = np.cumsum([0, *(chunk.nbytes for chunk, _ in chunks)])
        parts: list[_Part] = []
        reached = begin = 0  # in the layer, in memory
        for first, count in runs:
            if first * self._expert_bytes > reached:
                parts.append((None, first * self._expert_bytes - reached, False))
            end = begin + count * self._expert_bytes
            for (_, pinned), low, high in zip(chunks, ends, ends[1:], strict=False):
                low, high = max(begin, int(low)), min(end, int(high))
                if low < high:
                    parts.append((memory[low:high], high - low, pinned))
            begin, reached = end, (first + count) * self._expert_bytes
        if reached < extent.nbytes:
            parts.append((None, extent.nbytes - reached, False))
        self.records.append(memory)
        self._regions.append((parts, extent.nbytes, False, str(extent.path), extent.offset))


def _runs(experts: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """First expert and length of each run of neighbours in an ascending list."""
    for run in np.split(experts, np.flatnonzero(np.diff(experts) != 1) + 1):
        if len(run):
            yield int(run[0]), len(run)


def _require_right(store: Store, layer: int, records: Bytes, experts: npt.NDArray[np.int32]) -> None:
    """Compare the records of experts that were read with their checksums, where these are known.

    Raises:
        StoreDamagedError: Some differ.
    """
    known = store.record_checksums(layer)
    if known is None or len(experts) == 0:
        return
    geometry = store.geometry
    size = geometry.record_bytes
    step = -(-records.nbytes // size // _READERS) * size
    parts = [records[first : first + step] for first in range(0, records.nbytes, max(step, size))]
    with ThreadPoolExecutor(_READERS) as readers:
        found = np.concatenate(list(readers.map(lambda part: _native.record_checksums(part, size), parts)))
    wanted = known.reshape(-1, geometry.blocks_per_expert)[experts].reshape(-1)
    wrong = np.flatnonzero(found != wanted)
    if len(wrong):
        expert = int(experts[wrong[0] // geometry.blocks_per_expert])
        raise store.damaged_record(layer, expert, int(wrong[0]) % geometry.blocks_per_expert)


def _read(extent: ExpertExtent, into: Bytes, runs: list[tuple[int, int]], expert_bytes: int) -> None:
    """Read runs of experts of a layer, one behind the other, in pieces, by several threads, without filling
    the page cache.

    Raises:
        StoreDamagedError: The file cannot be read, or has become shorter.
        DoesNotFitError: There are not enough descriptors or memory.
    """
    view = memoryview(into)  # type: ignore[arg-type]
    pieces: list[tuple[int, int, int]] = []  # begin and end in memory, place in the file
    begin = 0
    for first, count in runs:
        end, place = begin + count * expert_bytes, extent.offset + first * expert_bytes
        for start in range(begin, end, _PIECE):
            pieces.append((start, min(start + _PIECE, end), place + start - begin))
        begin = end

    def piece(bounds: tuple[int, int, int]) -> None:
        start, end, place = bounds
        while start < end:
            count = os.preadv(file, [view[start:end]], place)
            if count == 0:
                raise OSError(0, "the file has become shorter")
            start, place = start + count, place + count

    try:
        file = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with ThreadPoolExecutor(_READERS) as readers:
                list(readers.map(piece, pieces))
            for first, count in runs:
                place = extent.offset + first * expert_bytes
                os.posix_fadvise(file, place, count * expert_bytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    except OSError as error:
        raise file_problem(extent.path, error, StoreDamagedError, "read") from error
