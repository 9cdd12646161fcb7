"""Prediction that is never wrong, for bounds: it reads the trace that is played back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from moechat.configurator.systems import CacheSettings
from moechat.errors import UsageError
from moechat.routing import Replay


class PerfectPredictor:
    """Ranks the experts that the replay will choose first.

    Args:
        replay: What will be chosen.
        experts: Of a layer.
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
    """Refuse settings that look into the future where there is none to look into.

    Raises:
        UsageError: They need a replayed trace, and there is none.
    """
    if replay is None and (settings.policy == "belady" or settings.prefetch == "perfect"):
        raise UsageError(
            "the policy belady and perfect prefetches look into the future, so they need a replayed trace",
            hint="`moechat simulate` and `moechat bench --routing` play one back",
        )
