"""Interface of predictors."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class Predictor(Protocol):
    """Ranks the experts of upcoming layers."""

    def scores(self, ordinal: int, ahead: int, hidden: torch.Tensor) -> npt.NDArray[np.float32] | None:
        """Rank the experts of expert layer ``(ordinal + ahead) % layers``.

        Args:
            ordinal: Expert layer that is computed next.
            ahead: Distance of the predicted layer, at least 1; the next token's layers follow the last layer.
            hidden: float32 ``[1, hidden_size]``: input of the experts of layer ``ordinal``.

        Returns:
            float32 ``[experts]``, highest for the most likely expert; valid until the next call. ``None``: no
            prediction.
        """
        ...
