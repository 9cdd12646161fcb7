"""Exhaustive search over all allocations: the reference for the other methods on small cases."""

from __future__ import annotations

import numpy as np

from moechat.configurator.curves import RoutingCurves
from moechat.configurator.exposure import LayerModel, first_window
from moechat.configurator.targets import Targets, outcomes

MOST_ALLOCATIONS = 2_000_000


def best_allocation(
    curves: RoutingCurves, model: LayerModel, blocks: int, pages: int, *, split: int | None = None
) -> tuple[Targets, float]:
    """The first targets with the least exposed time, including all effects on windows.

    Args:
        curves: Routing.
        model: Times of a layer by m.
        blocks: B.
        pages: Budget.
        split: Blocks kept of an expert; ``None``: every number is tried.

    Returns:
        Targets, and exposed seconds per token.

    Raises:
        ValueError: There are more than ``MOST_ALLOCATIONS`` allocations.
    """
    kept = range(1, blocks + 1) if split is None else (split,)
    options = [(0, 1), *((c, b) for c in range(1, curves.experts + 1) for b in kept)]
    if len(options) ** curves.layers > MOST_ALLOCATIONS:
        raise ValueError(f"{len(options)} options in {curves.layers} layers are too many to try")
    best_total, best = np.inf, [(0, 1)] * curves.layers
    chosen: list[tuple[int, int]] = []

    def descend(layer: int, left: int, window: float, total: float) -> None:
        nonlocal best_total, best
        if total >= best_total:
            return
        if layer == curves.layers:
            best_total, best = total, list(chosen)
            return
        fitting = [option for option in options if option[0] * option[1] <= left]
        reach = np.full(len(fitting), window)
        _, exposed, windows = outcomes(layer, np.array(fitting), reach, curves, model, blocks)
        for option, more, after in zip(fitting, exposed.tolist(), windows.tolist(), strict=True):
            chosen.append(option)
            descend(layer + 1, left - option[0] * option[1], after, total + more)
            chosen.pop()

    descend(0, pages, first_window(model.costs), 0.0)
    return np.array(best, dtype=np.int32), float(best_total)
