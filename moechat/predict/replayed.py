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

DEFAULT_ACCURACY = 0.7
# Factor of the accuracy for each further layer ahead; an assumption, not measured.
AHEAD_FACTOR = 0.85
_MOST_AHEAD = 8
_MAX_SCORES = 1 << 28


class ReplayPredictor:
    """Ranks experts such that each expert that the replay will choose is in the top k with a given
    probability.

    The wrong experts in the top k, and the order of all others, are drawn by the popularity of the layer's
    experts in the trace. Right and wrong experts are in random order. All rankings are drawn by the
    constructor, so that all compared systems get the same ones and a call is only a lookup.

    Args:
        replay: The replayed trace.
        accuracy: Probability p for one layer ahead, 0 to 1; ``a`` layers ahead it is ``p * 0.85 ** (a - 1)``.
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
        popularity = np.log(trace.counts() + 0.5)
        generator = np.random.default_rng(seed)
        self._scores = [
            _draw(trace.experts, popularity, accuracy * AHEAD_FACTOR**ahead, generator)
            for ahead in range(lookahead)
        ]

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


def _draw(
    chosen: npt.NDArray[np.int32],
    popularity: npt.NDArray[np.float64],
    accuracy: float,
    generator: np.random.Generator,
) -> npt.NDArray[np.float32]:
    """Scores ``[tokens, layers, experts]``: ``experts`` for the best expert down to 1 for the worst."""
    tokens, layers, k = chosen.shape
    experts = popularity.shape[1]
    out = np.empty((tokens, layers, experts), dtype=np.float32)
    descending = np.arange(experts, 0, -1, dtype=np.float32)
    step = max(1, (1 << 22) // (layers * experts))
    for start in range(0, tokens, step):
        index = chosen[start : start + step].astype(np.int64)
        shape = (len(index), layers, experts)
        true = np.zeros(shape, dtype=bool)
        np.put_along_axis(true, index, True, axis=-1)
        found = np.zeros(shape, dtype=bool)
        np.put_along_axis(found, index, generator.random(index.shape) < accuracy, axis=-1)
        # Wrong experts are drawn without replacement, weighted by popularity (Gumbel top-k trick), and never
        # from the right ones while others remain.
        drawn = popularity[None] + generator.gumbel(size=shape)
        wrong_order = np.argsort(np.where(true, -np.inf, drawn), axis=-1)[..., ::-1]
        missing = k - found.sum(axis=-1, keepdims=True)
        wrong = np.zeros(shape, dtype=bool)
        np.put_along_axis(wrong, wrong_order, np.arange(experts) < missing, axis=-1)
        top = found | wrong
        key = np.where(top, generator.random(shape), drawn)
        order = np.lexsort((-key, ~top), axis=-1)
        np.put_along_axis(out[start : start + step], order, np.broadcast_to(descending, shape), axis=-1)
    return out
