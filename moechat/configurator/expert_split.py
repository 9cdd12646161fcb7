"""MoEpic's sub-problem: the number of experts that a layer caches in its share of memory, and their split.

Section 3.4.2, equations 9 to 11, and the function ``ExpertSplit`` of algorithm 1. Volumes are in experts
(``V / U_e``), so that ``θ = V / C`` as in equation 11.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moechat.configurator.curves import Floats, RoutingCurves, amount, prefetch_sizes
from moechat.configurator.exposure import LayerModel, first_window


@dataclass(frozen=True)
class Split:
    """Result of ``ExpertSplit`` for several volumes (leading axis ``[variants]``).

    Attributes:
        experts: C, int64 ``[variants, layers]``; 0 for a layer without memory.
        loaded: m, float64 ``[variants, layers]``.
        exposed: T, seconds, float64 ``[variants, layers]``.
        windows: W, seconds, float64 ``[variants, layers]``.
    """

    experts: npt.NDArray[np.int64]
    loaded: Floats
    exposed: Floats
    windows: Floats


def split_ratio(volume: Floats, experts: Floats) -> Floats:
    """``θ = min(1, V / C)``.

    Equation 11 has no upper limit, but constraint 8 limits θ to (0, 1]. With fewer than V experts a layer
    does not use all of its share.
    """
    return np.minimum(volume / experts, 1.0)


def solve(
    curves: RoutingCurves,
    layer: int,
    volume: Floats,
    window: Floats,
    load: float,
    split: float | None = None,
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Equation 11 for one layer: the C in 1..N with the largest m; the smallest of equal ones.

    The paper does not define the choice between equal m (of a layer with more memory than it can use, for
    example); with the smallest C, fewer experts have missing bottoms to fetch.

    Args:
        curves: Routing.
        layer: Index of the layer.
        volume: V_i, experts, float64 ``[variants]``.
        window: W_i, seconds, float64 ``[variants]``.
        load: ``T_load``, seconds.
        split: A fixed θ, which limits C to V / θ; ``None``: free.

    Returns:
        C and m, each ``[variants]``; C is 0 if V is 0.
    """
    counts = np.arange(1, curves.experts + 1, dtype=np.float64)
    theta = split_ratio(volume[:, None], counts)
    if split is not None:
        # C experts need θ·C of memory, at most V.
        theta = np.where(counts * split <= volume[:, None] + 1e-12, split, 0.0)
    loaded = amount(
        curves.top_k,
        curves.hit[layer, 1:],
        curves.accuracy[layer][:, None, None],
        prefetch_sizes(curves.cached[layer, :, None, 1:], theta),
        theta,
        (window / load)[:, None],
    )
    best = loaded.argmax(axis=1)
    experts = np.where(theta[np.arange(len(best)), best] > 0, best + 1, 0)
    return experts, loaded[np.arange(len(best)), best]


def expert_split(
    curves: RoutingCurves, model: LayerModel, volumes: Floats, split: float | None = None
) -> Split:
    """Solve the layers in order; each determines the window of the next one (``ExpertSplit``, algorithm 1).

    The reference for the native implementation :meth:`moechat._native.LayerPlan.split`, which the search
    uses.

    Args:
        curves: Routing.
        model: Times of a layer by m; MoEpic's is :class:`moechat.configurator.exposure.PaperModel`.
        volumes: V, experts, float64 ``[variants, layers]``.
        split: A fixed θ; ``None``: free.
    """
    shape = volumes.shape
    experts = np.empty(shape, dtype=np.int64)
    loaded, exposed, windows = np.empty(shape), np.empty(shape), np.empty(shape)
    window = np.full(shape[0], first_window(model.costs))
    for layer in range(shape[1]):
        windows[:, layer] = window
        experts[:, layer], loaded[:, layer] = solve(
            curves, layer, volumes[:, layer], window, model.costs.load, split
        )
        exposed[:, layer], window = model.times(loaded[:, layer])
    return Split(experts, loaded, exposed, windows)
