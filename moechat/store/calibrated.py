"""What a conversion asks of a calibration, which measures the inputs of experts while it converts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moechat.store.quantizer import Biases, Matrices

# Packs an expert of a layer, by its number; otherwise as moechat.store.quantizer.Packer.
PackExpert = Callable[[int, Matrices, Biases | None, NDArray[np.uint8]], None]
# Converts an expert layer, given its ordinal and what makes its packer, unless it was converted before;
# returns its records, uint8 [experts, blocks, record_bytes].
ConvertLayer = Callable[[int, Callable[[], PackExpert]], NDArray[np.uint8]]


class Calibration(Protocol):
    """Runs the model over a text."""

    def run(self, convert_layer: ConvertLayer, last: int) -> bool:
        """Call ``convert_layer`` for the expert layers in order, and go on with the records it returns.

        Before the call for a layer, and before the first, the dense tensors that the model reads up to that
        layer's experts can be read. Those of layers behind the last one may not be there.

        Args:
            convert_layer: Converts a layer.
            last: Ordinal of the last layer that is not converted yet: the model runs no further.

        Returns:
            Whether the model ran to that layer's experts. Errors of ``convert_layer`` are raised.
        """
        ...
