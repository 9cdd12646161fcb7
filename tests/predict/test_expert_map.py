"""Predictions from the routers' distributions of earlier tokens (FineMoE)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moechat.predict.expert_map import ExpertMapPredictor, MapOptions
from moechat.predict.requests import AheadQueue

NOTHING = np.zeros(0, np.int32)


def row(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def play(predictor: ExpertMapPredictor, token: int, rows: npt.NDArray[np.float32]) -> list[AheadQueue | None]:
    """One decoded token; what was queued before the first layer and after each."""
    found = [predictor.begin_pass("request", token)]
    for layer, gates in enumerate(rows):
        predictor.observe(layer, NOTHING, gates)
        found.append(predictor.queue(layer))
    return found


def named(queue: AheadQueue | None) -> list[tuple[int, int]]:
    assert queue is not None
    return list(zip(queue.layers.tolist(), queue.experts.tolist(), strict=True))


def test_the_worked_example_of_the_search() -> None:
    predictor = ExpertMapPredictor(2, 4, 2, MapOptions(distance=1))
    first = np.stack([row(0.7, 0.2, 0.05, 0.05), row(0.1, 0.2, 0.3, 0.4)])
    other = np.stack([row(0.1, 0.1, 0.2, 0.6), row(0.4, 0.3, 0.2, 0.1)])
    play(predictor, 1, first)
    play(predictor, 2, other)
    queues = play(predictor, 3, np.stack([row(0.6, 0.3, 0.05, 0.05), row(1, 0, 0, 0)]))
    assert queues[0] is None  # neither the token nor an embedding is known
    # The cosines are .983 and .297: of the first map, with threshold .017, K experts.
    assert named(queues[1]) == [(1, 3), (1, 2)]
    assert queues[2] is None


def test_the_less_similar_a_map_is_the_more_experts_are_fetched() -> None:
    one, two = ExpertMapPredictor(1, 4, 1), ExpertMapPredictor(1, 4, 2)
    for predictor in (one, two):
        play(predictor, 0, row(0.4, 0.3, 0.2, 0.1)[None])
    counts = [len(one._wanted(0, 0, score)[0]) for score in (1, 0.7, 0.5, 0.2, 0.05, -1)]
    assert counts == [1, 1, 2, 3, 4, 4]
    # The example: score .2, threshold .8, three experts (the authors' code takes two).
    assert counts[3] == 3
    assert two._wanted(0, 0, 1.0)[0].tolist() == [0, 1]  # at least K


def test_an_expert_without_a_share_is_not_fetched() -> None:
    predictor = ExpertMapPredictor(1, 4, 3)
    play(predictor, 0, row(0, 0.75, 0, 0.25)[None])
    experts, shares = predictor._wanted(0, 0, 0.0)
    assert (experts.tolist(), shares.tolist()) == ([1, 3], [0.75, 0.25])


def test_priority_is_the_share_over_the_distance() -> None:
    predictor = ExpertMapPredictor(4, 2, 1, MapOptions(distance=3))
    rows = np.stack([row(1, 0), row(0.2, 0.8), row(0.55, 0.45), row(0.6, 0.4)])
    play(predictor, 5, rows)
    queues = play(predictor, 5, rows)  # the token is known: its own map, layers 0 to 2
    # .8 / 2 before .55 / 3: distances count from before the first layer.
    assert named(queues[0]) == [(0, 0), (1, 1), (2, 0)]
    # After layer 0: 1.8 / 1, .55 / 2 and, newly found, .6 / 3.
    assert named(queues[1]) == [(1, 1), (2, 0), (3, 0)]
    assert named(queues[2]) == [(2, 0), (3, 0)]
    assert named(queues[3]) == [(3, 0)]
    assert queues[4] is None


def test_no_layer_is_queued_once_its_router_has_chosen() -> None:
    rng = np.random.default_rng(1)
    predictor = ExpertMapPredictor(6, 4, 2, MapOptions(distance=3))
    for token in range(30):
        rows = rng.dirichlet(np.ones(4), size=6).astype(np.float32)
        for slot, queue in enumerate(play(predictor, token % 7, rows)):
            if queue is not None:
                assert queue.layers.min() >= slot
                assert queue.layers.max() <= slot + 2


def test_a_token_seen_before_matches_its_newest_map() -> None:
    predictor = ExpertMapPredictor(2, 3, 1)
    play(predictor, 9, np.stack([row(1, 0, 0), row(0, 1, 0)]))
    play(predictor, 9, np.stack([row(0, 0, 1), row(0, 0, 1)]))
    assert named(predictor.begin_pass("request", 9)) == [(0, 2), (1, 2)]


def test_embeddings_find_tokens_of_similar_meaning() -> None:
    meanings = {1: row(1, 0), 2: row(0, 1), 3: row(0.6, 0.8)}
    predictor = ExpertMapPredictor(1, 4, 1, embed=meanings.get)
    play(predictor, 1, row(1, 0, 0, 0)[None])
    play(predictor, 2, row(0, 0.5, 0.5, 0)[None])
    # The cosine with token 2 is .8: two experts are worth .5 >= .2, and one is enough.
    assert named(predictor.begin_pass("request", 3)) == [(0, 1)]
    assert predictor.begin_pass("request", 4) is None  # no embedding


def test_a_full_store_replaces_the_most_redundant() -> None:
    meanings = {n: row(np.cos(n), np.sin(n)) for n in range(4)}
    predictor = ExpertMapPredictor(3, 2, 1, MapOptions(entries=2, distance=1), embed=meanings.get)
    one, other = np.tile(row(1, 0), (3, 1)), np.tile(row(0, 1), (3, 1))
    play(predictor, 0, one)
    play(predictor, 3, other)
    play(predictor, 1, np.tile(row(0.8, 0.2), (3, 1)))
    assert predictor._ids[:2].tolist() == [1, 3]
    assert predictor.begin_pass("request", 0) is not None  # by meaning: its own map has gone


def test_redundancy_of_the_worked_example() -> None:
    # d = 1, L = 3, similarity of meaning .8, of maps .983: .8 / 3 + .983 * 2 / 3 = .922.
    meanings = {1: row(1, 0), 2: row(0.8, 0.6)}
    predictor = ExpertMapPredictor(3, 2, 1, MapOptions(distance=1), embed=meanings.get)
    play(predictor, 1, np.tile(row(1, 0), (3, 1)))
    assert predictor.redundancy(2, row(0.983)) == pytest.approx([0.922], abs=5e-4)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_search_is_the_one_of_the_equations(data: st.DataObject) -> None:
    """Against a slow reference that computes every cosine anew."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    layers, experts = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 6))
    top_k, distance = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 6))
    entries = data.draw(st.integers(1, 12))
    predictor = ExpertMapPredictor(layers, experts, top_k, MapOptions(entries, distance))
    for _ in range(data.draw(st.integers(1, 15))):
        play(predictor, -1, rng.dirichlet(np.ones(experts), size=layers).astype(np.float32))
    kept = predictor.arrays()["maps"].astype(np.float64)
    assert len(kept) <= entries
    rows = rng.dirichlet(np.ones(experts), size=layers).astype(np.float32)
    predictor.begin_pass("request", -1)
    for layer in range(layers):
        predictor.observe(layer, NOTHING, rows[layer])
        alike = [
            float((rows[: layer + 1] * each[: layer + 1]).sum())
            / float(np.linalg.norm(rows[: layer + 1]) * np.linalg.norm(each[: layer + 1]))
            for each in kept
        ]
        target = layer + min(distance, layers)
        if layer == layers - 1:
            break  # its map is kept now, and the next search is the next token's
        assert predictor._along(layer) == pytest.approx(alike, abs=1e-5)
        queue = predictor.queue(layer)
        if target >= layers:
            continue
        best = int(np.argmax(predictor._along(layer)))
        share = kept[best][target]
        order = np.argsort(-share, kind="stable")
        threshold = min(1.0, max(0.0, 1 - float(predictor._along(layer)[best])))
        count = next(
            n for n in range(1, experts + 1) if share[order[:n]].sum() >= threshold - 1e-6 or n == experts
        )
        assert queue is not None
        found = {expert for at, expert in named(queue) if at == target}
        wanted = set(order[: max(count, top_k)].tolist())
        assert found <= set(order[: max(count, top_k) + 1].tolist())
        assert {expert for expert in wanted if share[expert] > 0} - found <= {
            int(order[max(count, top_k) - 1])
        }


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: {**kept, "maps": kept["maps"][:, :1]},
        lambda kept: {**kept, "maps": -kept["maps"]},
        lambda kept: {**kept, "maps": kept["maps"] * np.float16(3)},
        lambda kept: {**kept, "maps": kept["maps"][0]},
    ],
)
def test_what_is_no_store_is_refused(spoil: object) -> None:
    predictor = ExpertMapPredictor(2, 3, 1)
    for token in range(3):
        play(predictor, token, np.tile(row(0.5, 0.25, 0.25), (2, 1)))
    with pytest.raises(ValueError, match="maps"):
        ExpertMapPredictor(2, 3, 1).learn(spoil(predictor.arrays()))  # type: ignore[operator]


def test_a_kept_store_predicts_as_before_without_the_tokens() -> None:
    rng = np.random.default_rng(4)
    first = ExpertMapPredictor(4, 4, 2, MapOptions(distance=1))
    for token in range(20):
        play(first, token, rng.dirichlet(np.ones(4), size=4).astype(np.float32))
    kept = first.arrays()
    assert list(kept) == ["maps"]  # nothing of the text
    second = ExpertMapPredictor(4, 4, 2, MapOptions(distance=1))
    second.learn(kept)
    rows = rng.dirichlet(np.ones(4), size=4).astype(np.float32)
    assert second.begin_pass("request", 3) is None
    for one, other in zip(play(first, -1, rows), play(second, -1, rows), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert named(one) == named(other)
