"""Default routing statistics by model family, used until enough tokens are recorded.

The defaults are curves with a few parameters, fitted to available data; :mod:`.routing_families` has those of
each family. They only order layers and sizes sensibly, and a few hundred recorded tokens outweigh them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moechat.configurator.routing_families import Family, family_of
from moechat.configurator.systems import Policy
from moechat.routing.drawn_predictions import rank_accuracy
from moechat.routing.statistics import RoutingStatistics

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Weight of the defaults in tokens when counts are added. With 8 of 128 experts these are 3200 activations, 25
# per rank: from there on counts are better than curves of another model.
PSEUDO_TOKENS = 400
# Resolution of the defaults: shares are rounded to whole counts of this many tokens.
_BASE_TOKENS = 100_000

# Skew under a policy over that under LCP: mean of the fits to 12,000 tokens of gpt-oss-20b and of
# DeepSeek-V2-Lite (lru 1.23 and 1.06, lfu 0.81 and 0.91, discount 1.33 and 1.13, static 0.81 and 0.92, blend
# 1.29 and 1.23, forecast 1.53 and 1.70, belady 2.01 and 2.40), lru and lfu with Qwen1.5-MoE's (0.55 and 0.87;
# MoEpic, table 1) as a third. Two-level LRU ranks as LRU does. In a replay with a quarter of each layer kept,
# counts of the running request hit as often as `discount`, counts times the share in a map as often as LRU.
_POLICY_FACTOR: Mapping[Policy, float] = {
    "lcp": 1.0,
    "lru": 0.95,
    "lfu": 0.87,
    "discount": 1.23,
    "static": 0.87,
    "belady": 2.2,
    "blend": 1.26,
    "forecast": 1.6,
    "two_level_lru": 0.95,
    "request": 1.23,
    "map": 0.95,
}

# Early layers route more evenly: skew 0.51, 0.69, 0.87, 0.98 of the mean in gpt-oss's first layers, 0.85,
# 0.72, 0.81, 0.78 in DeepSeek-V2-Lite's.
_EVEN_DROP, _EVEN_SPAN = 0.33, 3.0
# Their predictions are worse too, and those of the last layer slightly (MoEpic, figures 2c and 6; AdapMoE's
# table: 0.57 / 0.88, 0.72 / 0.88, 0.79 / 0.88 in layers 1 to 3, 0.85 / 0.88 in the last).
_PREDICTED_DROP, _PREDICTED_SPAN, _LAST_DROP = 0.36, 1.6, 0.04
# The first layer is predicted from the last layer of the previous token; an estimate (AdapMoE: 0).
_FIRST_ACCURACY = 0.3


def default_statistics(
    model_type: str,
    layers: int,
    experts: int,
    top_k: int,
    depth: int | None = None,
    policy: Policy = "blend",
    *,
    family: Family | None = None,
) -> RoutingStatistics:
    """Expected statistics of a model without recorded routing.

    - ``H(C)``: see :class:`Family`; less skewed in early layers.
    - ``P(y)`` falls around position K, with a sum of K over all positions, as in
      :func:`moechat.routing.drawn_predictions.rank_accuracy`.
    - ``PH(y, C)``: an expert that will be activated is cached with probability ``H(C)``; a predicted expert
      that will not be, with the mean of that and ``C / N``.

    Args:
        model_type: transformers' name of the family.
        layers: Number of expert layers.
        experts: Experts per layer.
        top_k: Experts per token.
        depth: Positions of a prediction; ``None``: twice ``top_k``, at most all experts.
        policy: Eviction policy of the cache.
        family: Parameters to take in place of those of ``model_type``.

    Returns:
        Statistics with ``tokens = 0``, because none were counted, and counts that represent shares; all
        experts are equally popular, because the popular ones are unknown.

    Raises:
        ValueError: A size is below 1, ``top_k`` or ``depth`` is above ``experts``.
    """
    depth = min(experts, 2 * top_k) if depth is None else depth
    if min(layers, top_k) < 1 or not top_k <= experts or not 0 <= depth <= experts:
        raise ValueError(f"{layers} layers, {experts} experts, top {top_k}, depth {depth} do not fit")
    family = family or family_of(model_type)
    skews = family.skew * _POLICY_FACTOR[policy] * _layer_factors(layers, _EVEN_DROP, _EVEN_SPAN)
    sizes = np.arange(experts + 1) / experts
    hit = np.stack([_saturating(sizes, skew) for skew in skews])
    accuracy = family.accuracy * np.concatenate(
        [[1.0], _layer_factors(layers - 1, _PREDICTED_DROP, _PREDICTED_SPAN)]
    )
    accuracy[-1] -= _LAST_DROP if layers > 1 else 0.0
    # At least the accuracy of random predictions.
    accuracy[0] = _FIRST_ACCURACY
    accuracy = np.maximum(accuracy, top_k / experts)
    places = rank_accuracy(accuracy, experts, top_k)[:, :depth]
    likely = (hit + sizes) / 2
    cached = places[:, :, None] * hit[:, None, :] + (1 - places[:, :, None]) * likely[:, None, :]
    tokens = np.full(layers, _BASE_TOKENS, dtype=np.int64)
    return RoutingStatistics(
        policy=policy,
        top_k=top_k,
        tokens=0,
        predicted=tokens,
        activations=np.full((layers, experts), round(_BASE_TOKENS * top_k / experts), dtype=np.int64),
        ranks=_counts(hit, _BASE_TOKENS * top_k),
        hits_of_prediction=np.rint(places * _BASE_TOKENS).astype(np.int64),
        ranks_of_prediction=_counts(cached, _BASE_TOKENS),
    )


def blended_statistics(
    default: RoutingStatistics, seen: RoutingStatistics | None, pseudo_tokens: int = PSEUDO_TOKENS
) -> RoutingStatistics:
    """Add counts to the defaults, which weigh as much as ``pseudo_tokens`` tokens in every layer.

    The transition is smooth: after ``pseudo_tokens`` tokens both have the same weight, after ten times as
    many the defaults have a tenth. Layers with fewer counts or predictions keep more of the default.

    Args:
        default: Result of :func:`default_statistics`.
        seen: Recorded statistics of the same model and policy, if any.
        pseudo_tokens: Weight of the defaults.

    Returns:
        Counts with ``tokens`` of ``seen``, and the positions of predictions that both have.

    Raises:
        ValueError: The two differ in layers, experts, top-k or policy, or the weight is below 1.
    """
    if pseudo_tokens < 1:
        raise ValueError(f"the defaults count for {pseudo_tokens} tokens; at least 1 is needed")
    if seen is None:
        return default
    for name in ("layers", "experts", "top_k", "policy"):
        ours, theirs = getattr(default, name), getattr(seen, name)
        if ours != theirs:
            raise ValueError(f"the statistics have {name} {theirs}, the defaults {ours}")
    depth = min(default.depth, seen.depth)
    activations = pseudo_tokens * default.top_k
    ranks_of_prediction = default.prediction_hit_rate[:, :depth]
    hits = np.rint(default.prediction_accuracy[:, :depth] * pseudo_tokens).astype(np.int64)
    return RoutingStatistics(
        policy=seen.policy,
        top_k=seen.top_k,
        tokens=seen.tokens,
        predicted=pseudo_tokens + seen.predicted,
        activations=_counts(_shares(default.activations), activations) + seen.activations,
        ranks=_counts(default.hit_rate, activations) + seen.ranks,
        hits_of_prediction=hits + seen.hits_of_prediction[:, :depth],
        ranks_of_prediction=_counts(ranks_of_prediction, pseudo_tokens) + seen.ranks_of_prediction[:, :depth],
    )


def _layer_factors(layers: int, drop: float, span: float) -> Floats:
    """Factor of each layer: ``1 − drop`` in the first one, rising towards 1."""
    return 1.0 - drop * np.exp(-np.arange(layers) / span)


def _saturating(share: Floats, skew: float) -> Floats:
    """A concave curve from (0, 0) to (1, 1), initially steeper for a larger skew."""
    if skew < 1e-6:
        return share
    return np.asarray(np.expm1(-skew * share) / math.expm1(-skew))


def _counts(cumulative: Floats, total: int) -> Ints:
    """Integer counts ``[..., n]`` whose running sums are ``total · cumulative [..., n + 1]``, rounded."""
    return np.maximum(np.diff(np.rint(cumulative * total), axis=-1), 0).astype(np.int64)


def _shares(counts: Ints) -> Floats:
    """Running shares ``[..., n + 1]`` of counts ``[..., n]``; uniform if all counts are 0."""
    n = counts.shape[-1]
    sums = np.concatenate([np.zeros((*counts.shape[:-1], 1)), np.cumsum(counts, axis=-1)], axis=-1)
    total = sums[..., -1:]
    return np.asarray(np.where(total > 0, sums / np.maximum(total, 1), np.arange(n + 1) / n))
