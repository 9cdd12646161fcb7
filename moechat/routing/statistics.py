"""What routing has been like: the probabilities that plans are made from (MoEpic, section 3.4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class RoutingStatistics:
    """Counts over decoded tokens, layer by layer.

    Experts are ranked by the priority of the eviction policy just before each access, the best has rank 0; an
    activation would be a hit with C cached experts if its rank is below C, so one count of ranks serves every
    C.

    Attributes:
        policy: Eviction policy by whose priorities experts were ranked.
        top_k: Experts a token.
        tokens: Decoded tokens counted.
        predicted: int64 ``[layers]``: those of them for which the layer had been predicted.
        activations: int64 ``[layers, experts]``: how often each expert was chosen.
        ranks: int64 ``[layers, experts]``: activations of an expert that had rank r.
        hits_of_prediction: int64 ``[layers, depth]``: predictions in which the expert at place y was chosen.
        ranks_of_prediction: int64 ``[layers, depth, experts]``: predictions in which the expert at place y
            had rank r.

    Raises:
        ValueError: Shapes do not fit together, or a count is negative.
    """

    policy: str
    top_k: int
    tokens: int
    predicted: npt.NDArray[np.int64]
    activations: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.int64]
    hits_of_prediction: npt.NDArray[np.int64]
    ranks_of_prediction: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        layers, experts = self.activations.shape
        depth = self.hits_of_prediction.shape[-1]
        for name, shape in (
            ("predicted", (layers,)),
            ("ranks", (layers, experts)),
            ("hits_of_prediction", (layers, depth)),
            ("ranks_of_prediction", (layers, depth, experts)),
        ):
            array = getattr(self, name)
            if array.shape != shape:
                raise ValueError(f"{name} has shape {list(array.shape)}, not {list(shape)}")
            if array.size and array.min() < 0:
                raise ValueError(f"{name} has a negative count")

    @property
    def layers(self) -> int:
        """Expert layers."""
        return len(self.activations)

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return int(self.activations.shape[1])

    @property
    def depth(self) -> int:
        """Places of a prediction that are counted."""
        return int(self.hits_of_prediction.shape[1])

    @cached_property
    def hit_rate(self) -> npt.NDArray[np.float64]:
        """``H(C)``: float64 ``[layers, experts + 1]``, share of activations that C cached experts serve."""
        total = np.maximum(self.ranks.sum(axis=1, keepdims=True), 1)
        return _from_nothing(self.ranks / total)

    @cached_property
    def prediction_accuracy(self) -> npt.NDArray[np.float64]:
        """``P(y)``: float64 ``[layers, depth]``, how often the expert predicted at place y is activated."""
        return self.hits_of_prediction / np.maximum(self.predicted, 1)[:, None]

    @cached_property
    def prediction_hit_rate(self) -> npt.NDArray[np.float64]:
        """``PH(y, C)``: float64 ``[layers, depth, experts + 1]``, how often that expert is cached."""
        return _from_nothing(self.ranks_of_prediction / np.maximum(self.predicted, 1)[:, None, None])


def _from_nothing(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sums of the first 0, 1, ... shares along the last axis."""
    sums = np.zeros((*shares.shape[:-1], shares.shape[-1] + 1))
    np.cumsum(shares, axis=-1, out=sums[..., 1:])
    return sums
