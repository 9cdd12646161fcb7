from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from configurator_support import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat.configurator.routing_families import FAMILIES, family_of
from moechat.configurator.systems import Policy
from moechat.configurator.warm_start import blended_statistics, default_statistics

SHAPES = {"mixtral": (32, 8, 2), "qwen3_moe": (48, 128, 8), "qwen2_moe": (24, 60, 4), "gpt_oss": (24, 32, 4)}


def test_published_hit_rates_of_qwen_are_met():
    # MoEpic, table 1: LCP with 10 to 50 of 60 experts. Early layers, which route more evenly, lower the mean.
    found = default_statistics("qwen2_moe", 24, 60, 4, policy="lcp").hit_rate[8:].mean(axis=0)
    assert found[[10, 20, 30, 40, 50]] == pytest.approx([0.2556, 0.4536, 0.6221, 0.7712, 0.9008], abs=0.02)


def test_fitted_hit_rates_of_the_traces_are_met():
    # A quarter and half of the experts, LCP, mean of the layers.
    for family, shape, quarter, half in (
        ("gpt_oss", (24, 32, 4), 0.576, 0.865),
        ("deepseek_v2", (26, 64, 6), 0.471, 0.735),
    ):
        found = default_statistics(family, *shape, policy="lcp").hit_rate.mean(axis=0)
        assert found[shape[1] // 4] == pytest.approx(quarter, abs=0.03)
        assert found[shape[1] // 2] == pytest.approx(half, abs=0.03)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*FAMILIES, "unheard_of"]),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(get_args(Policy)),
    st.data(),
)
def test_defaults_are_probabilities(model_type, layers, experts, top_k, policy, data):
    top_k = min(top_k, experts)
    depth = data.draw(st.one_of(st.none(), st.integers(0, experts)))
    found = default_statistics(model_type, layers, experts, top_k, depth, policy)
    assert found.tokens == 0
    assert found.policy == policy
    assert found.depth == (min(experts, 2 * top_k) if depth is None else depth)
    hit = found.hit_rate
    assert (np.diff(hit, axis=1) >= -1e-12).all()
    assert hit[:, -1] == pytest.approx(1.0)
    assert (np.diff(hit, 2, axis=1) <= 1e-4).all()  # concave, to a count
    accuracy = found.prediction_accuracy
    assert ((accuracy >= 0) & (accuracy <= 1)).all()
    assert (np.diff(accuracy, axis=1) <= 1e-4).all()
    cached = found.prediction_hit_rate
    assert ((cached >= -1e-12) & (cached <= 1 + 1e-12)).all()
    if found.depth:
        assert cached[..., -1] == pytest.approx(1.0)


@pytest.mark.parametrize("model_type", SHAPES)
def test_places_add_up_to_k_and_their_first_k_to_the_accuracy(model_type):
    layers, experts, top_k = SHAPES[model_type]
    found = default_statistics(model_type, layers, experts, top_k, depth=experts).prediction_accuracy
    assert found.sum(axis=1) == pytest.approx(np.full(layers, top_k), abs=0.01)
    right = found[:, :top_k].sum(axis=1) / top_k
    assert right[layers // 2] == pytest.approx(family_of(model_type).accuracy, abs=0.005)
    assert right[0] < right[1] < right[layers // 2]


def test_unknown_families_have_defaults_and_relatives_their_own():
    assert family_of("unheard_of") not in FAMILIES.values()
    assert family_of("qwen3_next") is FAMILIES["qwen3_moe"]


def test_better_policies_hit_more():
    quarter = [
        default_statistics("gpt_oss", 24, 32, 4, policy=policy).hit_rate[12, 8]
        for policy in ("static", "lcp", "blend", "belady")
    ]
    assert quarter == sorted(quarter)


@pytest.mark.parametrize("sizes", [(0, 4, 1, 1), (2, 4, 5, 1), (2, 4, 0, 1), (2, 4, 1, 5)])
def test_wrong_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="do not fit"):
        default_statistics("mixtral", *sizes)


def seen_of(default, tokens, seed=0):
    return replace(
        drawn(seed, default.layers, default.experts, default.top_k, tokens=tokens), policy=default.policy
    )


def test_empty_statistics_leave_the_defaults():
    default = default_statistics("mixtral", 4, 8, 2)
    assert blended_statistics(default, None) is default
    blended = blended_statistics(default, scaled(seen_of(default, 1000), 0))
    assert blended.tokens == 0
    assert blended.hit_rate == pytest.approx(default.hit_rate, abs=1e-3)
    assert blended.prediction_accuracy == pytest.approx(default.prediction_accuracy, abs=2e-3)
    assert blended.prediction_hit_rate == pytest.approx(default.prediction_hit_rate, abs=2e-3)


def scaled(statistics, tokens):
    """The same shares, scaled to this number of tokens."""
    ranks = statistics.ranks / statistics.ranks.sum(axis=1, keepdims=True)
    share = tokens / statistics.tokens
    return replace(
        statistics,
        tokens=tokens,
        predicted=np.rint(statistics.predicted * share).astype(np.int64),
        activations=np.rint(ranks * tokens * statistics.top_k).astype(np.int64),
        ranks=np.rint(ranks * tokens * statistics.top_k).astype(np.int64),
        hits_of_prediction=np.rint(statistics.hits_of_prediction * share).astype(np.int64),
        ranks_of_prediction=np.rint(statistics.ranks_of_prediction * share).astype(np.int64),
    )


def test_counts_weigh_as_their_tokens():
    default = default_statistics("mixtral", 4, 8, 2)
    seen = scaled(seen_of(default, 1000), 400)
    blended = blended_statistics(default, seen, pseudo_tokens=400)
    assert blended.tokens == 400
    for name in ("hit_rate", "prediction_accuracy", "prediction_hit_rate"):
        middle = (getattr(default, name) + getattr(seen, name)) / 2
        assert getattr(blended, name) == pytest.approx(middle, abs=5e-3), name
    much = blended_statistics(default, scaled(seen_of(default, 1000), 400_000), pseudo_tokens=400)
    assert much.hit_rate == pytest.approx(seen.hit_rate, abs=5e-3)


def test_layers_learn_on_their_own():
    default = default_statistics("mixtral", 2, 8, 2)
    seen = scaled(seen_of(default, 1000), 100_000)
    seen.ranks[1] = 0
    seen.predicted[1] = 0
    seen.hits_of_prediction[1] = 0
    blended = blended_statistics(default, seen)
    assert blended.hit_rate[0] == pytest.approx(seen.hit_rate[0], abs=0.01)
    assert blended.hit_rate[1] == pytest.approx(default.hit_rate[1], abs=2e-3)
    assert blended.prediction_accuracy[1] == pytest.approx(default.prediction_accuracy[1], abs=2e-3)


def test_learning_never_jumps():
    default = default_statistics("gpt_oss", 3, 32, 4)
    rates = np.array(
        [
            blended_statistics(default, scaled(seen_of(default, 1000), tokens)).hit_rate[0, 8]
            for tokens in (0, 50, 100, 200, 400, 800, 1600, 3200, 12800)
        ]
    )
    seen = seen_of(default, 1000).hit_rate[0, 8]
    assert (np.diff(np.abs(rates - seen)) < 0).all()


def test_places_are_those_that_both_have():
    default = default_statistics("mixtral", 4, 8, 2, depth=4)
    other = replace(drawn(0, 4, 8, 2, depth=3), policy="blend")
    assert blended_statistics(default, other).depth == 3


@pytest.mark.parametrize(
    ("change", "what"),
    [({"policy": "lru"}, "policy"), ({"top_k": 3}, "top_k")],
)
def test_statistics_of_another_shape_are_refused(change, what):
    default = default_statistics("mixtral", 4, 8, 2)
    with pytest.raises(ValueError, match=what):
        blended_statistics(default, replace(seen_of(default, 100), **change))
    with pytest.raises(ValueError, match="layers"):
        blended_statistics(default, replace(drawn(0, 5, 8, 2), policy="blend"))
    with pytest.raises(ValueError, match="at least 1"):
        blended_statistics(default, None, pseudo_tokens=0)
