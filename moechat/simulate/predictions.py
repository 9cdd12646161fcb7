"""Draws predictions for a trace, which has no hidden states to predict from.

Each layer has a given accuracy: the probability that a chosen expert is in the top k of the ranking. MoEpic
(section 2.2, figure 2c) found 2.07 to 3.39 of 4 experts there with the next layer's router, fewest in the
first layers, whose hidden states change most (section 3.2, figure 6).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moechat.errors import UsageError
from moechat.routing.trace import Trace

# Factor of the accuracy for each further layer ahead; an assumption, not measured.
AHEAD_FACTOR = 0.85
# Accuracy of the first layer relative to the best (2.07 and 3.39 of 4 experts), and share of the layers over
# which it rises.
_FIRST_LAYER = 2.07 / 3.39
_RISING_SHARE = 0.25
_MOST_VALUES = 1 << 22  # drawn at a time
_MOST_RANKED = 1 << 28
_LEAST = np.float32(1e-9)


def accuracy_by_layer(layers: int, mean: float) -> npt.NDArray[np.float64]:
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


def draw_rankings(
    trace: Trace,
    accuracy: npt.NDArray[np.float64],
    *,
    width: int,
    lookahead: int = 1,
    seed: int = 0,
) -> npt.NDArray[np.int32]:
    """Draw rankings for every token and layer.

    Wrong experts are drawn by the popularity of the layer's experts in the trace; right and wrong ones are in
    random order.

    Args:
        trace: The recorded choices.
        accuracy: float64 ``[layers]``: accuracy one layer ahead; ``a`` layers ahead it is multiplied by
            ``0.85 ** (a - 1)``.
        width: Number of experts to rank.
        lookahead: Most layers ahead.
        seed: Random seed.

    Returns:
        int32 ``[lookahead, tokens, layers, width]``, best first.

    Raises:
        UsageError: The rankings would not fit in memory.
    """
    tokens, layers = trace.tokens, trace.layers
    width = min(width, trace.num_experts)
    if lookahead * tokens * layers * width > _MOST_RANKED:
        raise UsageError(
            f"rankings of {width} experts for {tokens} tokens of {layers} layers do not fit in memory",
            hint="simulate fewer tokens",
        )
    popularity = np.log(trace.counts() + 0.5).astype(np.float32)
    generator = np.random.default_rng(seed)
    out = np.empty((lookahead, tokens, layers, width), dtype=np.int32)
    step = max(1, _MOST_VALUES // (layers * trace.num_experts))
    for ahead in range(lookahead):
        right = (accuracy * AHEAD_FACTOR**ahead)[None, :, None]
        for start in range(0, tokens, step):
            chosen = trace.experts[start : start + step].astype(np.int64)
            out[ahead, start : start + step] = _draw(chosen, right, popularity, width, generator)
    return out


def _draw(
    chosen: npt.NDArray[np.int64],
    accuracy: npt.NDArray[np.float64],
    popularity: npt.NDArray[np.float32],
    width: int,
    generator: np.random.Generator,
) -> npt.NDArray[np.int64]:
    """Rankings ``[tokens, layers, width]`` of a part of a trace.

    Order: found experts, then wrong ones, then chosen ones that are missed; within each class by popularity,
    drawn without replacement (Gumbel top-k trick).
    """
    k = chosen.shape[-1]
    shape = (*chosen.shape[:-1], popularity.shape[-1])
    # A float32 exponential variable can be 0.
    exponential = np.maximum(generator.standard_exponential(shape, dtype=np.float32), _LEAST)
    drawn = popularity - np.log(exponential)
    found = generator.random(chosen.shape) < accuracy
    lowest, highest = float(drawn.min()) - 1, float(drawn.max()) + 1
    span = highest - lowest
    # Chosen experts are moved above all others if found, below if missed.
    own = np.take_along_axis(drawn, chosen, axis=-1)
    np.put_along_axis(drawn, chosen, np.where(found, own + span, own - span), axis=-1)
    best = np.argpartition(-drawn, min(max(width, k), shape[-1] - 1), axis=-1)[..., : max(width, k)]
    order = np.argsort(-np.take_along_axis(drawn, best, axis=-1), axis=-1)
    ranked = np.take_along_axis(best, order, axis=-1)
    # Random order within the top k.
    shuffled = np.argsort(generator.random((*shape[:-1], k)), axis=-1)
    ranked[..., :k] = np.take_along_axis(ranked[..., :k], shuffled, axis=-1)
    return ranked[..., :width]


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
