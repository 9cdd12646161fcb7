"""Targets without search: equal for all layers, whole layers, or popular experts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moechat.configurator.targets import EXPERTS, Targets


def kept_blocks(split: float, blocks: int) -> int:
    """``b = round(θ·B)``, at least 1."""
    return min(blocks, max(1, round(split * blocks)))


def same_for_all(layers: int, experts: int, blocks: int, pages: int, split: float) -> Targets:
    """The same split and, up to one, the same number of experts for every layer.

    If all experts have their share, the rest increases the split (MoEpic: θ = min(1, V / (C·U_e))), first in
    the first layers.
    """
    kept = kept_blocks(split, blocks)
    count, more = divmod(pages // kept, layers)
    if count >= experts:
        kept, rest = divmod(pages // experts, layers)
        targets = np.full((layers, 2), (experts, min(blocks, kept)), dtype=np.int32)
        if kept < blocks:
            targets[:rest, 1] += 1
        return targets
    targets = np.full((layers, 2), (count, kept), dtype=np.int32)
    targets[:more, 0] += 1
    return targets


def first_layers(layers: int, experts: int, blocks: int, pages: int, split: float) -> Targets:
    """All experts of the first layers, as far as the pages suffice; the last one may be partial."""
    kept = kept_blocks(split, blocks)
    full, more = divmod(pages // kept, experts)
    targets = np.full((layers, 2), (0, kept), dtype=np.int32)
    targets[:full, 0] = experts
    if full < layers:
        targets[full, 0] = more
    return targets


def most_popular(activations: npt.NDArray[np.int64], blocks: int, pages: int, split: float) -> Targets:
    """For each layer, the number of its experts among the most popular ones of the whole model.

    Equally popular experts are taken from the layers in turn, so that without counts all layers have the same
    number. Fiddler and Brainstorm place experts this way; the policy chooses the experts within a layer.
    """
    layers, experts = activations.shape
    kept = kept_blocks(split, blocks)
    descending = -np.sort(-activations, axis=1)
    place = np.broadcast_to(np.arange(experts), descending.shape)
    layer = np.broadcast_to(np.arange(layers)[:, None], descending.shape)
    order = np.lexsort((layer.ravel(), place.ravel(), -descending.ravel()))
    chosen = layer.ravel()[order[: pages // kept]]
    targets = np.full((layers, 2), (0, kept), dtype=np.int32)
    targets[:, EXPERTS] = np.bincount(chosen, minlength=layers)
    return targets
