"""AdapMoE's division of a cache among the layers (Zhong et al., 2024, section 4.4; arXiv 2408.10284)."""

from __future__ import annotations

import numpy as np

from moechat.configurator.curves import Floats, RoutingCurves
from moechat.configurator.knapsack import choose
from moechat.configurator.targets import Targets
from moechat.configurator.uniform import kept_blocks


def expected_loads(curves: RoutingCurves) -> Floats:
    """Experts a token that a layer loads on demand, by experts cached: float64 ``[layers, experts + 1]``.

    AdapMoE counts the activated experts that are not cached, less the first missing one with β, the chance
    that its prefetch was the right one: ``f(C) = K·(1 − H(C)) − β·(1 − A(C))``, A the chance that all K are
    cached. AdapMoE takes H = C / N and K = 2; its published program computes exactly this then (with all
    tokens at two experts). For other H, A is that of K draws without replacement from N experts of which
    ``H·N`` are cached, ``Π_j (H·N − j) / (N − j)``: the same A where H is AdapMoE's. β is the share of the
    activated experts that are among the K predicted best, mean P(y) over y up to K; 0 without prefetches.
    """
    k, experts = curves.top_k, curves.experts
    all_cached = np.ones_like(curves.hit)
    for drawn in range(k):
        all_cached *= np.clip((curves.hit * experts - drawn) / (experts - drawn), 0.0, 1.0)
    beta = curves.accuracy[:, :k].mean(axis=1) if curves.depth else np.zeros(curves.layers)
    loads = k * (1.0 - curves.hit) - beta[:, None] * (1.0 - all_cached)
    return np.maximum(loads, 0.0)


def fewest_loads(curves: RoutingCurves, blocks: int, pages: int, split: float) -> Targets:
    """The experts of each layer that make the sum of :func:`expected_loads` least; exact.

    The program of AdapMoE gives every layer at least one expert, which a small cache cannot; here a layer may
    have none. What adds nothing is not handed out but where it costs nothing: experts beyond the need.
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
    targets[:, 0] = counts
    return targets
