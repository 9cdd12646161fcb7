"""Targets of a cache, looked at through a model: what is loaded and what is exposed, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moechat._native import LayerPlan
from moechat.configurator.curves import Floats, RoutingCurves
from moechat.configurator.exposure import LayerModel
from moechat.configurator.native import native_plan

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
    return evaluated(candidates, native_plan(curves, model), blocks)


def evaluated(candidates: Sequence[Targets], plan: LayerPlan, blocks: int) -> list[Evaluation]:
    """:func:`evaluate_all` where the native tables are there already."""
    results = plan.evaluate(*_arguments(np.stack(candidates), blocks), _MORE)
    return [Evaluation(*rows) for rows in zip(*results, strict=True)]


def exposed_totals(candidates: Targets, plan: LayerPlan, blocks: int) -> Floats:
    """Exposed seconds a token of several targets, ``[candidates, layers, 2]``, and nothing else."""
    return np.asarray(plan.evaluate(*_arguments(candidates, blocks), _MORE)[1].sum(axis=1))


def _arguments(targets: Targets, blocks: int) -> tuple[npt.NDArray[np.int64], Floats]:
    experts = np.ascontiguousarray(targets[..., 0], dtype=np.int64)
    return experts, np.where(experts > 0, targets[..., 1] / blocks, 0.0)


def outcomes(
    layer: int,
    targets: npt.NDArray[np.integer[Any]],
    windows: Floats,
    curves: RoutingCurves,
    model: LayerModel,
    blocks: int,
) -> tuple[Floats, Floats, Floats]:
    """What several targets of one layer, each with a window of its own, come to: the native loops, in Python.

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
    exposed, left = model.times(loaded)
    means = [(chances * values).sum(axis=0) for values in (loaded, exposed, left)]
    return means[0], means[1], means[2]


def pages_of(targets: Targets) -> int:
    """Pages that targets take."""
    return int((targets[:, 0].astype(np.int64) * targets[:, 1]).sum())
