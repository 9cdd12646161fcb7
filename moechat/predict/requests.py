"""Predictors that learn from requests: which experts of all later layers to fetch, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

# Most experts that a queue names. Those at its end are rarely fetched before the next layer makes a new one.
MOST_QUEUED = 128


@dataclass(frozen=True)
class AheadQueue:
    """Experts of later layers, most urgent first.

    Attributes:
        layers: int32 ``[n]``: the expert layer of each.
        experts: int32 ``[n]``.
        scores: float32 ``[n]``: the expected share of each in its router's distribution.
    """

    layers: Ints
    experts: Ints
    scores: Floats


class RequestPredictor(Protocol):
    """Learns from the routing of decoded tokens, and orders the experts of later layers.

    Life cycle: ``begin_request``, then for each decoded token ``begin_pass``, and for each expert layer
    ``observe`` and ``queue``; ``end_request`` at last. Prompts are not observed, nor tokens whose keys and
    values are kept from an earlier request. A request that begins before another has ended goes on beside
    it: ``key`` says whose pass it is. Not thread-safe.

    Attributes:
        needs_gates: It uses the routers' distributions.
        entries: Number of things that it has learned and keeps.
    """

    needs_gates: bool

    @property
    def entries(self) -> int: ...

    def begin_request(self, key: object) -> None:
        """A request begins."""
        ...

    def begin_pass(self, key: object, token: int) -> AheadQueue | None:
        """A token of a request is decoded.

        Args:
            key: The request.
            token: Its id, or -1 where it is not known.

        Returns:
            What to fetch before the first layer; ``None``: no prediction.
        """
        ...

    def observe(self, ordinal: int, chosen: Ints, gates: Floats | None) -> None:
        """A router has chosen.

        Args:
            ordinal: Expert layer; layers come in order.
            chosen: int32 ``[k]``.
            gates: float32 ``[experts]``: the router's distribution; ``None``: not known.
        """
        ...

    def queue(self, ordinal: int) -> AheadQueue | None:
        """What to fetch after the router of a layer, which was observed; ``None``: no prediction."""
        ...

    def end_request(self, key: object) -> None:
        """A request has ended, by itself or not."""
        ...

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What it has learned, to be kept; :meth:`learn` takes it."""
        ...

    def learn(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Take over what was kept.

        Raises:
            ValueError: The arrays are not those of a predictor of these sizes.
        """
        ...


def known_part(chosen: Ints, weights: npt.NDArray[Any] | None, experts: int) -> Floats:
    """A router's distribution where only its choice is known: the others are 0.

    Args:
        chosen: int32 ``[k]``; numbers outside the layer are left out.
        weights: ``[k]``: their weights; ``None``: all the same.
        experts: Experts of the layer.

    Returns:
        float32 ``[experts]``, with a sum of 1 at most.
    """
    row = np.zeros(experts, dtype=np.float32)
    inside = (chosen >= 0) & (chosen < experts)
    row[chosen[inside]] = 1 / max(1, len(chosen)) if weights is None else np.maximum(weights[inside], 0)
    total = float(row.sum())
    return row / np.float32(total) if total > 1 else row
