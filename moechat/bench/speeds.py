"""How fast this machine moves and computes expert blocks."""

from __future__ import annotations

import mmap
import time

import numpy as np
import numpy.typing as npt
import torch

from moechat import _native
from moechat.errors import MoechatError
from moechat.offload.experts import ExpertCounters, ExpertLayer
from moechat.offload.settings import LinkSettings
from moechat.store.store import Store

_MOST_BYTES = 1 << 30
_COMPUTE_SECONDS = 0.3
_COMPUTE_STRETCHES = 5
_LINK_SECONDS = 2.0
_LINK_WINDOW_BYTES = 64 << 20
_WAIT_SECONDS = 0.5


def compute_rate(store: Store, top_k: int, *, seed: int = 0) -> float:
    """Bytes of expert blocks that one token's pass computes a second, from memory that is too large for
    caches.

    Args:
        store: Layer 0 of it is read, at most a gibibyte.
        top_k: Experts a token.
        seed: Of the choices.
    """
    geometry = store.geometry
    experts = min(geometry.num_experts, max(top_k, _MOST_BYTES // geometry.expert_bytes))
    records = np.array(store.expert_layer(store.layers[0].layer)[:experts])
    counters = ExpertCounters()
    layer = ExpertLayer(geometry, records, counters)
    generator = np.random.default_rng(seed)
    hidden = torch.from_numpy(generator.standard_normal((1, geometry.hidden_size), dtype=np.float32))
    weights = torch.full((1, top_k), 1.0 / top_k)
    choices = [
        torch.from_numpy(generator.permutation(experts)[None, :top_k].astype(np.int64)) for _ in range(64)
    ]
    for choice in choices[:4]:
        layer.forward(hidden, choice, weights)
    # The best of several stretches: what else the machine does can only make it slower.
    best = 0.0
    for _ in range(_COMPUTE_STRETCHES):
        counters.bytes_read = 0
        started = time.perf_counter()
        passes = 0
        while (elapsed := time.perf_counter() - started) < _COMPUTE_SECONDS or passes < 8:
            layer.forward(hidden, choices[passes % len(choices)], weights)
            passes += 1
        best = max(best, counters.bytes_read / elapsed)
    return best


def link_bandwidth(store: Store, settings: LinkSettings, *, seed: int = 0) -> float:
    """Bytes a second at which the file link reads experts in random order.

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
    blocks, record = geometry.blocks_per_expert, geometry.record_bytes
    experts = max(2, min(geometry.num_experts * len(extents), _LINK_WINDOW_BYTES // geometry.expert_bytes))
    slots = experts * blocks
    target = _aligned(slots, record)
    generator = np.random.default_rng(seed)
    pairs = [(layer, expert) for layer in range(len(extents)) for expert in range(geometry.num_experts)]
    order = generator.permutation(len(pairs))
    free = list(range(experts))
    left = [0] * experts
    taken = moved = 0
    link.open(slots)
    started = time.perf_counter()
    try:
        while True:
            elapsed = time.perf_counter() - started
            while free and elapsed < _LINK_SECONDS:
                place = free.pop()
                layer, expert = pairs[int(order[taken % len(order)])]
                taken += 1
                left[place] = blocks
                base = expert * geometry.expert_bytes
                link.submit(
                    [
                        (place * blocks + block, layer, base + block * record, record, 0)
                        for block in range(blocks)
                    ],
                    target,
                )
            if len(free) == experts:
                break
            if not link.wait(_WAIT_SECONDS) and time.perf_counter() - started > settings.stall_seconds:
                raise MoechatError(f"nothing can be read from {store.path} for {settings.stall_seconds:g} s")
            for slot, error in link.poll():
                if error:
                    raise MoechatError(f"a block of {store.path} cannot be read: error {error}")
                moved += record
                left[slot // blocks] -= 1
                if not left[slot // blocks]:
                    free.append(slot // blocks)
        return moved / (time.perf_counter() - started)
    finally:
        link.stop(_LINK_SECONDS)


def _aligned(rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Zeroed uint8 ``[rows, columns]`` at the beginning of a page."""
    return np.ndarray((rows, columns), dtype=np.uint8, buffer=mmap.mmap(-1, rows * columns))
