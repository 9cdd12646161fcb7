"""Links from a store into host memory."""

from __future__ import annotations

from pathlib import Path

from moechat import _native
from moechat.errors import StoreDamagedError
from moechat.offload.settings import LinkSettings
from moechat.store.file_problems import file_problem, lacks_resources
from moechat.store.store import Store


def open_link(store: Store, settings: LinkSettings) -> _native.Link:
    """A link from a store's files, or a simulated one from its mapped records, into host memory.

    Raises:
        StoreDamagedError: A file cannot be opened.
        DoesNotFitError: There are not enough descriptors or memory.
    """
    if settings.kind == "sim":
        return _native.sim_link(
            [store.expert_layer(record.layer).reshape(-1) for record in store.layers],
            bandwidth=settings.bandwidth,
            latency=settings.latency,
            jitter=settings.jitter,
            seed=settings.seed,
            reorder=settings.reorder,
            in_flight_bytes=settings.in_flight_bytes,
            copy=settings.copy,
        )
    extents = [store.expert_extent(record.layer) for record in store.layers]
    sums = [store.record_checksums(record.layer) for record in store.layers] if settings.checks else []
    try:
        return _native.file_link(
            [(str(extent.path), extent.offset, extent.nbytes) for extent in extents],
            io=settings.io,
            direct=settings.direct,
            in_flight_bytes=settings.in_flight_bytes,
            checksums=sums,
            record_bytes=store.geometry.record_bytes,
        )
    except OSError as problem:
        if problem.filename == "io_uring" and not lacks_resources(problem):
            raise  # that was asked for, and is not to be had here
        path = store.path if problem.filename in (None, "io_uring") else Path(problem.filename)
        raise file_problem(path, problem, StoreDamagedError, "opened") from problem
