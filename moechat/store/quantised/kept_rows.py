"""Rows of quantised matrices in encodings that a store keeps: those of GGUF files (ggml-common.h).

Each has blocks of 32 columns with one scale. ``q4_0`` and ``q8_0`` have an fp16 scale and codes with their
zero in the middle, ``mxfp4`` an e8m0 exponent and e2m1 codes. A matrix is rewritten without loss or refused.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moechat.store.quantised.codes import Codes

BLOCK = 32
Q4_0 = "q4_0"
Q8_0 = "q8_0"
MXFP4 = "mxfp4"
_BITS = {Q4_0: 4, Q8_0: 8}


def symmetric_encoding(bits: int, group: int, columns: int, scale_type: str) -> str | None:
    """The encoding that keeps integers without zeros, if any does.

    Args:
        bits: Bits of a code.
        group: Columns that share a scale; those of a row if it has one scale.
        columns: Of a row.
        scale_type: Safetensors type of the scales: wider ones do not fit into fp16.
    """
    if scale_type not in ("F16", "BF16") or group % BLOCK or columns % BLOCK:
        return None
    return {4: Q4_0, 8: Q8_0}.get(bits)


def encoded_rows(codes: Codes, encoding: str) -> NDArray[np.uint8]:
    """A matrix in an encoding.

    Args:
        codes: Affine codes for ``q4_0`` and ``q8_0``, e2m1 for ``mxfp4``; columns are whole blocks.
        encoding: One of ``q4_0``, ``q8_0`` and ``mxfp4``.

    Returns:
        uint8 ``[rows, bytes of a row]``.

    Raises:
        ValueError: Codes or scales have values that the encoding cannot hold; the message says which.
    """
    rows, columns = codes.shape
    blocks = codes.codes.reshape(rows, -1, BLOCK)
    if codes.column_group is not None:
        raise ValueError("its columns are not in the order of their groups")
    scale = codes.scale[
        np.ix_(np.arange(rows) // codes.group[0], np.arange(0, columns, BLOCK) // codes.group[1])
    ]
    head: NDArray[np.uint8]
    body: NDArray[np.uint8]
    if encoding == MXFP4:
        head = _exponents(scale)[..., None]
    else:
        middle = 1 << (_BITS[encoding] - 1)
        if codes.zero is None or (codes.zero != middle).any():
            raise ValueError(f"a zero is not {middle}, so that it is not symmetric")
        head = _halves(scale).view(np.uint8).reshape(*scale.shape, 2)
    if encoding == Q8_0:
        body = blocks ^ np.uint8(128)  # the two's complement of the code less 128
    else:
        body = blocks[..., : BLOCK // 2] | blocks[..., BLOCK // 2 :] << np.uint8(4)
    return np.concatenate([head, body], axis=2).reshape(rows, -1)


def _halves(scale: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore", invalid="ignore"):
        short = scale.astype(np.float16)
    exact = short.astype(np.float32) == scale
    if not exact.all():
        raise ValueError(f"a scale of {float(scale[~exact][0]):g} is not exact in fp16")
    return short


def _exponents(scale: NDArray[np.float32]) -> NDArray[np.uint8]:
    fraction, exponent = np.frexp(scale)
    if not (fraction == 0.5).all():
        raise ValueError("a scale is no power of two")
    return (exponent + 126).astype(np.uint8)
