"""A perfect predictor, for bounds: it reads the replayed trace."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from moechat.configurator.systems import CacheSettings
from moechat.errors import UsageError
from moechat.routing import Replay


class PerfectPredictor:
    """Ranks the experts first that the replay will choose.

    Args:
        replay: The trace.
        experts: Number of experts of a layer.
    """

    def __init__(self, replay: Replay, experts: int) -> None:
        self._replay = replay
        self._scores = np.zeros(experts, dtype=np.float32)

    def scores(self, ordinal: int, ahead: int, hidden: torch.Tensor) -> npt.NDArray[np.float32] | None:
        """See :meth:`moechat.predict.Predictor.scores`."""
        self._scores.fill(0)
        self._scores[self._replay.upcoming(ordinal, ahead)] = 1
        return self._scores


def refuse_without_replay(settings: CacheSettings, replay: object) -> None:
    """Refuse settings that need to know the future, without a replayed trace.

    Raises:
        UsageError: They need a replayed trace.
    """
    if replay is None and settings.needs_future:
        raise UsageError(
            "the policy belady and perfect prefetches need a replayed trace, to know the future",
            hint="`moechat simulate` and `moechat bench --routing` replay one",
        )
