"""Draws predictions for a trace, which has no hidden states to predict from.

Each layer has an accuracy: the probability that a chosen expert is in the top k of the ranking. MoEpic
(section 2.2, figure 2c) found 2.07 to 3.39 of 4 experts there with the next layer's router, fewest in the
first layers, whose hidden states change most (section 3.2, figure 6).

Real rankings are calibrated: their first experts are right more often than their last ones, and experts with
large weights are found more often than others. ``scripts/bench/predictions`` measures both on a model. For
the demo model (16 experts, 2 of a token, next layer's router, layers 2 to 7) it finds 0.95, 0.61, 0.21 and
0.10 right at ranks 1 to 4. Two rules describe this and the same router's predictions of its 3, 4 and 6 best
experts:

- The expert at rank y is right with probability ``1 / (1 + (y / c) ** s)``. The accuracy and the sum k over
  all ranks determine c and s, so there is nothing to fit: :func:`rank_accuracy`.
- The chosen experts are ranked in an order drawn without replacement with probabilities in proportion to
  ``weight ** 2``. Measured exponents: 2.3 to 2.5 one layer ahead, 1.5 two layers ahead. Without weights, the
  order is random.

Ranks of a token are right independently of each other: 0.83 times the variance of a binomial distribution;
measured 0.7 to 0.8.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.errors import UsageError
from moechat.routing.trace import Trace

Floats = npt.NDArray[np.float64]
# Factor of the accuracy for each further layer ahead; an assumption. The demo model: 0.81.
AHEAD_FACTOR = 0.85
# Accuracy of the first layer relative to the best (2.07 and 3.39 of 4 experts), and share of the layers over
# which it rises.
_FIRST_LAYER = 2.07 / 3.39
_RISING_SHARE = 0.25
_MOST_VALUES = 1 << 22  # drawn at a time
_MOST_RANKED = 1 << 28
_UNCOUNTED = 0.5  # of an expert's popularity, in tokens
_LEAST_WEIGHT = np.float32(1 / 512)  # half of the smallest that a byte can hold
# Values of s for which curves are computed, and bisections for c.
_SHARPNESS = np.concatenate([[0.0], np.geomspace(0.05, 100.0, 80)])
_BISECTIONS = 50
_CERTAIN = 40.0  # logits


def accuracy_by_layer(layers: int, mean: float) -> Floats:
    """Accuracy of each layer, lower in the first quarter of them, with the given mean.

    The spread is reduced if a layer would otherwise exceed 1.

    Args:
        layers: Number of expert layers.
        mean: 0 to 1.

    Returns:
        float64 ``[layers]``.

    Raises:
        UsageError: ``mean`` is out of range.
    """
    if not 0 <= mean <= 1:
        raise UsageError(f"accuracy is {mean}; it must be between 0 and 1")
    rising = np.arange(layers) / max(1.0, _RISING_SHARE * layers)
    shape = _FIRST_LAYER + (1 - _FIRST_LAYER) * np.minimum(1.0, rising)
    shape /= shape.mean()
    spread = shape - 1
    highest = float(spread.max())
    room = (1 / mean - 1) if mean > 0 else 0.0
    scale = min(1.0, room / highest) if highest > 0 else 0.0
    return np.asarray(mean * (1 + scale * spread))


def rank_accuracy(accuracy: Floats, experts: int, top_k: int) -> Floats:
    """Probability that the expert at each rank is right: falling as ``1 / (1 + (y / c) ** s)``.

    Layers less accurate than random predictions, which no curve of this form describes, have one probability
    within the top k and one beyond.

    Args:
        accuracy: Share of the chosen experts in the top k: float64 ``[layers]``, 0 to 1.
        experts: N, experts of a layer.
        top_k: k, at most ``experts``.

    Returns:
        float64 ``[layers, experts]``, best rank first: its sum is k, that of the first k is
        ``accuracy * k``.
    """
    first = np.clip(accuracy, 0.0, 1.0)[:, None] * top_k
    if top_k == experts:
        return np.ones((len(accuracy), experts))
    reached, curves = _curves(experts, top_k)
    # Between two curves: a share of each, so that both sums are exact.
    upper = np.clip(np.searchsorted(reached, accuracy), 1, len(reached) - 1)
    span = np.maximum(reached[upper] - reached[upper - 1], 1e-12)
    share = np.clip((accuracy - reached[upper - 1]) / span, 0.0, 1.0)[:, None]
    found = (1 - share) * curves[upper - 1] + share * curves[upper]
    for part, total in ((found[:, :top_k], first), (found[:, top_k:], top_k - first)):
        sums = part.sum(axis=1, keepdims=True)
        part *= np.divide(total, sums, out=np.zeros_like(sums), where=sums > 0)
    return np.asarray(np.clip(found, 0.0, 1.0))


@lru_cache(maxsize=64)
def _curves(experts: int, top_k: int) -> tuple[Floats, Floats]:
    """Accuracies, ascending, ``[n]``, and curves that have them, each with sum k: ``[n, experts]``."""
    logs = np.log(np.arange(1, experts + 1))
    sharp = _SHARPNESS[:, None]
    # The offset is s * log(c); beyond these limits every rank is wrong, or right.
    low = np.full_like(sharp, -_CERTAIN)
    high = sharp * logs[-1] + _CERTAIN
    for _ in range(_BISECTIONS):
        offset = (low + high) / 2
        curves = 1 / (1 + np.exp(np.clip(sharp * logs - offset, -_CERTAIN, _CERTAIN)))
        above = curves.sum(axis=1, keepdims=True) > top_k
        low, high = np.where(above, low, offset), np.where(above, offset, high)
    perfect = (np.arange(experts) < top_k).astype(np.float64)
    curves = np.concatenate([curves, perfect[None]])
    return curves[:, :top_k].sum(axis=1) / top_k, curves


def draw_rankings(
    trace: Trace,
    accuracy: Floats,
    *,
    width: int,
    lookahead: int = 1,
    seed: int = 0,
) -> npt.NDArray[np.int32]:
    """Draw rankings for every token and layer.

    Wrong experts are drawn by the popularity of the layer's experts in the trace. The draws for a distance
    depend neither on ``lookahead`` nor, within the top k, on ``width``.

    Args:
        trace: The recorded choices, with weights if they are known.
        accuracy: One layer ahead, as float64 ``[layers]``, or ``[layers, ranks]`` with at least k ranks: the
            probability that the expert at a rank is right. ``a`` layers ahead all are multiplied by
            ``0.85 ** (a - 1)``.
        width: Number of experts to rank.
        lookahead: Most layers ahead.
        seed: Random seed.

    Returns:
        int32 ``[lookahead, tokens, layers, width]``, best first.

    Raises:
        UsageError: The rankings would not fit in memory.
    """
    tokens, layers, experts, k = trace.tokens, trace.layers, trace.num_experts, trace.top_k
    width = min(width, experts)
    if lookahead * tokens * layers * width > _MOST_RANKED:
        raise UsageError(
            f"rankings of {width} experts for {tokens} tokens of {layers} layers do not fit in memory",
            hint="simulate fewer tokens",
        )
    popularity = np.ascontiguousarray(trace.counts() + _UNCOUNTED, dtype=np.float64)
    out = np.empty((lookahead, tokens, layers, width), dtype=np.int32)
    step = max(1, _MOST_VALUES // (layers * experts))
    for ahead in range(lookahead):
        right = accuracy * AHEAD_FACTOR**ahead
        if right.ndim == 1:
            right = rank_accuracy(right, experts, k)
        table = _draw_table(right, experts, k)
        for start in range(0, tokens, step):
            rows = slice(start, start + step)
            weights = None if trace.weights is None else _positive(trace.weights[rows])
            out[ahead, rows] = _native.draw_rankings(
                np.ascontiguousarray(trace.experts[rows], dtype=np.int32),
                weights,
                table,
                popularity,
                width=width,
                seed=seed,
                stream=ahead,
                first_token=start,
            )
    return out


def _positive(weights: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    return np.maximum(np.ascontiguousarray(weights, dtype=np.float32), _LEAST_WEIGHT)


def _draw_table(right: Floats, experts: int, k: int) -> Floats:
    """What rankings are drawn by, float64 ``[layers, experts]``: up to rank k the probability that the expert
    there is right; beyond, of each chosen expert that is still left, that it is at this rank.

    Args:
        right: float64 ``[layers, ranks]``: probability that the expert at a rank is right; ranks beyond the
            given ones share what is missing to the sum k.
        experts: N.
        k: Chosen experts.
    """
    beyond = np.zeros((len(right), experts - k))
    given = right[:, k:experts]
    beyond[:, : given.shape[1]] = given
    rest = k - right[:, :k].sum(axis=1) - given.sum(axis=1)
    if given.shape[1] < experts - k:
        beyond[:, given.shape[1] :] = np.maximum(rest, 0)[:, None] / (experts - k - given.shape[1])
    left = np.cumsum(beyond[:, ::-1], axis=1)[:, ::-1]
    at_rank = np.divide(beyond, left, out=np.ones_like(beyond), where=left > 0)
    return np.ascontiguousarray(np.concatenate([right[:, :k], at_rank], axis=1), dtype=np.float64)
