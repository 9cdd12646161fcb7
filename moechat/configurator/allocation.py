"""What a configurator gives back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Allocation:
    """Pages of the near tier, divided among the layers.

    Attributes:
        method: Which algorithm made it, as in :data:`moechat.configurator.systems.Allocation`.
        targets: int32 ``[layers, 2]``: experts kept, C, and blocks kept of each, ``θ·B``; what
            ``SplitExpertCache`` takes.
        loaded: float64 ``[layers]``: m, activated experts expected to be there when the router has spoken.
        exposed: float64 ``[layers]``: T_i, seconds of load time a token that nothing hides.
        moves: Steps that the search took.
    """

    method: str
    targets: npt.NDArray[np.int32]
    loaded: npt.NDArray[np.float64]
    exposed: npt.NDArray[np.float64]
    moves: int = 0

    @property
    def exposed_total(self) -> float:
        """Seconds a token."""
        return float(self.exposed.sum())
