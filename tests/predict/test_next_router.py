"""The next layer's router as a predictor: scores, order, wrap-around, and the cost of a call."""

from __future__ import annotations

import time

import numpy as np
import torch

from moechat.models.router_search import Router, Scoring
from moechat.predict import NextRouterPredictor


def routers() -> list[Router | None]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return [
        Router(draw(8, 16)),
        Router(draw(8, 16), bias=draw(8)),
        None,
        Router(draw(8, 16), scoring=Scoring.SIGMOID, correction=draw(8)),
        Router(draw(8, 16), scoring=Scoring.SOFTMAX, correction=draw(8)),
        Router(draw(8, 16), bias=draw(8), correction=draw(8)),
    ]


def test_scores_rank_experts_like_the_router_of_the_next_layer() -> None:
    found = routers()
    predictor = NextRouterPredictor(found)
    hidden = torch.randn(1, 16, generator=torch.Generator().manual_seed(1))
    for ordinal in range(6):
        for ahead in (1, 2, 5, 7):
            router = found[(ordinal + ahead) % 6]
            scores = predictor.scores(ordinal, ahead, hidden)
            if router is None:
                assert scores is None
                continue
            assert scores is not None
            assert scores.dtype == np.float32
            expected = router.scores(hidden)[0].numpy()
            np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


def test_prediction_works_inside_and_outside_of_inference_mode() -> None:
    predictor = NextRouterPredictor(routers())
    hidden = torch.randn(1, 16)
    outside = predictor.scores(0, 1, hidden)
    assert outside is not None
    expected = outside.copy()
    with torch.inference_mode():
        inside = predictor.scores(0, 1, hidden.clone())
    assert inside is not None
    assert np.array_equal(inside, expected)
    made_inside = None
    with torch.inference_mode():
        made_inside = NextRouterPredictor(routers())
    assert np.array_equal(made_inside.scores(0, 1, hidden), expected)  # type: ignore[arg-type]


def test_without_any_router_nothing_is_predicted() -> None:
    predictor = NextRouterPredictor([None, None])
    assert predictor.scores(0, 1, torch.zeros(1, 4)) is None


def test_a_call_takes_a_few_microseconds_of_python() -> None:
    generator = torch.Generator().manual_seed(0)
    predictor = NextRouterPredictor([Router(torch.randn(8, 16, generator=generator)) for _ in range(4)])
    hidden = torch.randn(1, 16)
    best = float("inf")
    with torch.inference_mode():
        for _ in range(50):
            started = time.perf_counter()
            for ordinal in range(100):
                predictor.scores(ordinal, 1, hidden)
            best = min(best, (time.perf_counter() - started) / 100)
    assert best < 15e-6
