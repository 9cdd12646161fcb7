"""Mapping a trace to another shape keeps its locality, and describes the changes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from moechat.errors import UsageError
from moechat.routing import Trace, map_trace


def sticky(tokens: int = 400, layers: int = 24, experts: int = 32, k: int = 4) -> Trace:
    """A trace in which a token keeps each expert of the one before it with probability 0.6."""
    generator = np.random.default_rng(1)
    out = np.empty((tokens, layers, k), dtype=np.int32)
    out[0] = generator.random((layers, experts)).argsort(axis=-1)[:, :k]
    for token in range(1, tokens):
        for layer in range(layers):
            kept = [e for e in out[token - 1, layer] if generator.random() < 0.6]
            fresh = [e for e in generator.permutation(experts) if e not in kept]
            out[token, layer] = (kept + fresh)[:k]
    return Trace(out, np.array([0, 100, tokens]), experts)


TRACE = sticky()


@pytest.mark.parametrize(
    ("layers", "experts", "top_k"),
    [(12, 128, 8), (48, 128, 8), (26, 64, 6), (16, 64, 8), (32, 8, 2), (4, 160, 6), (3, 128, 1), (2, 5, 5)],
)
def test_mapped_traces_have_the_shape_and_the_locality(layers: int, experts: int, top_k: int) -> None:
    mapped = map_trace(TRACE, layers, experts, top_k)
    trace = mapped.trace
    assert (trace.tokens, trace.layers, trace.num_experts, trace.top_k) == (400, layers, experts, top_k)
    assert np.array_equal(trace.offsets, TRACE.offsets)
    assert mapped.chance_after == pytest.approx(top_k / experts)
    assert mapped.locality_after >= min(1.0, mapped.chance_after + 0.1)
    # Replaced choices would be locality that was never recorded.
    assert mapped.filled < 0.35
    assert f"{layers} layers of {experts} experts, {top_k} a token" in mapped.how


def test_a_trace_of_the_same_shape_is_unchanged() -> None:
    mapped = map_trace(TRACE, 24, 32, 4)
    assert mapped.trace is TRACE
    assert mapped.locality_before == mapped.locality_after


@pytest.mark.parametrize(("layers", "experts", "top_k"), [(60, 128, 8), (60, 64, 4), (24, 64, 8)])
def test_no_two_layers_are_the_same_nor_made_of_the_same_layers(
    layers: int, experts: int, top_k: int
) -> None:
    trace = map_trace(TRACE, layers, experts, top_k).trace
    seen = {trace.experts[:, layer].tobytes() for layer in range(layers)}
    assert len(seen) == layers
    # Permuting experts changes neither who follows whom nor how often: that would show two copies of one
    # layer.
    patterns = set()
    for layer in range(min(layers, 48)):
        rows = np.sort(trace.experts[:, layer], axis=-1)
        shared = [len(np.intersect1d(a, b)) for a, b in pairwise(rows)]
        patterns.add(tuple(shared))
    assert len(patterns) == min(layers, 48)


def test_groups_keep_to_their_own_experts() -> None:
    trace = map_trace(TRACE, 12, 128, 8).trace
    groups = np.sort(trace.experts // 32, axis=-1)
    assert (groups == [0, 0, 1, 1, 2, 2, 3, 3]).all()


def test_experts_of_a_group_are_a_fixed_permutation_of_one_layers_experts() -> None:
    trace = map_trace(TRACE, 12, 128, 8).trace
    source = {}
    for token in range(TRACE.tokens):
        for place in range(2):
            recorded, given = int(TRACE.experts[token, 3, place]), int(trace.experts[token, 3, place])
            assert source.setdefault(recorded, given) == given
    assert len(set(source.values())) == len(source)


def test_other_seeds_permute_otherwise() -> None:
    one, other = (map_trace(TRACE, 12, 128, 8, seed=seed).trace for seed in (0, 1))
    again = map_trace(TRACE, 12, 128, 8, seed=0).trace
    assert np.array_equal(one.experts, again.experts)
    assert not np.array_equal(one.experts, other.experts)


def test_the_description_has_unused_and_replaced_experts() -> None:
    assert "96 of 128 experts of a layer are never chosen" in map_trace(TRACE, 3, 128, 1).how
    folded = map_trace(TRACE, 3, 5, 4)
    assert folded.filled > 0
    assert f"{folded.filled:.1%} of the choices fell together" in folded.how
    assert "used again" in map_trace(TRACE, 25, 32, 4).how


@pytest.mark.parametrize(("layers", "experts", "top_k"), [(0, 8, 2), (2, 8, 0), (2, 8, 9)])
def test_impossible_shapes_are_refused(layers: int, experts: int, top_k: int) -> None:
    with pytest.raises(UsageError, match="no model has"):
        map_trace(TRACE, layers, experts, top_k)
