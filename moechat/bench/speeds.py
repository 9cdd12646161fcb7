"""Measures how fast this machine moves and computes the expert blocks of a store."""

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
from moechat.offload.links import open_link
from moechat.offload.settings import LinkSettings
from moechat.store.store import Store

_MOST_BYTES = 1 << 30
_COMPUTE_SECONDS = 1.5
_LINK_SECONDS = 2.0


def compute_rate(store: Store, top_k: int, *, seed: int = 0) -> float:
    """Bytes of expert blocks computed per second for one token, from memory larger than the caches.

    Args:
        store: The store; up to 1 GiB of its layer 0 is read.
        top_k: Experts per token.
        seed: Random seed of the choices.
    """
    geometry = store.geometry
    count = min(geometry.num_experts, max(top_k, _MOST_BYTES // geometry.expert_bytes))
    records = np.array(store.expert_layer(store.layers[0].layer)[:count])
    experts = Experts(geometry.layout, records, geometry.gate.native)
    return rate_of(experts, _native.num_threads(), seconds=_COMPUTE_SECONDS, top_k=top_k, seed=seed)


def link_bandwidth(
    store: Store, settings: LinkSettings, *, seconds: float = _LINK_SECONDS, seed: int = 0
) -> float:
    """Bytes per second at which the file link reads experts in random order.

    Args:
        store: The store to read.
        settings: Settings of the link.
        seconds: Duration of the measurement.
        seed: Random seed of the order.

    Raises:
        MoechatError: A read fails, or the link stalls.
    """
    geometry = store.geometry
    try:
        return stream(
            open_link(store, settings),
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
    """Keep the file link busy with unused blocks during the block, for at most ``seconds``.

    This takes processor time and memory bandwidth from the block. Errors of the link are raised at its end.

    Raises:
        MoechatError: A read fails, or the link stalls.
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
