"""Targets of a cache, looked at through a model: what is loaded and what is exposed, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moechat.configurator.curves import Floats, RoutingCurves
from moechat.configurator.exposure import LayerModel, first_window

Targets = npt.NDArray[np.int32]
# By so many loads a window is longer to see what it is worth.
_MORE = 0.02


@dataclass(frozen=True)
class Evaluation:
    """What targets come to.

    Attributes:
        loaded: m, float64 ``[layers]``.
        exposed: T, seconds, float64 ``[layers]``.
        windows: W, seconds, float64 ``[layers]``: for the prefetches of each layer.
        prices: Exposed seconds, of this layer and those after it, that a second more of a layer's window
            would save: float64 ``[layers]``.
    """

    loaded: Floats
    exposed: Floats
    windows: Floats
    prices: Floats

    @property
    def total(self) -> float:
        """Exposed seconds a token."""
        return float(self.exposed.sum())

    @property
    def score(self) -> tuple[float, float]:
        """Smaller is better: exposed time, then what is missing."""
        return self.total, -float(self.loaded.sum())


def evaluate(targets: Targets, curves: RoutingCurves, model: LayerModel, blocks: int) -> Evaluation:
    """Go through the layers in order; each leaves the next one its window.

    Args:
        targets: int32 ``[layers, 2]``: experts and blocks of each.
        curves: Routing.
        model: Of a layer's times.
        blocks: B, blocks of an expert.
    """
    return evaluate_all([targets], curves, model, blocks)[0]


def evaluate_all(
    candidates: Sequence[Targets], curves: RoutingCurves, model: LayerModel, blocks: int
) -> list[Evaluation]:
    """:func:`evaluate` for several targets in one go, which takes hardly longer than for one."""
    count, load = len(candidates), model.costs.load
    shape = (count, curves.layers)
    loaded, exposed, windows = np.empty(shape), np.empty(shape), np.empty(shape)
    saved, handed = np.empty(shape), np.empty(shape)
    more = _MORE * load
    window = np.full(count, first_window(model.costs))
    every = np.stack(candidates)
    for layer in range(curves.layers):
        windows[:, layer] = window
        # With the window as it is, and with a little more.
        twice = np.concatenate([every[:, layer], every[:, layer]])
        reach = np.concatenate([window, window + more])
        m, time, left = outcomes(layer, twice, reach, curves, model, blocks)
        loaded[:, layer], exposed[:, layer], window = m[:count], time[:count], left[:count]
        saved[:, layer] = (time[:count] - time[count:]) / more
        handed[:, layer] = (left[count:] - left[:count]) / more
    prices = np.empty(shape)
    price = np.zeros(count)
    for layer in range(curves.layers - 1, -1, -1):
        price = saved[:, layer] + handed[:, layer] * price
        prices[:, layer] = price
    return [Evaluation(*rows) for rows in zip(loaded, exposed, windows, prices, strict=True)]


def outcomes(
    layer: int,
    targets: npt.NDArray[np.integer[Any]],
    windows: Floats,
    curves: RoutingCurves,
    model: LayerModel,
    blocks: int,
) -> tuple[Floats, Floats, Floats]:
    """What several targets of one layer, each with a window of its own, come to.

    Args:
        layer: Which.
        targets: Experts and blocks of each, ``[targets, 2]``.
        windows: Seconds, ``[targets]``.
        curves: Routing.
        model: Of a layer's times.
        blocks: B.

    Returns:
        m, T and the window of the next layer, each float64 ``[targets]``.
    """
    experts, kept = targets[:, 0].astype(np.int64), targets[:, 1]
    theta = np.where(experts > 0, kept / blocks, 0.0)
    chances, loaded = curves.amounts(layer, experts, theta, windows / model.costs.load, model.averages)
    exposed, left = model.times(loaded.astype(np.float64, copy=False))
    means = [(chances * values).sum(axis=0) for values in (loaded, exposed, left)]
    return means[0], means[1], means[2]


def pages_of(targets: Targets) -> int:
    """Pages that targets take."""
    return int((targets[:, 0].astype(np.int64) * targets[:, 1]).sum())
