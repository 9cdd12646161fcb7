"""AdapMoE's division of a cache among the layers (Zhong et al., 2024, section 4.4; arXiv 2408.10284)."""

from __future__ import annotations

import numpy as np

from moechat.configurator.curves import Floats, RoutingCurves
from moechat.configurator.knapsack import choose
from moechat.configurator.targets import EXPERTS, Targets
from moechat.configurator.uniform import kept_blocks


def expected_loads(curves: RoutingCurves) -> Floats:
    """Experts that a layer loads on demand per token, by cached experts: float64 ``[layers, experts + 1]``.

    AdapMoE counts the activated experts that are not cached, minus the first missing one with probability β,
    that its prefetch was right: ``f(C) = K·(1 − H(C)) − β·(1 − A(C))`` with A the probability that all K are
    cached. For AdapMoE's H = C / N and K = 2 this equals its published program (with two experts for all
    tokens). For other H, A is that of K draws without replacement from N experts of which ``H·N`` are cached,
    ``Π_j (H·N − j) / (N − j)``, which is AdapMoE's A for its H. β is the share of the activated experts in
    the predicted top K, the mean of P(y) over y up to K; 0 without prefetches.
    """
    k, experts = curves.top_k, curves.experts
    all_cached = np.ones_like(curves.hit)
    for drawn in range(k):
        all_cached *= np.clip((curves.hit * experts - drawn) / (experts - drawn), 0.0, 1.0)
    beta = curves.accuracy[:, :k].mean(axis=1) if curves.depth else np.zeros(curves.layers)
    loads = k * (1.0 - curves.hit) - beta[:, None] * (1.0 - all_cached)
    return np.maximum(loads, 0.0)


def fewest_loads(curves: RoutingCurves, blocks: int, pages: int, split: float) -> Targets:
    """Numbers of experts that minimise the sum of :func:`expected_loads`; exact.

    AdapMoE's program gives every layer at least one expert, which is impossible for a small cache; here a
    layer may have none. Pages that bring no gain are distributed at the end.
    """
    kept = kept_blocks(split, blocks)
    loads = np.minimum.accumulate(expected_loads(curves), axis=1)
    sizes = np.arange(curves.experts + 1, dtype=np.int64)
    counts = choose(loads, sizes, pages // kept).picks
    left = pages // kept - int(counts.sum())
    for layer in np.argsort(counts, kind="stable").tolist():
        more = min(left, curves.experts - int(counts[layer]))
        counts[layer] += more
        left -= more
    targets = np.full((curves.layers, 2), (0, kept), dtype=np.int32)
    targets[:, EXPERTS] = counts
    return targets
