"""Statistics and costs for the configurator's tests: given or random."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from moechat.configurator.costs import Costs
from moechat.configurator.curves import RoutingCurves
from moechat.configurator.systems import CacheSettings
from moechat.routing.statistics import RoutingStatistics

FREE = Costs(attention=0.0, moe=1e-9, head=0.0, load=1.0)


def statistics(hit, accuracy=None, cached=None, *, top_k=1, tokens=1000, policy="lcp"):
    """Counts whose shares are these: ``hit [layers, experts]`` for C = 1..N, and so on."""
    hit = np.asarray(hit, dtype=float)
    layers, experts = hit.shape
    accuracy = np.zeros((layers, 0)) if accuracy is None else np.asarray(accuracy, dtype=float)
    depth = accuracy.shape[1]
    cached = np.ones((layers, depth, experts)) if cached is None else np.asarray(cached, dtype=float)
    total = tokens * top_k

    def counts(cumulative, scale):
        return np.diff(np.rint(cumulative * scale), axis=-1, prepend=0).astype(np.int64)

    return RoutingStatistics(
        policy=policy,
        top_k=top_k,
        tokens=tokens,
        predicted=np.full(layers, tokens if depth else 0),
        activations=counts(hit, total),
        ranks=counts(hit, total),
        hits_of_prediction=np.rint(accuracy * tokens).astype(np.int64),
        ranks_of_prediction=counts(cached, tokens),
    )


def curves(hit, accuracy=None, cached=None, *, top_k=1):
    """The same as :class:`RoutingCurves`; ``hit`` and ``cached`` for C = 1..N."""
    hit = np.asarray(hit, dtype=float)
    layers, experts = hit.shape
    accuracy = np.zeros((layers, 0)) if accuracy is None else np.asarray(accuracy, dtype=float)
    if cached is None:
        cached = np.ones((layers, accuracy.shape[1], experts))
    return RoutingCurves(
        top_k,
        np.concatenate([np.zeros((layers, 1)), hit], axis=1),
        accuracy,
        np.concatenate([np.zeros((layers, accuracy.shape[1], 1)), cached], axis=2),
    )


def drawn(seed, layers, experts, top_k, *, depth=None, tokens=1000, concave=True):
    """Random statistics: concave as those of policies, or without any order."""
    rng = np.random.default_rng(seed)
    depth = min(experts, 2 * top_k) if depth is None else depth
    ranks = rng.integers(0, 1000, (layers, experts))
    if concave:
        ranks = -np.sort(-ranks, axis=1)
    ranks[:, 0] += 1
    of_prediction = rng.integers(0, 1000, (layers, depth, experts)).astype(float)
    of_prediction[..., 0] += 1
    of_prediction *= tokens / of_prediction.sum(axis=-1, keepdims=True)
    return RoutingStatistics(
        policy="lcp",
        top_k=top_k,
        tokens=tokens,
        predicted=np.full(layers, tokens),
        activations=ranks.copy(),
        ranks=ranks,
        hits_of_prediction=rng.integers(0, tokens + 1, (layers, depth)),
        ranks_of_prediction=np.floor(of_prediction).astype(np.int64),
    )


def realistic(seed, layers, experts, top_k, *, accuracy=0.8, tokens=5000):
    """Statistics as of long runs: skewed, decreasing with the place, different in each layer."""
    rng = np.random.default_rng(seed)
    depth = min(experts, 2 * top_k)
    share = np.exp(-rng.uniform(1.5, 4.5, (layers, 1)) * np.arange(experts) / experts)
    share /= share.sum(axis=1, keepdims=True)
    ranks = np.stack([rng.multinomial(tokens * top_k, row) for row in share])
    right = np.clip(accuracy + rng.normal(0, 0.08, (layers, 1)) - 0.06 * np.arange(depth), 0.02, 0.98)
    mixed = 0.7 * share + 0.3 / experts
    of_prediction = np.stack([rng.multinomial(tokens, row, size=depth) for row in mixed])
    return RoutingStatistics(
        policy="lcp",
        top_k=top_k,
        tokens=tokens,
        predicted=np.full(layers, tokens),
        activations=ranks.copy(),
        ranks=ranks,
        hits_of_prediction=rng.binomial(tokens, right),
        ranks_of_prediction=of_prediction,
    )


_seconds = st.floats(1e-5, 1e-3)

any_costs = st.builds(
    Costs,
    attention=_seconds,
    moe=_seconds,
    head=_seconds,
    load=st.floats(1e-5, 3e-3),
    latency=st.sampled_from([0.0, 1e-5, 1e-3]),
    compute_far=st.one_of(st.just(math.inf), st.floats(1e-5, 3e-3)),
)
any_settings = st.builds(
    CacheSettings,
    policy=st.just("lcp"),
    split=st.none(),
    allocation=st.just("auto"),
    prefetch=st.sampled_from(["none", "prompts", "next-router", "perfect", "whole-layer"]),
    miss=st.sampled_from(["fetch", "compute", "both"]),
    whole_experts=st.booleans(),
)
