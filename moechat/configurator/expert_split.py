"""MoEpic's sub-problem: how many experts a layer caches with its share of the memory, and how much of each.

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
    """What ``ExpertSplit`` gives back, for a number of volumes at once (leading axis ``[variants]``).

    Attributes:
        experts: C, int64 ``[variants, layers]``; 0 where a layer has no memory.
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

    Equation 11 has no upper limit, constraint 8 has: θ is in (0, 1]. With less than V experts a layer simply
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
    """Equation 11 for one layer: the C in 1..N with the largest m; of equal ones the smallest C.

    The smallest, because fewer and larger parts are fewer bottoms to fetch where m does not tell them apart
    (a layer with as much memory as it can use, say). The paper leaves it open.

    Args:
        curves: Routing.
        layer: Which.
        volume: V_i, experts, float64 ``[variants]``.
        window: W_i, seconds, float64 ``[variants]``.
        load: ``T_load``, seconds.
        split: θ where it is given; of the C experts, all have that share, so C is at most V / θ.

    Returns:
        C and m, each ``[variants]``; 0 experts where V is 0.
    """
    counts = np.arange(1, curves.experts + 1, dtype=np.float64)
    theta = split_ratio(volume[:, None], counts)
    if split is not None:
        # Of the memory for θ·C experts at most V is there.
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
    """Solve layer after layer; each leaves the next one its window (``ExpertSplit``, algorithm 1).

    The search itself calls the native writing of this, :meth:`moechat._native.LayerPlan.split`.

    Args:
        curves: Routing.
        model: Times of a layer by m; MoEpic's is :class:`moechat.configurator.exposure.PaperModel`.
        volumes: V, experts, float64 ``[variants, layers]``.
        split: θ where it is given.
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
