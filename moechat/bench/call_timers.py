"""Measures the time of each native call of an expert layer, and of predictions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moechat.predict import Predictor
from moechat.predict.additive import AdditivePredictor
from moechat.predict.next_router import RankingRouter


class TimedCalls:
    """Wraps the native runner and sums up the seconds in its calls.

    Attributes:
        seconds: Seconds by call: ``begin``, ``prefetch`` and ``finish``.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.reset()

    def reset(self) -> None:
        """Reset all sums to 0."""
        self.seconds = {"begin": 0.0, "prefetch": 0.0, "finish": 0.0}

    def begin(self, *arguments: Any) -> None:
        """See the native runner."""
        started = time.perf_counter()
        self._runner.begin(*arguments)
        self.seconds["begin"] += time.perf_counter() - started

    def prefetch(self, *arguments: Any, later: bool = False) -> int:
        """See the native runner."""
        started = time.perf_counter()
        queued: int = self._runner.prefetch(*arguments, later=later)
        self.seconds["prefetch"] += time.perf_counter() - started
        return queued

    def finish(self, *arguments: Any) -> int:
        """See the native runner."""
        started = time.perf_counter()
        walked: int = self._runner.finish(*arguments)
        self.seconds["finish"] += time.perf_counter() - started
        return walked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class TimedPredictor:
    """Wraps a predictor and sums up its seconds.

    Attributes:
        seconds: Total so far.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self.seconds = 0.0

    def scores(self, ordinal: int, ahead: int, hidden: torch.Tensor) -> npt.NDArray[np.float32] | None:
        """See :meth:`moechat.predict.Predictor.scores`."""
        started = time.perf_counter()
        scores = self._predictor.scores(ordinal, ahead, hidden)
        self.seconds += time.perf_counter() - started
        return scores


class TimedAdditivePredictor(AdditivePredictor):
    """A predictor that corrects itself, and sums up its seconds.

    Attributes:
        seconds: Total so far.
    """

    def __init__(self, routers: Sequence[RankingRouter | None], experts: int, depth: int) -> None:
        super().__init__(routers, experts, depth)
        self.seconds = 0.0

    def scores(self, ordinal: int, ahead: int, hidden: torch.Tensor) -> npt.NDArray[np.float32] | None:
        """See :meth:`moechat.predict.Predictor.scores`."""
        started = time.perf_counter()
        scores = super().scores(ordinal, ahead, hidden)
        self.seconds += time.perf_counter() - started
        return scores

    def observe(self, ordinal: int, chosen: npt.NDArray[np.int64]) -> None:
        """See :meth:`moechat.predict.additive.AdditivePredictor.observe`."""
        started = time.perf_counter()
        super().observe(ordinal, chosen)
        self.seconds += time.perf_counter() - started
