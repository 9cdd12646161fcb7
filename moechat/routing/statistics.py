"""Routing statistics: the probabilities that cache plans are computed from (MoEpic, section 3.4.2)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moechat import _native


@dataclass(frozen=True)
class RoutingStatistics:
    """Counts over decoded tokens, by layer. Passes of several tokens (prompts) are not counted.

    The rank of an expert just before an access is the largest number of cached experts for which it is not
    among them; for most policies, its position among the layer's experts by priority. An activation is a hit
    with C cached experts if its rank is below C, so one histogram of ranks gives the hit rate for every C.
    ``native/src/cache/routing_counter.h`` defines the cached experts.

    Attributes:
        policy: Eviction policy whose priorities give the ranks.
        top_k: Experts per token.
        tokens: Counted decoded tokens, the maximum over layers.
        predicted: int64 ``[layers]``: counted tokens with a prediction for the layer.
        activations: int64 ``[layers, experts]``: activations of each expert.
        ranks: int64 ``[layers, experts]``: activations of experts with rank r.
        hits_of_prediction: int64 ``[layers, depth]``: predictions whose expert at position y was chosen.
        ranks_of_prediction: int64 ``[layers, depth, experts]``: predictions whose expert at position y had
            rank r.

    Raises:
        ValueError: Shapes do not match, or a count is negative.
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

    def digest(self) -> str:
        """SHA-256 of all counts, in hexadecimal."""
        whole = hashlib.sha256(repr((self.policy, self.top_k, self.tokens, self.activations.shape)).encode())
        for array in (
            self.predicted,
            self.activations,
            self.ranks,
            self.hits_of_prediction,
            self.ranks_of_prediction,
        ):
            whole.update(np.ascontiguousarray(array).tobytes())
        return whole.hexdigest()

    @classmethod
    def zero(
        cls, policy: str, layers: int, experts: int, top_k: int, depth: int | None = None
    ) -> RoutingStatistics:
        """Statistics with all counts 0.

        Args:
            policy: Eviction policy.
            layers: Number of expert layers.
            experts: Experts per layer.
            top_k: Experts per token.
            depth: Counted positions of a prediction; ``None`` takes the counter's.
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
        """Sum of both.

        Raises:
            ValueError: Policies or shapes differ.
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
        """Halve all counts, so that later ones weigh twice as much.

        Sums over ranks and experts are halved too, within 1, so that small counts are not rounded away.
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
        """Whether both have the same policy and shape."""
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
        """Number of expert layers."""
        return len(self.activations)

    @property
    def experts(self) -> int:
        """Experts per layer."""
        return int(self.activations.shape[1])

    @property
    def depth(self) -> int:
        """Counted positions of a prediction."""
        return int(self.hits_of_prediction.shape[1])

    @cached_property
    def hit_rate(self) -> npt.NDArray[np.float64]:
        """``H(C)``: float64 ``[layers, experts + 1]``, share of activations that hit with C cached
        experts.
        """
        total = np.maximum(self.ranks.sum(axis=1, keepdims=True), 1)
        return _from_nothing(self.ranks / total)

    @cached_property
    def prediction_accuracy(self) -> npt.NDArray[np.float64]:
        """``P(y)``: float64 ``[layers, depth]``, share of predictions whose expert at position y is
        activated.
        """
        return self.hits_of_prediction / np.maximum(self.predicted, 1)[:, None]

    @cached_property
    def prediction_hit_rate(self) -> npt.NDArray[np.float64]:
        """``PH(y, C)``: float64 ``[layers, depth, experts + 1]``, share of them whose expert is cached."""
        return _from_nothing(self.ranks_of_prediction / np.maximum(self.predicted, 1)[:, None, None])


def _halved(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Half of the counts, rounded so that their sums along the last axis are halved too."""
    return np.diff(np.cumsum(counts, axis=-1) // 2, axis=-1, prepend=0)


def _from_nothing(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sums of the first 0, 1, ... shares along the last axis."""
    sums = np.zeros((*shares.shape[:-1], shares.shape[-1] + 1))
    np.cumsum(shares, axis=-1, out=sums[..., 1:])
    return sums
