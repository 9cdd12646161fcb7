"""Predictions of simulated traces: drawn with an accuracy, or perfect."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moechat.routing.drawn_predictions import AHEAD_FACTOR, accuracy_by_layer, draw_rankings
from moechat.routing.trace import Trace

__all__ = ["AHEAD_FACTOR", "accuracy_by_layer", "draw_rankings", "measured_accuracy", "perfect_rankings"]


def perfect_rankings(trace: Trace, lookahead: int = 1) -> npt.NDArray[np.int32]:
    """Rankings of a perfect predictor: the chosen experts, ordered by index.

    Returns:
        int32 ``[lookahead, tokens, layers, k]``.
    """
    chosen = np.sort(trace.experts, axis=-1)
    return np.ascontiguousarray(np.broadcast_to(chosen, (lookahead, *chosen.shape)), dtype=np.int32)


def measured_accuracy(trace: Trace, rankings: npt.NDArray[np.int32], ahead: int = 1) -> float:
    """Share of the choices that are in the top k of the rankings."""
    best = rankings[ahead - 1, :, :, : trace.top_k]
    return float((trace.experts[..., :, None] == best[..., None, :]).any(axis=-1).mean())
