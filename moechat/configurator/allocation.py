"""Result of an allocation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Allocation:
    """Pages of the near tier, divided among the layers.

    Attributes:
        method: Its algorithm, one of :data:`moechat.configurator.systems.Allocation`.
        targets: int32 ``[layers, 2]``: experts kept, C, and blocks kept of each, ``θ·B``; input of
            ``SplitExpertCache``.
        loaded: float64 ``[layers]``: m, activated experts expected in the near tier when the router is done.
        exposed: float64 ``[layers]``: T_i, exposed (not hidden) load time per token, seconds.
        moves: Number of search steps.
    """

    method: str
    targets: npt.NDArray[np.int32]
    loaded: npt.NDArray[np.float64]
    exposed: npt.NDArray[np.float64]
    moves: int = 0

    @property
    def exposed_total(self) -> float:
        """Exposed seconds per token."""
        return float(self.exposed.sum())
