"""From shares of experts to pages: whole blocks of whole experts, within the budget."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moechat.configurator.curves import Floats, RoutingCurves
from moechat.configurator.targets import Targets, pages_of
from moechat.configurator.uniform import kept_blocks


def rounded_down(
    volumes: Floats,
    experts: npt.NDArray[np.int64],
    blocks: int,
    pages: int,
    split: float | None = None,
) -> Targets:
    """Targets that no layer's volume is exceeded by: ``b = ⌊θ·B⌋``, at least 1, and C fewer if need be.

    Args:
        volumes: V, experts, float64 ``[layers]``.
        experts: C, int64 ``[layers]``.
        blocks: B.
        pages: At most so many in all; layers with the largest targets give what is too much.
        split: θ where it is given.
    """
    held = np.floor(volumes * blocks + 1e-6).astype(np.int64)
    count = np.maximum(experts, 1)
    kept = np.clip(held // count, 1, blocks)
    if split is not None:
        kept = np.full_like(kept, kept_blocks(split, blocks))
    count = np.where(experts > 0, np.minimum(experts, held // kept), 0)
    targets = np.stack([count, kept], axis=1).astype(np.int32)
    while pages_of(targets) > pages:
        targets[int((targets[:, 0].astype(np.int64) * targets[:, 1]).argmax()), 0] -= 1
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
    """Hand out what is left, one expert or one block of each expert of a layer at a time, by gain.

    The step that brings the most activated experts near for a page comes first. One that brings nothing is
    still better than a page that nobody has.

    Args:
        targets: Within the budget.
        curves: Routing.
        reach: Windows in loads, float64 ``[layers]``.
        blocks: B.
        pages: Budget.
        split: θ where it is given: only the number of experts grows.
        least_gain: Steps that bring less are not made.
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
