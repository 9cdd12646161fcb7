"""Evaluates targets of a cache: loaded experts and exposed time of each layer."""

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
EXPERTS, BLOCKS = 0, 1  # columns of targets: experts kept, and blocks kept of each
# Increment of a window, in loads, for the numerical derivative that gives its price.
_MORE = 0.02


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of targets.

    Attributes:
        loaded: m, float64 ``[layers]``.
        exposed: T, seconds, float64 ``[layers]``.
        windows: W, seconds, float64 ``[layers]``: for the prefetches of each layer.
        prices: float64 ``[layers]``: exposed seconds of a layer and all later ones saved per second of
            additional window.
    """

    loaded: Floats
    exposed: Floats
    windows: Floats
    prices: Floats

    @property
    def total(self) -> float:
        """Exposed seconds per token."""
        return float(self.exposed.sum())

    @property
    def score(self) -> tuple[float, float]:
        """Sort key, smaller is better: exposed time, then missing experts."""
        return self.total, -float(self.loaded.sum())


def evaluate(targets: Targets, curves: RoutingCurves, model: LayerModel, blocks: int) -> Evaluation:
    """Evaluate the layers in order; each determines the window of the next one.

    Args:
        targets: int32 ``[layers, 2]``: experts, and blocks of each.
        curves: Routing.
        model: Times of a layer.
        blocks: B, blocks per expert.
    """
    return evaluate_all([targets], curves, model, blocks)[0]


def evaluate_all(
    candidates: Sequence[Targets], curves: RoutingCurves, model: LayerModel, blocks: int
) -> list[Evaluation]:
    """:func:`evaluate` for several targets at once, which takes hardly longer than one."""
    return evaluated(candidates, native_plan(curves, model), blocks)


def evaluated(candidates: Sequence[Targets], plan: LayerPlan, blocks: int) -> list[Evaluation]:
    """:func:`evaluate_all` with existing native tables."""
    results = plan.evaluate(*_arguments(np.stack(candidates), blocks), _MORE)
    return [Evaluation(*rows) for rows in zip(*results, strict=True)]


def exposed_totals(candidates: Targets, plan: LayerPlan, blocks: int) -> Floats:
    """Exposed seconds per token of several targets, ``[candidates, layers, 2]``."""
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
    """Evaluate several targets of one layer, each with its own window; Python reference of the native loops.

    Args:
        layer: Index of the layer.
        targets: Experts, and blocks of each, ``[targets, 2]``.
        windows: Seconds, ``[targets]``.
        curves: Routing.
        model: Times of a layer.
        blocks: B.

    Returns:
        m, T and the window of the next layer, each float64 ``[targets]``.
    """
    experts, kept = targets[:, EXPERTS].astype(np.int64), targets[:, BLOCKS]
    theta = np.where(experts > 0, kept / blocks, 0.0)
    chances, loaded = curves.amounts(layer, experts, theta, windows / model.costs.load, model.averages)
    exposed, left = model.times(loaded)
    means = [(chances * values).sum(axis=0) for values in (loaded, exposed, left)]
    return means[0], means[1], means[2]


def pages_of(targets: Targets) -> int:
    """Number of pages of targets."""
    return int((targets[:, EXPERTS].astype(np.int64) * targets[:, BLOCKS]).sum())
