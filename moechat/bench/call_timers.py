"""Where the time of an expert layer goes: each native call and the prediction are timed by themselves."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moechat.predict import Predictor


class TimedCalls:
    """Stands in for the native runner and adds up the seconds in its calls.

    Attributes:
        seconds: By call: ``begin``, ``prefetch`` and ``finish``.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.reset()

    def reset(self) -> None:
        """Begin to count again."""
        self.seconds = {"begin": 0.0, "prefetch": 0.0, "finish": 0.0}

    def begin(self, *arguments: Any) -> None:
        """As the native call."""
        started = time.perf_counter()
        self._runner.begin(*arguments)
        self.seconds["begin"] += time.perf_counter() - started

    def prefetch(self, *arguments: Any, far: bool = False) -> int:
        """As the native call."""
        started = time.perf_counter()
        queued: int = self._runner.prefetch(*arguments, far=far)
        self.seconds["prefetch"] += time.perf_counter() - started
        return queued

    def finish(self, *arguments: Any) -> int:
        """As the native call."""
        started = time.perf_counter()
        walked: int = self._runner.finish(*arguments)
        self.seconds["finish"] += time.perf_counter() - started
        return walked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class TimedPredictor:
    """Adds up the seconds that a predictor takes.

    Attributes:
        seconds: So far.
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
