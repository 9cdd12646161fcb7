"""Drawn predictions: of the stated accuracy, plausible where wrong, and the same for all systems."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moechat.errors import UsageError
from moechat.predict import ReplayPredictor
from moechat.routing import Replay, Trace
from moechat.simulate.predictions import accuracy_by_layer, draw_rankings

HIDDEN = torch.zeros(1, 4)


def skewed(tokens: int = 300, layers: int = 4, experts: int = 20, k: int = 4) -> Trace:
    """Expert e is chosen with a weight that falls with e."""
    generator = np.random.default_rng(5)
    weights = -0.2 * np.arange(experts) + generator.gumbel(size=(tokens, layers, experts))
    chosen = weights.argsort(axis=-1)[..., ::-1][..., :k].astype(np.int32)
    return Trace(chosen, np.array([0, tokens]), experts)


@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.7, 1.0])
def test_the_accuracy_is_the_given_one(accuracy: float) -> None:
    replay = Replay(skewed())
    predictor = ReplayPredictor(replay, accuracy=accuracy)
    right = total = 0
    for _ in range(299):
        for layer in range(4):
            replay.route(layer, 1)
            scores = predictor.scores(layer, 1, HIDDEN)
            assert scores is not None
            best = np.argsort(-scores)[:4]
            right += len(np.intersect1d(best, replay.upcoming(layer, 1)))
            total += 4
    assert right / total == pytest.approx(accuracy, abs=0.03)
    assert predictor.measured() == pytest.approx(accuracy, abs=0.03)


def test_scores_decrease_strictly_and_the_first_experts_are_right_most_often() -> None:
    replay = Replay(skewed())
    predictor = ReplayPredictor(replay, accuracy=0.7)
    right = np.zeros(20)
    for _ in range(200):
        replay.route(0, 1)
        scores = predictor.scores(0, 1, HIDDEN)
        assert scores is not None
        assert scores.dtype == np.float32
        assert scores.shape == (20,)
        assert len(np.unique(scores)) == 20
        right += np.isin(np.argsort(-scores), replay.upcoming(0, 1))
    assert (np.diff(right[:6]) < 0).all()
    assert right[0] > 1.4 * right[3] > 2 * right[5]


def test_a_replay_and_a_simulation_of_a_trace_predict_the_same() -> None:
    trace = skewed()
    replay = Replay(trace)
    predictor = ReplayPredictor(replay, accuracy=0.6, seed=7, lookahead=2)
    drawn = draw_rankings(trace, accuracy_by_layer(4, 0.6), width=4, lookahead=2, seed=7)
    for token in range(299):
        for layer in range(4):
            replay.route(layer, 1)
            for ahead in (1, 2):
                scores = predictor.scores(layer, ahead, HIDDEN)
                assert scores is not None
                next_token, target = divmod(layer + ahead, 4)
                expected = drawn[ahead - 1, token + next_token, target]
                assert np.argsort(-scores)[:4].tolist() == expected.tolist()


def test_wrong_predictions_are_popular_experts() -> None:
    trace = skewed(tokens=800)
    replay = Replay(trace)
    predictor = ReplayPredictor(replay, accuracy=0.3)
    wrong = np.zeros(20)
    for _ in range(799):
        replay.route(0, 1)
        scores = predictor.scores(0, 1, HIDDEN)
        assert scores is not None
        best = np.argsort(-scores)[:4]
        wrong[np.setdiff1d(best, replay.upcoming(0, 1))] += 1
    assert wrong[:5].sum() > 3 * wrong[-5:].sum()


def test_accuracy_falls_with_the_distance_up_to_the_lookahead() -> None:
    replay = Replay(skewed())
    predictor = ReplayPredictor(replay, accuracy=0.8, lookahead=3)
    measured = [predictor.measured(ahead) for ahead in (1, 2, 3)]
    assert measured == pytest.approx([0.8, 0.68, 0.578], abs=0.03)
    replay.route(0, 1)
    assert predictor.scores(0, 3, HIDDEN) is not None
    assert predictor.scores(0, 4, HIDDEN) is None


def test_predictions_follow_the_replay_and_are_drawn_once() -> None:
    trace = skewed()
    replays = [Replay(trace), Replay(trace)]
    one, other = (ReplayPredictor(replay, seed=3) for replay in replays)
    for replay in replays:
        replay.route(0, 2)
    first = one.scores(0, 1, HIDDEN)
    assert first is not None
    assert np.array_equal(first, one.scores(0, 1, HIDDEN))
    assert np.array_equal(first, other.scores(0, 1, HIDDEN))
    replays[0].rewind()
    replays[0].route(0, 2)
    assert np.array_equal(first, one.scores(0, 1, HIDDEN))
    assert not np.array_equal(first, one.scores(1, 1, HIDDEN))


def test_few_experts_limit_the_rate_of_wrong_predictions() -> None:
    replay = Replay(skewed(experts=5, k=4))
    predictor = ReplayPredictor(replay, accuracy=0.0)
    assert predictor.measured() == pytest.approx(0.75)


def test_the_replaced_predictor_is_called_too() -> None:
    calls = []

    class Other:
        def scores(self, ordinal: int, ahead: int, hidden: torch.Tensor) -> None:
            calls.append((ordinal, ahead, hidden))

    replay = Replay(skewed())
    predictor = ReplayPredictor(replay, instead_of=Other())
    replay.route(0, 1)
    assert predictor.scores(2, 1, HIDDEN) is not None
    assert calls == [(2, 1, HIDDEN)]


@pytest.mark.parametrize(
    "wrong", [{"accuracy": 1.5}, {"accuracy": float("nan")}, {"lookahead": 0}, {"lookahead": 9}]
)
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        ReplayPredictor(Replay(skewed()), **wrong)  # type: ignore[arg-type]
