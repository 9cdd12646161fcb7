"""Chooses the experts that the host's memory holds behind a GPU; the others stay in their files. Pure.

The choice is by experts and over all layers: a model that is a tenth too large for RAM leaves the tenth of
its experts that is used least in files. With whole layers in files every miss of such a layer would go to the
disk; as it is, few misses do. Plans and loading both count with :func:`experts_held`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MEBI = 1 << 20
# RAM that a process with torch's CUDA libraries takes.
HOST_BYTES = 1280 * MEBI

# For each layer: int32, ascending.
HeldExperts = list[npt.NDArray[np.int32]]


def experts_held(budget: int, experts: int, expert_bytes: int, process: int = 0) -> int:
    """Number of experts that fit into RAM.

    Args:
        budget: Bytes of RAM for the whole process.
        experts: Experts of all layers.
        expert_bytes: Bytes of the records of one.
        process: Bytes that the process has already; it will have :data:`HOST_BYTES` at least.
    """
    room = budget - max(process, HOST_BYTES)
    return max(0, min(experts, room // expert_bytes))


def choose_experts(
    layers: int, experts: int, count: int, activations: npt.NDArray[np.int64] | None
) -> HeldExperts:
    """The experts that memory holds, by layer.

    The most activated ones of all layers, since every layer chooses as many for a token. Without recorded
    routing, and of equal ones, every layer gets as many as any other: a token then waits for a few reads in
    each layer, which other layers' work can hide, and not for a layer that has to be read as a whole.

    Args:
        layers: Number of expert layers.
        experts: Experts of a layer.
        count: How many to choose; see :func:`experts_held`.
        activations: ``[layers, experts]``: how often each was activated, if that was recorded.
    """
    if activations is None:
        activations = np.zeros((layers, experts), np.int64)
    # The place of an expert among those of its layer, the most activated first.
    places = np.argsort(np.argsort(-activations, axis=1, kind="stable"), axis=1)
    layer_of = np.broadcast_to(np.arange(layers)[:, None], (layers, experts))
    order = np.lexsort((layer_of.ravel(), places.ravel(), -activations.ravel()))
    held = np.zeros(layers * experts, bool)
    held[order[:count]] = True
    return [np.flatnonzero(layer).astype(np.int32) for layer in held.reshape(layers, experts)]
