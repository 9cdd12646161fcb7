"""What a predictor is."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class Predictor(Protocol):
    """Ranks the experts of layers to come."""

    def scores(self, ordinal: int, ahead: int, hidden: torch.Tensor) -> npt.NDArray[np.float32] | None:
        """Rank the experts of expert layer ``(ordinal + ahead) % layers``.

        Args:
            ordinal: Expert layer that is about to be computed.
            ahead: Layers from there to the one asked for, at least 1; after the last layer come those of the
                next token.
            hidden: float32 ``[1, hidden_size]``: what the experts of layer ``ordinal`` receive.

        Returns:
            float32 ``[experts]``, the likeliest expert highest; valid until the next call. ``None``: no
            prediction.
        """
        ...
