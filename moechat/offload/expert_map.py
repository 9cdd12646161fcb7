"""Where every expert of a loaded model is, for people who watch it at work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from moechat.offload.tier import ExpertTier

# Decoded tokens after which a use counts half.
_HALF_LIFE_TOKENS = 64.0
_HIGHEST_USE = 9


class Place(StrEnum):
    """Where an expert is; the values are the characters of a map.

    Attributes:
        MEMORY: Wholly in the memory that it is computed from.
        PARTLY: Its first blocks are; nothing of the rest is on its way.
        COMING: Some of its blocks are on their way.
        CPU: Beside a GPU: at its last use the CPU computed a part of it from RAM, and the GPU still lacks it.
        MISSING: Nothing of it is in that memory.
    """

    MEMORY = "m"
    PARTLY = "p"
    COMING = "w"
    CPU = "c"
    MISSING = "."


@dataclass(frozen=True)
class ExpertMap:
    """Places and uses of all experts, one character each.

    Attributes:
        layers: Indices of the decoder layers that have experts.
        places: For each of them, a :class:`Place` for each expert.
        uses: For each of them, a digit for each expert: of the last hundred decoded tokens or so, about
            ``(digit / 9)²`` chose it. Empty where experts are mapped: routers' choices are not counted there.
        blocks: Blocks of experts in memory; where experts are mapped, all.
    """

    layers: tuple[int, ...]
    places: tuple[str, ...]
    uses: tuple[str, ...]
    blocks: int

    def counts(self) -> dict[str, int]:
        """Number of experts in each place, by the lower-case name of the place."""
        everything = "".join(self.places)
        return {place.name.lower(): everything.count(place) for place in Place}


class RecentUse:
    """Follows how often routers chose each expert lately: a mean that forgets, half in 64 tokens.

    It follows one tier at a time, and starts anew with another one.
    """

    def __init__(self) -> None:
        self._runner: object = None
        self._tokens = 0
        self._seen: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self._sums: npt.NDArray[np.float64] = np.zeros((0, 0))
        self._weight = 0.0

    def digits(self, near: ExpertTier) -> npt.NDArray[np.uint8]:
        """The uses up to now, ``[layers, experts]``, from 0 to 9; see :attr:`ExpertMap.uses`."""
        tokens, activations = near.runner.activations()
        if self._runner is not near.runner:
            self._runner = near.runner
            self._tokens, self._weight = 0, 0.0
            self._seen, self._sums = np.zeros_like(activations), np.zeros(activations.shape)
        if tokens < self._tokens:  # the counts were set to 0 meanwhile
            self._tokens, self._seen = 0, np.zeros_like(activations)
        gained = tokens - self._tokens
        if gained > 0:
            kept = 0.5 ** (gained / _HALF_LIFE_TOKENS)
            self._sums = self._sums * kept + (activations - self._seen)
            self._weight = self._weight * kept + gained
            self._tokens, self._seen = tokens, activations
        shares = self._sums / max(self._weight, 1.0)
        digits: npt.NDArray[np.float64] = np.rint(_HIGHEST_USE * np.sqrt(shares))
        return np.minimum(digits, _HIGHEST_USE).astype(np.uint8)


def read_map(near: ExpertTier | None, layers: tuple[int, ...], experts: int, recent: RecentUse) -> ExpertMap:
    """The map now; takes well under a millisecond and waits for no transfer.

    Args:
        near: The tier; ``None``: experts are mapped, so all are in memory.
        layers: Indices of the decoder layers with experts.
        experts: Experts of a layer.
        recent: Follows the uses between two maps.

    Raises:
        RuntimeError: The tier is closed, or this process is a forked one.
    """
    if near is None:
        return ExpertMap(layers, (Place.MEMORY.value * experts,) * len(layers), (), 0)
    resident, assigned, far = near.runner.places()
    whole = near.geometry.blocks_per_expert
    codes = np.full(resident.shape, ord(Place.MISSING), np.uint8)
    codes[resident > 0] = ord(Place.PARTLY)
    codes[far > 0] = ord(Place.CPU)
    codes[assigned > resident] = ord(Place.COMING)
    codes[resident == whole] = ord(Place.MEMORY)
    return ExpertMap(layers, _rows(codes), _rows(recent.digits(near) + ord("0")), int(resident.sum()))


def _rows(codes: npt.NDArray[np.uint8]) -> tuple[str, ...]:
    text, width = codes.tobytes().decode("ascii"), codes.shape[1]
    return tuple(text[start : start + width] for start in range(0, len(text), width))
