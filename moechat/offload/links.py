"""Links from a store into host memory."""

from __future__ import annotations

from moechat import _native
from moechat.offload.settings import LinkSettings
from moechat.store.store import Store


def open_link(store: Store, settings: LinkSettings) -> _native.Link:
    """A link from a store's files, or a simulated one from its mapped records, into host memory."""
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
    return _native.file_link(
        [(str(extent.path), extent.offset, extent.nbytes) for extent in extents],
        io=settings.io,
        direct=settings.direct,
        in_flight_bytes=settings.in_flight_bytes,
    )
