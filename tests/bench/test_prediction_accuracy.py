"""Accuracy of a predictor, counted by layer against the choices of the routers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from moechat.bench.accuracy import prediction_accuracy
from moechat.bench.decode import Bench
from moechat.engine import Engine

PROMPT, TOKENS = [1, 2, 3], [4, 5, 6, 7]


class Oracle:
    """Predicts the choices of an earlier run; wrong in one layer and empty in another on request."""

    def __init__(self, chosen: list[list[npt.NDArray[np.int64]]], *, wrong: int, silent: int) -> None:
        self.chosen = chosen
        self.wrong = wrong
        self.silent = silent
        self.token = -1

    def scores(self, ordinal: int, ahead: int, hidden: torch.Tensor) -> npt.NDArray[np.float32] | None:
        assert hidden.shape[0] == 1
        if ordinal == 0:
            self.token += 1
        turns, layer = divmod(ordinal + ahead, 3)
        if layer == self.silent or self.token + turns >= len(self.chosen):
            return None
        scores = np.zeros(8, dtype=np.float32)
        scores[self.chosen[self.token + turns][layer]] = 1
        return -scores if layer == self.wrong else scores


def record(bench: Bench) -> list[list[npt.NDArray[np.int64]]]:
    chosen: list[list[npt.NDArray[np.int64]]] = []

    def seen(ordinal: int, hidden: torch.Tensor, index: torch.Tensor) -> None:
        if ordinal == 0:
            chosen.append([])
        chosen[-1].append(index[-1].numpy().copy())

    end = bench.watch(seen)
    _, decoding = bench.start(PROMPT)
    for token in TOKENS:
        decoding.feed([token])
    end()
    return chosen


@pytest.mark.parametrize("ahead", [1, 2])
def test_right_wrong_and_missing_predictions_are_counted_separately(engine: Engine, ahead: int) -> None:
    bench = Bench(engine)
    chosen = record(bench)
    oracle = Oracle(chosen, wrong=2, silent=1)
    result = prediction_accuracy(bench, oracle, PROMPT, TOKENS, ahead=ahead)
    assert result["right_of_top_k"] == [2.0, None, 0.0]
    assert result["mean"] == 1.0
    assert result["chance"] == pytest.approx(0.5)
    assert (result["top_k"], result["tokens"], result["ahead"]) == (2, 4, ahead)
