"""Predictions for a replayed trace, drawn with a given accuracy.

During a replay the routers of the loaded model do not determine the choices, so they cannot predict them.
Predictions are drawn instead, with the accuracy measured for real models: MoEpic (section 5) found 2.07 to
3.39 of 4 experts, depending on the layer, among the top 4 of the next layer's router.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from moechat.errors import UsageError
from moechat.predict.predictor import Predictor
from moechat.routing import Replay
from moechat.routing.drawn_predictions import accuracy_by_layer, draw_rankings

DEFAULT_ACCURACY = 0.7
_MOST_AHEAD = 8
_MAX_SCORES = 1 << 28


class ReplayPredictor:
    """Ranks experts such that an expert that the replay will choose is in the top k with a given probability.

    The rankings are those of a simulation of the trace with the same accuracy and seed; see
    :mod:`moechat.routing.drawn_predictions`. All are drawn by the constructor, so that all compared systems
    get the same ones and a call is only a lookup.

    Args:
        replay: The replayed trace.
        accuracy: Probability p for one layer ahead, mean of the layers, 0 to 1; ``a`` layers ahead it is
            ``p * 0.85 ** (a - 1)``.
        seed: Random seed.
        lookahead: Most layers ahead, 1 to 8.
        instead_of: A predictor that is called too, with its result ignored, so that its time is included.

    Raises:
        UsageError: A value is out of range, or the rankings of the trace would not fit in memory.
    """

    def __init__(
        self,
        replay: Replay,
        *,
        accuracy: float = DEFAULT_ACCURACY,
        seed: int = 0,
        lookahead: int = 1,
        instead_of: Predictor | None = None,
    ) -> None:
        if not 0 <= accuracy <= 1:
            raise UsageError(f"accuracy is {accuracy}; it must be between 0 and 1")
        if not 1 <= lookahead <= _MOST_AHEAD:
            raise UsageError(f"lookahead is {lookahead}; it must be between 1 and {_MOST_AHEAD}")
        trace = replay.trace
        if trace.tokens * trace.layers * trace.num_experts * lookahead > _MAX_SCORES:
            raise UsageError(
                f"rankings for {trace.tokens} tokens of {trace.layers} layers of {trace.num_experts} experts "
                "do not fit in memory",
                hint="replay fewer tokens",
            )
        self.accuracy = accuracy
        self._replay = replay
        self._instead_of = instead_of
        by_layer = accuracy_by_layer(trace.layers, accuracy)
        rankings = draw_rankings(trace, by_layer, width=trace.num_experts, lookahead=lookahead, seed=seed)
        # The number of experts for the best one, down to 1 for the worst.
        descending = np.arange(trace.num_experts, 0, -1, dtype=np.float32)
        self._scores = np.empty(rankings.shape, dtype=np.float32)
        for scores, ranking in zip(self._scores, rankings, strict=True):
            np.put_along_axis(scores, ranking, np.broadcast_to(descending, scores.shape), axis=-1)

    @property
    def lookahead(self) -> int:
        """Most layers ahead with a prediction."""
        return len(self._scores)

    def scores(self, ordinal: int, ahead: int, hidden: torch.Tensor) -> npt.NDArray[np.float32] | None:
        """See :meth:`moechat.predict.Predictor.scores`; ``None`` beyond the lookahead."""
        if ahead > len(self._scores):
            return None
        if self._instead_of is not None:
            self._instead_of.scores(ordinal, ahead, hidden)
        scores: npt.NDArray[np.float32] = self._scores[ahead - 1][self._replay.row(ordinal, ahead)]
        return scores

    def measured(self, ahead: int = 1) -> float:
        """Share of the choices of the whole trace that are in the top k of the rankings."""
        trace = self._replay.trace
        chosen = np.take_along_axis(self._scores[ahead - 1], trace.experts.astype(np.int64), axis=-1)
        return float((chosen > trace.num_experts - trace.top_k).mean())
