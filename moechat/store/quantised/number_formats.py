"""Small number formats of quantised weights: e4m3, e2m1, e8m0, bf16, and integers packed into words.

Sources: OCP 8-bit Floating Point Specification 1.0 (e4m3), OCP Microscaling Formats 1.0 (e2m1, e8m0).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def _e4m3_values() -> NDArray[np.float32]:
    """All 256 values: exponent bias 7, subnormals, no infinities, NaN where all other bits are set."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    value[code & 127 == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


E4M3 = _e4m3_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
# Exponents with bias 127; 255 is NaN. 2**-127 is a float32 subnormal and exact.
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan)).astype(np.float32)
_QUIET_NAN = 0x7FC0


def as_float32(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Elements of a scale tensor as float32.

    Args:
        values: Elements as a safetensors file shows them: bf16 as ``uint16``, 8-bit floats as ``uint8``.
        dtype: Their safetensors type; ``U8`` are e8m0 exponents, as in the Microscaling formats.

    Raises:
        KeyError: The type is none of F32, F16, BF16, F8_E4M3, F8_E8M0 and U8.
    """
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F32", "F16"):
        return values.astype(np.float32)
    table = {"F8_E4M3": E4M3, "F8_E8M0": E8M0, "U8": E8M0}[dtype]
    result: NDArray[np.float32] = table[values]
    return result


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Values in the element type of a checkpoint, rounded to nearest, ties to even.

    Args:
        values: float32 of any shape.
        dtype: ``F32``, ``F16``, or ``BF16``, which is returned as ``uint16``.
    """
    if dtype == "F32":
        return values
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    upper = bits >> 16 & 1
    upper += 0x7FFF
    upper += bits
    upper >>= 16
    result = upper.astype(np.uint16)
    bad = np.isnan(values)
    if bad.any():
        result[bad] = _QUIET_NAN
    return result


def nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The two halves of each byte, the low one first: ``[…, n]`` to ``[…, 2 n]``."""
    halves = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=halves[..., 0])
    np.right_shift(packed, 4, out=halves[..., 1])
    return halves.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def fields(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Unsigned integers of 2, 4 or 8 bits in words of 32, the lowest bits first: ``[…, n]`` to
    ``[…, 32 / bits * n]``.
    """
    as_bytes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return as_bytes
    if bits == 4:
        return nibbles(as_bytes)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = as_bytes[..., None] >> shifts & np.uint8((1 << bits) - 1)
    return parts.reshape(*as_bytes.shape[:-1], as_bytes.shape[-1] * len(shifts))
