"""MoEpic's allocation of memory to layers: ``VramAllocation`` of algorithm 1 (section 3.4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moechat.configurator.curves import Floats, RoutingCurves
from moechat.configurator.expert_split import Split, split_ratio
from moechat.configurator.exposure import PaperModel
from moechat.configurator.native import native_plan

# The paper's default (section 4.1).
ZETA = 0.01
_MOST_MOVES = 1000


@dataclass(frozen=True)
class VramAllocation:
    """Result of the search.

    Attributes:
        volumes: V, experts, float64 ``[layers]``.
        experts: C, int64 ``[layers]``.
        exposed: T, seconds, float64 ``[layers]``.
        moves: Number of accepted moves.
    """

    volumes: Floats
    experts: npt.NDArray[np.int64]
    exposed: Floats
    moves: int

    @property
    def theta(self) -> Floats:
        """θ, float64 ``[layers]``; 0 for a layer without memory."""
        return split_ratio(self.volumes, np.maximum(self.experts, 1).astype(np.float64))


def vram_allocation(
    curves: RoutingCurves,
    model: PaperModel,
    budget: float,
    *,
    zeta: float = ZETA,
    split: float | None = None,
) -> VramAllocation:
    """Move ``ζ·V_e`` from the layer that loses least to the one that gains most while the sum decreases.

    Details that the paper does not define:

    - A layer's V stays within 0 and N experts: constraint 8 requires V > 0, and a layer cannot use more than
      all of its experts. A layer with less than ``ζ·V_e`` gives nothing, one without room takes nothing;
      V + ζ·V_e and V - ζ·V_e are clipped to the same limits when only their times are computed.
    - The uniform start with θ = 0.5 does not affect the result, because the first step recomputes each θ.
    - All layers are evaluated with more memory in one pass and with less in another, as in the paper, so a
      layer's gain includes the change of its window because all earlier layers have more memory too.
    - A move that does not change the sum ends the search, like one that increases it.

    Args:
        curves: Routing.
        model: Times of a layer by m.
        budget: V_e in experts.
        zeta: ζ.
        split: A fixed θ; ``None``: free.
    """
    layers, most = curves.layers, float(curves.experts)
    budget = min(budget, layers * most)
    step = zeta * budget
    plan = native_plan(curves, model)
    volumes = np.full(layers, budget / layers)

    def tried(volumes: Floats) -> Split:
        variants = np.clip(np.stack([volumes, volumes + step, volumes - step]), 0.0, most)
        return Split(*plan.split(variants, -1.0 if split is None else split))

    now = tried(volumes)
    moves = 0
    while moves < _MOST_MOVES and layers > 1 and step > 0:
        first, more, less = now.exposed
        gain = np.where(volumes + step <= most * (1 + 1e-12), first - more, -np.inf)
        taker = int(gain.argmax())
        loss = np.where(volumes - step >= -1e-12 * most, less - first, np.inf)
        loss[taker] = np.inf
        giver = int(loss.argmin())
        if not (np.isfinite(gain[taker]) and np.isfinite(loss[giver])):
            break
        moved = volumes.copy()
        moved[taker] = min(moved[taker] + step, most)
        moved[giver] = max(moved[giver] - step, 0.0)
        after = tried(moved)
        if not float((after.exposed[0] - first).sum()) < 0:
            break
        volumes, now, moves = moved, after, moves + 1
    return VramAllocation(volumes, now.experts[0], now.exposed[0], moves)
