"""Predictions from the activation matrices of earlier requests (MoE-Infinity)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat.errors import UsageError
from moechat.predict.eamc import EamcOptions, EamcPredictor, Match

A = np.array([[6, 2, 0, 0], [1, 7, 0, 0], [0, 2, 6, 0]], dtype=np.float32)
B = np.array([[1, 1, 3, 3], [0, 0, 4, 4], [4, 4, 0, 0]], dtype=np.float32)


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def token(predictor: EamcPredictor, key: object, *rows: int) -> None:
    """One decoded token that chooses one expert of each layer."""
    predictor.begin_pass(key, -1)
    for layer, expert in enumerate(rows):
        predictor.observe(layer, ints(expert), None)


def example(match: Match = "prefix") -> EamcPredictor:
    predictor = EamcPredictor(3, 4, EamcOptions(match=match))
    for matrix in (A, B):
        predictor.add(matrix)
    return predictor


def test_the_worked_example() -> None:
    predictor = example()
    predictor.begin_pass("request", -1)
    predictor.observe(0, ints(0), None)
    assert predictor.similarity(0) == pytest.approx([0.949, 0.224], abs=5e-4)
    queue = predictor.queue(0)
    assert queue is not None
    named = list(zip(queue.layers.tolist(), queue.experts.tolist(), strict=True))
    assert named == [(1, 1), (2, 2), (1, 0), (2, 1)]
    assert queue.scores == pytest.approx([0.875, 0.75, 0.125, 0.25])
    decay = 1 - queue.layers / 3
    assert queue.scores * decay == pytest.approx([0.5833, 0.25, 0.0833, 0.0833], abs=1e-4)


def test_whole_requests_may_be_compared_instead() -> None:
    predictor = example("full")
    predictor.begin_pass("request", -1)
    predictor.observe(0, ints(0), None)
    assert predictor.similarity(0) == pytest.approx([0.526, 0.109], abs=5e-4)


def test_equal_matches_are_summed() -> None:
    predictor = EamcPredictor(2, 3)
    predictor.add(np.array([[2, 0, 0], [2, 0, 0]], np.float32))
    predictor.add(np.array([[4, 0, 0], [0, 4, 0]], np.float32))
    predictor.begin_pass("request", -1)
    predictor.observe(0, ints(0), None)
    queue = predictor.queue(0)
    assert queue is not None
    assert queue.experts.tolist() == [1, 0]
    assert queue.scores == pytest.approx([4 / 6, 2 / 6])


def test_nothing_is_predicted_before_a_request_has_ended() -> None:
    predictor = EamcPredictor(2, 4)
    predictor.begin_request("first")
    assert predictor.begin_pass("first", 7) is None
    predictor.observe(0, ints(1), None)
    assert predictor.queue(0) is None
    predictor.observe(1, ints(2), None)
    predictor.end_request("first")
    assert predictor.entries == 1
    predictor.begin_pass("second", 7)
    predictor.observe(0, ints(1), None)
    queue = predictor.queue(0)
    assert queue is not None
    assert (queue.layers.tolist(), queue.experts.tolist()) == ([1], [2])


def test_a_request_that_is_repeated_is_found_with_distance_0() -> None:
    predictor = example()
    predictor.begin_request("again")
    for rows in ((0, 1, 2), (0, 1, 2), (1, 1, 1)):
        token(predictor, "again", *rows)
    predictor.end_request("again")
    rows = np.zeros((3, 4), np.float32)
    for choice in ((0, 1, 2), (0, 1, 2), (1, 1, 1)):
        rows[range(3), choice] += 1
    twice = EamcPredictor(3, 4, EamcOptions(entries=3))
    twice.learn(predictor.arrays())
    twice.add(rows)  # full: it replaces the one most like it, itself
    matrices = twice.arrays()["matrices"]
    assert matrices.shape == (3, 4, 3)
    assert np.abs(matrices[:, :, 2] - rows / 3).max() < 1e-3
    assert np.abs(matrices[:, :, 0] - A / 8).max() < 1e-3


def test_a_full_collection_replaces_the_most_similar() -> None:
    predictor = EamcPredictor(3, 4, EamcOptions(entries=2))
    predictor.add(A)
    predictor.add(B)
    predictor.add(A * 2 + np.eye(4, dtype=np.float32)[:3] * 2)
    matrices = predictor.arrays()["matrices"]
    assert np.abs(matrices[:, :, 1] - B / 8).max() < 1e-3
    assert np.abs(matrices[:, :, 0] - A / 8).max() > 1e-2


def test_requests_that_alternate_keep_matrices_of_their_own() -> None:
    predictor = EamcPredictor(2, 4)
    for key in ("a", "b"):
        predictor.begin_request(key)
    for _ in range(3):
        token(predictor, "a", 0, 1)
        token(predictor, "b", 2, 3)
    predictor.end_request("a")
    predictor.end_request("b")
    matrices = predictor.arrays()["matrices"]
    assert matrices[0, :, 0].tolist() == [1, 0, 0, 0]
    assert matrices[1, :, 1].tolist() == [0, 0, 0, 1]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), match=st.sampled_from(["prefix", "full"]))
def test_the_incremental_similarity_is_the_direct_one(data: st.DataObject, match: Match) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    layers, experts, k = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 6)), 2
    predictor = EamcPredictor(layers, experts, EamcOptions(match=match))
    entries = []
    for _ in range(data.draw(st.integers(1, 40))):
        counts = np.zeros((layers, experts), np.float32)
        for _ in range(int(rng.integers(1, 5))):
            for layer in range(layers):
                counts[layer, rng.choice(experts, k, replace=False)] += 1
        entries.append(counts)
        predictor.add(counts)
    running = np.zeros((layers, experts), np.float32)
    predictor.begin_pass("request", -1)
    for layer in range(layers):
        chosen = rng.choice(experts, k, replace=False).astype(np.int32)
        running[layer, chosen] = 1
        predictor.observe(layer, chosen, None)
        compared = [entry[: layer + 1] if match == "prefix" else entry for entry in entries]
        direct = [
            float((running[: len(entry)] * entry).sum() / np.linalg.norm(running) / np.linalg.norm(entry))
            for entry in compared
        ]
        assert predictor.similarity(layer) == pytest.approx(direct, abs=1e-6)
        queue = predictor.queue(layer)
        if layer == layers - 1:
            assert queue is None
            continue
        assert queue is not None
        best = [entries[n] for n in np.flatnonzero(np.array(direct) >= max(direct) - 1e-6)]
        summed = sum(best)[layer + 1 :]
        shares = summed / summed.sum(axis=1, keepdims=True)
        for at, expert, score in zip(queue.layers, queue.experts, queue.scores, strict=True):
            assert score == pytest.approx(shares[at - layer - 1, expert], abs=1e-5)
        assert len(queue.experts) == min(128, np.count_nonzero(shares))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: {**kept, "matrices": kept["matrices"][:, :2]},
        lambda kept: {**kept, "matrices": kept["matrices"] * np.float16(np.nan)},
        lambda kept: {**kept, "matrices": -kept["matrices"]},
        lambda kept: {**kept, "scale": kept["scale"] * 0},
        lambda kept: {**kept, "matrices": kept["matrices"] * 2},
    ],
)
def test_what_is_no_collection_is_refused(spoil: object) -> None:
    kept = spoil(example().arrays())  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"matrices|scale"):
        EamcPredictor(3, 4).learn(kept)


def test_impossible_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="entries"):
        EamcOptions(entries=0)
    with pytest.raises(UsageError, match="match"):
        EamcOptions(match="half")  # type: ignore[arg-type]
