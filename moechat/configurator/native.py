"""Native inner loops, with the same results as the Python modules of this package."""

from __future__ import annotations

import numpy as np

from moechat import _native
from moechat.configurator.curves import RoutingCurves
from moechat.configurator.exposure import EngineModel, LayerModel
from moechat.configurator.systems import COMPUTED_FAR

_MISS: dict[str, int] = {"fetch": 1, "both": 3, **dict.fromkeys(COMPUTED_FAR, 2)}


def native_plan(curves: RoutingCurves, model: LayerModel) -> _native.LayerPlan:
    """Create the tables and times of the native loops.

    Args:
        curves: Routing.
        model: :class:`moechat.configurator.exposure.PaperModel` or ``EngineModel``.
    """
    costs = model.costs
    shares, weights, cached = curves.by_outcome(model.averages)
    miss, grain = (_MISS[model.miss], model.grain) if isinstance(model, EngineModel) else (0, 0.0)
    return _native.LayerPlan(
        miss,
        model.top_k,
        [
            costs.attention,
            costs.moe,
            costs.head,
            costs.load,
            costs.latency,
            costs.compute_far,
            costs.both_loads,
            costs.both_computes,
        ],
        grain,
        np.ascontiguousarray(shares),
        np.ascontiguousarray(weights),
        np.ascontiguousarray(curves.accuracy),
        np.ascontiguousarray(cached.transpose(0, 1, 3, 2)),
    )
