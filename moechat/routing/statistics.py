"""What routing has been like: the probabilities that plans are made from (MoEpic, section 3.4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moechat import _native


@dataclass(frozen=True)
class RoutingStatistics:
    """Counts over decoded tokens, layer by layer. Passes of several tokens (prompts) are not counted.

    The rank of an expert just before an access is the least number of cached experts with which it would not
    be cached; for most policies, its place among the layer's experts by their priorities. An activation is a
    hit with C cached experts if its rank is below C, so one count of ranks serves every C.
    ``native/src/cache/routing_counter.h`` says what is cached.

    Attributes:
        policy: Eviction policy by whose priorities experts were ranked.
        top_k: Experts a token.
        tokens: Decoded tokens counted, by the layer that has seen most.
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

    @classmethod
    def zero(
        cls, policy: str, layers: int, experts: int, top_k: int, depth: int | None = None
    ) -> RoutingStatistics:
        """Statistics of no token.

        Args:
            policy: As in the attributes.
            layers: Expert layers.
            experts: Experts of a layer.
            top_k: Experts a token.
            depth: Places of a prediction; ``None`` takes those that the counter counts.
        """
        if depth is None:
            depth = _native.prediction_depth(experts, top_k)
        return cls(
            policy,
            top_k,
            0,
            np.zeros(layers, np.int64),
            np.zeros((layers, experts), np.int64),
            np.zeros((layers, experts), np.int64),
            np.zeros((layers, depth), np.int64),
            np.zeros((layers, depth, experts), np.int64),
        )

    def merge(self, other: RoutingStatistics) -> RoutingStatistics:
        """Both together.

        Raises:
            ValueError: They are of different policies or shapes.
        """
        if not self.fits(other):
            raise ValueError(
                f"statistics of {other.describe()} cannot be added to those of {self.describe()}"
            )
        return RoutingStatistics(
            self.policy,
            self.top_k,
            self.tokens + other.tokens,
            self.predicted + other.predicted,
            self.activations + other.activations,
            self.ranks + other.ranks,
            self.hits_of_prediction + other.hits_of_prediction,
            self.ranks_of_prediction + other.ranks_of_prediction,
        )

    def faded(self) -> RoutingStatistics:
        """Half of every count, so that what comes next weighs twice as much.

        Sums over ranks and experts are halved too, within one: small counts are not rounded away.
        """
        return RoutingStatistics(
            self.policy,
            self.top_k,
            self.tokens // 2,
            self.predicted // 2,
            _halved(self.activations),
            _halved(self.ranks),
            self.hits_of_prediction // 2,
            _halved(self.ranks_of_prediction),
        )

    def fits(self, other: RoutingStatistics) -> bool:
        """Whether both are of the same policy and shape."""
        return (
            self.policy == other.policy
            and self.top_k == other.top_k
            and self.ranks_of_prediction.shape == other.ranks_of_prediction.shape
        )

    def describe(self) -> str:
        """Policy and shape, for messages."""
        return (
            f"{self.layers} layers of {self.experts} experts, {self.top_k} a token, "
            f"{self.depth} predicted, ranked by {self.policy}"
        )

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


def _halved(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Half of the counts, rounded so that their sums along the last axis are halved too."""
    return np.diff(np.cumsum(counts, axis=-1) // 2, axis=-1, prepend=0)


def _from_nothing(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sums of the first 0, 1, ... shares along the last axis."""
    sums = np.zeros((*shares.shape[:-1], shares.shape[-1] + 1))
    np.cumsum(shares, axis=-1, out=sums[..., 1:])
    return sums
