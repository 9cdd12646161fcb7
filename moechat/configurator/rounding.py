"""Rounds shares of experts to whole blocks of whole experts, within the budget."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moechat.configurator.curves import Floats, RoutingCurves
from moechat.configurator.targets import BLOCKS, EXPERTS, Targets, pages_of
from moechat.configurator.uniform import kept_blocks


def rounded_down(
    volumes: Floats,
    experts: npt.NDArray[np.int64],
    blocks: int,
    pages: int,
    split: float | None = None,
) -> Targets:
    """Targets within each layer's volume: ``b = ⌊θ·B⌋``, at least 1, and a smaller C if necessary.

    Args:
        volumes: V, experts, float64 ``[layers]``.
        experts: C, int64 ``[layers]``.
        blocks: B.
        pages: Limit of the total; layers with the largest targets are reduced first.
        split: A fixed θ; ``None``: free.
    """
    held = np.floor(volumes * blocks + 1e-6).astype(np.int64)
    count = np.maximum(experts, 1)
    kept = np.clip(held // count, 1, blocks)
    if split is not None:
        kept = np.full_like(kept, kept_blocks(split, blocks))
    count = np.where(experts > 0, np.minimum(experts, held // kept), 0)
    targets = np.stack([count, kept], axis=1).astype(np.int32)
    while pages_of(targets) > pages:
        targets[int((targets[:, EXPERTS].astype(np.int64) * targets[:, BLOCKS]).argmax()), EXPERTS] -= 1
    return targets


def filled(
    targets: Targets,
    curves: RoutingCurves,
    reach: Floats,
    blocks: int,
    pages: int,
    split: float | None = None,
    least_gain: float = -math.inf,
) -> Targets:
    """Distribute remaining pages greedily: one expert, or one block of each expert, of a layer at a time.

    The step with the largest gain in m per page comes first. By default steps without gain are taken too,
    because unused pages are worthless.

    Args:
        targets: Targets within the budget.
        curves: Routing.
        reach: Windows in loads, float64 ``[layers]``.
        blocks: B.
        pages: Budget.
        split: A fixed θ, so that only the number of experts grows; ``None``: free.
        least_gain: Smallest gain of a step.
    """
    now = targets.tolist()
    left = pages - pages_of(targets)
    windows = reach.tolist()

    def steps(layer: int) -> list[tuple[float, int, list[int]]]:
        experts, kept = now[layer]
        found = []
        here = curves.loaded(layer, experts, kept / blocks if experts else 0.0, windows[layer])
        choices = []
        if split is not None and not experts:
            kept = kept_blocks(split, blocks)
        if experts < curves.experts:
            choices.append([experts + 1, kept])
        if split is None and experts and kept < blocks:
            choices.append([experts, kept + 1])
        for count, part in choices:
            price = count * part - experts * kept
            gain = curves.loaded(layer, count, part / blocks, windows[layer]) - here
            if gain >= least_gain:
                found.append((gain / price, price, [count, part]))
        return found

    offers = [steps(layer) for layer in range(len(now))]
    while True:
        best: tuple[float, int, int, list[int]] | None = None
        for layer, some in enumerate(offers):
            for rate, price, target in some:
                if price <= left and (best is None or rate > best[0]):
                    best = rate, price, layer, target
        if best is None:
            return np.array(now, dtype=np.int32)
        _, price, layer, target = best
        now[layer] = target
        left -= price
        offers[layer] = steps(layer)
