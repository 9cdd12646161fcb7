"""Measures the file link on the disk of the model library, by reading stores or a scratch file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.hardware.measure_budget import EXPERT_BYTES, LARGE_BYTES, RECORD_BYTES, Budget, format_size
from moechat.hardware.measure_link import Moved, latency, stream
from moechat.hardware.profile import Figure, LinkFigures
from moechat.hardware.resident_pages import touched_pages
from moechat.hardware.scratch import Extent, drop_cached, reads_direct, scratch_file, stored_files

Report = Callable[[str], None]


@dataclass(frozen=True)
class ReadableDisk:
    """Files to read through the link.

    Attributes:
        extents: Parts of files.
        stores: Whether they are files of stores; else a scratch file.
        direct: Whether they are read with direct I/O, bypassing the page cache.
        window: Target memory, allocated once, so that slow page faults are not measured.
    """

    extents: list[Extent]
    stores: bool
    direct: bool
    window: npt.NDArray[np.uint8] = field(default_factory=lambda: touched_pages(1, 2 * LARGE_BYTES))

    @property
    def nbytes(self) -> int:
        """Total bytes of the extents."""
        return sum(extent.nbytes for extent in self.extents)

    def stream(self, unit_bytes: int, seconds: float, seed: int) -> Moved:
        """Read units in random order; see :func:`moechat.hardware.measure_link.stream`."""
        return stream(
            self._open(),
            unit_bytes,
            RECORD_BYTES,
            seconds=seconds,
            window=self.window,
            # A second read through the page cache would measure memory.
            once=not self.direct,
            seed=seed,
        )

    def figures(self, budget: Budget, report: Report) -> LinkFigures:
        """Measure bandwidth and latency of the link alone, at three sizes.

        Raises:
            OSError: A file cannot be opened.
            MoechatError: A read fails or stalls.
        """
        bandwidth = {}
        for nbytes in (RECORD_BYTES, EXPERT_BYTES, LARGE_BYTES):
            report(f"disk: reading {format_size(nbytes)} at a time")
            moved = self.stream(nbytes, budget.link_seconds, seed=nbytes)
            how = f"random order, transfers of {format_size(RECORD_BYTES)}"
            bandwidth[nbytes] = Figure(moved.rate, "measured", how)
        report("disk: latency")
        latencies = {nbytes: self._latency(nbytes, budget.latency_seconds) for nbytes in bandwidth}
        return LinkFigures("file", bandwidth, latencies[RECORD_BYTES], latencies=latencies)

    def _latency(self, unit_bytes: int, seconds: float) -> Figure:
        waited = latency(
            self._open(),
            unit_bytes,
            RECORD_BYTES,
            seconds=seconds,
            window=self.window,
            once=not self.direct,
            seed=unit_bytes + 1,  # other offsets than the bandwidth measurement
        )
        how = f"median, one at a time, in transfers of {format_size(RECORD_BYTES)}"
        return Figure(waited, "measured", how)

    def _open(self) -> _native.Link:
        if not self.direct:
            for extent in self.extents:
                drop_cached(extent.path)
        return _native.file_link([(item.path, item.offset, item.nbytes) for item in self.extents])


@contextmanager
def readable_disk(library: Path, budget: Budget, report: Report) -> Iterator[ReadableDisk]:
    """Files on the disk of the library: those of stores if they are large enough, else a scratch file.

    Args:
        library: Directory of stores.
        budget: Sizes.
        report: Called with a description of writes.

    Raises:
        NoRoomError: A scratch file is needed and cannot be written.
        OSError: A file cannot be opened.
    """
    with ExitStack() as stack:
        extents = stored_files(library, budget.scratch_bytes, LARGE_BYTES)
        stores = bool(extents)
        if not stores:
            report(f"disk: writing {format_size(budget.scratch_bytes)} to read from")
            file = scratch_file(
                library,
                budget.scratch_bytes,
                least=budget.least_scratch,
                keep_free=budget.keep_free,
                seconds=budget.write_seconds,
                report=report,
            )
            extents = [stack.enter_context(file)]
        yield ReadableDisk(extents, stores, all(reads_direct(extent.path) for extent in extents))
