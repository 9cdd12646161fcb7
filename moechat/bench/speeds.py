"""How fast this machine moves and computes the expert blocks of a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from moechat import _native
from moechat.errors import MoechatError
from moechat.hardware.measure_cpu import Experts
from moechat.hardware.measure_cpu import compute_rate as rate_of
from moechat.hardware.measure_link import stream
from moechat.offload.settings import LinkSettings
from moechat.store.store import Store

_MOST_BYTES = 1 << 30
_COMPUTE_SECONDS = 1.5
_LINK_SECONDS = 2.0


def compute_rate(store: Store, top_k: int, *, seed: int = 0) -> float:
    """Bytes of expert blocks that one token's pass computes a second, from memory that is too large for
    caches.

    Args:
        store: Layer 0 of it is read, at most a gibibyte.
        top_k: Experts a token.
        seed: Of the choices.
    """
    geometry = store.geometry
    count = min(geometry.num_experts, max(top_k, _MOST_BYTES // geometry.expert_bytes))
    records = np.array(store.expert_layer(store.layers[0].layer)[:count])
    activation = (geometry.activation.value, geometry.alpha, geometry.limit)
    experts = Experts(geometry.layout, records, activation)
    return rate_of(experts, _native.num_threads(), seconds=_COMPUTE_SECONDS, top_k=top_k, seed=seed)


def link_bandwidth(
    store: Store, settings: LinkSettings, *, seconds: float = _LINK_SECONDS, seed: int = 0
) -> float:
    """Bytes a second at which the file link reads experts in random order.

    Args:
        store: What it reads.
        settings: Of the link.
        seconds: That it is kept busy.
        seed: Of the order.

    Raises:
        MoechatError: A block cannot be read, or nothing arrives.
    """
    geometry = store.geometry
    extents = [store.expert_extent(record.layer) for record in store.layers]
    link = _native.file_link(
        [(str(extent.path), extent.offset, extent.nbytes) for extent in extents],
        io=settings.io,
        direct=settings.direct,
        in_flight_bytes=settings.in_flight_bytes,
    )
    try:
        return stream(
            link,
            geometry.expert_bytes,
            geometry.record_bytes,
            seconds=seconds,
            seed=seed,
            stall_seconds=settings.stall_seconds,
        ).rate
    except MoechatError as error:
        raise MoechatError(f"the speed of {store.path} cannot be measured: {error}") from error


@contextmanager
def busy_link(store: Store, settings: LinkSettings, seconds: float) -> Iterator[None]:
    """Keep the file link busy meanwhile, with blocks that nobody needs; for so many seconds at most.

    What reading takes of processors and memory is then missing elsewhere. A link that fails is told at the
    end.

    Raises:
        MoechatError: A block cannot be read, or nothing arrives.
    """
    failed: list[MoechatError] = []

    def read() -> None:
        try:
            link_bandwidth(store, settings, seconds=seconds, seed=1)
        except MoechatError as error:
            failed.append(error)

    reader = threading.Thread(target=read, name="moechat-busy-link")
    reader.start()
    try:
        yield
    finally:
        reader.join()
    if failed:
        raise failed[0]
