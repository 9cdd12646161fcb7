"""Decoding of MXFP4: e2m1 elements, one power-of-two scale for each 32 of them.

Source: Open Compute Project, Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
# A byte holds two elements, the low nibble first: one lookup yields both.
_PAIRS = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], axis=1)
# e8m0: exponent with bias 127; 255 is NaN. 2**-127 is a float32 subnormal and exact.
_SCALES = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan)).astype(np.float32)


def mxfp4_rows(blocks: NDArray[Any], scales: NDArray[Any]) -> NDArray[np.uint8]:
    """The same matrix as in a GGUF file: blocks of a scale and 16 bytes, byte i with elements i and i + 16.

    Args:
        blocks: uint8 ``[R, G, 16]``, two elements per byte.
        scales: uint8 ``[R, G]``, e8m0 exponents.

    Returns:
        uint8 ``[R, 17 * G]``.
    """
    rows, groups, _ = blocks.shape
    codes = np.empty((rows, groups, 32), np.uint8)
    codes[:, :, 0::2] = blocks & 15
    codes[:, :, 1::2] = blocks >> 4
    made = np.empty((rows, groups, 17), np.uint8)
    made[:, :, 0] = scales
    made[:, :, 1:] = codes[:, :, :16] | codes[:, :, 16:] << 4
    return made.reshape(rows, groups * 17)


def decode_mxfp4(blocks: NDArray[Any], scales: NDArray[Any]) -> NDArray[np.float32]:
    """Decode one matrix.

    Args:
        blocks: uint8 ``[R, G, 16]``, two elements per byte.
        scales: uint8 ``[R, G]``, e8m0 exponents.

    Returns:
        float32 ``[R, 32 * G]``; a scale of 255 gives NaN.
    """
    rows, groups, _ = blocks.shape
    values: NDArray[np.float32] = _PAIRS[blocks].reshape(rows, groups, 32)
    values *= _SCALES[scales][:, :, None]
    return values.reshape(rows, groups * 32)
