"""Rows of quantised matrices in encodings that a store keeps.

Those of GGUF files (ggml-common.h) have blocks of 32 columns with one scale: ``q4_0`` and ``q8_0`` an fp16
scale and codes with their zero in the middle, ``mxfp4`` an e8m0 exponent and e2m1 codes. ``int4``, ``int8``
(groups of whole 64 columns), ``int4_32``, ``int8_32`` (of 32), ``nvfp4`` and ``fp8`` are described in
``native/src/kernels/layout/kept_encodings.h``; they hold every scale in bf16 or fp16 and every zero, every
scale of NVFP4, and FP8 with every scale. A matrix is rewritten without loss, NVFP4 but
for the rounding of its scales to float32, or refused.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moechat.store.quantised.codes import Codes
from moechat.store.quantised.number_formats import E4M3

BLOCK = 32
Q4_0 = "q4_0"
Q8_0 = "q8_0"
MXFP4 = "mxfp4"
NVFP4 = "nvfp4"
FP8 = "fp8"
WIDE = 64  # columns of a block of int4, int8, nvfp4 and fp8
_SHORT_BITS = {Q4_0: 4, Q8_0: 8}
_SYMMETRIC = {bits: name for name, bits in _SHORT_BITS.items()}
_BLOCKS = {"int4": (4, WIDE), "int8": (8, WIDE), "int4_32": (4, BLOCK), "int8_32": (8, BLOCK)}
_SPARE_BITS = np.uint32(0xFF)  # of a scale as float32, where the zero goes


def integer_encodings(
    bits: int, group: int, columns: int, scale_type: str, *, symmetric: bool
) -> tuple[str | None, str | None]:
    """The encodings that keep integers, if any do.

    Args:
        bits: Bits of a code.
        group: Columns that share a scale; those of a row if it has one scale.
        columns: Of a row.
        scale_type: Safetensors type of the scales; float32 ones are not kept.
        symmetric: The configuration says that there are no zeros.

    Returns:
        The encoding of experts; for symmetric groups of 32 columns one with fewer bits that does not hold all
        scales in bf16. Then that of dense weights, which holds all values.
    """
    if bits not in _SYMMETRIC or scale_type not in ("F16", "BF16") or group % BLOCK or columns % BLOCK:
        return None, None
    if group % WIDE == 0 and columns % WIDE == 0:
        return f"int{bits}", f"int{bits}"
    exact = f"int{bits}_32"
    return (_SYMMETRIC[bits] if symmetric else exact), exact


def encoded_rows(codes: Codes, encoding: str) -> NDArray[np.uint8]:
    """A matrix in an encoding.

    Args:
        codes: Affine codes for integers, e2m1 for ``mxfp4`` and ``nvfp4``, e4m3 for ``fp8``; columns are
            whole blocks.
        encoding: One of those that the module names.

    Returns:
        uint8 ``[rows, bytes of a row]``.

    Raises:
        ValueError: Codes or scales have values that the encoding cannot hold; the message says which.
    """
    if codes.column_group is not None:
        raise ValueError("its columns are not in the order of their groups")
    if encoding in _BLOCKS:
        return _integers(codes, *_BLOCKS[encoding])
    if encoding == NVFP4:
        return _nvfp4(codes)
    if encoding == FP8:
        return _fp8(codes)
    rows = len(codes.codes)
    blocks = codes.codes.reshape(rows, -1, BLOCK)
    head: NDArray[np.uint8]
    scale = codes.scale[_places(codes, BLOCK)]
    if encoding == MXFP4:
        head = _exponents(scale)[..., None]
    else:
        middle = 1 << (_SHORT_BITS[encoding] - 1)
        if codes.zero is None or (codes.zero != middle).any():
            raise ValueError(f"a zero is not {middle}, so that it is not symmetric")
        head = _halves(scale).view(np.uint8).reshape(*scale.shape, 2)
    # Of 8 bits the two's complement of the code less 128.
    body = blocks ^ np.uint8(128) if encoding == Q8_0 else _pairs(blocks)
    return np.concatenate([head, body], axis=2).reshape(rows, -1)


def _places(codes: Codes, block: int) -> tuple[NDArray[np.intp], ...]:
    """Index of the parameters of every block of so many columns."""
    rows, columns = codes.shape
    return np.ix_(np.arange(rows) // codes.group[0], np.arange(0, columns, block) // codes.group[1])


def _pairs(runs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes of 4 bits ``[…, 32]`` in bytes ``[…, 16]``: byte i has columns i and i + 16."""
    result: NDArray[np.uint8] = runs[..., : BLOCK // 2] | runs[..., BLOCK // 2 :] << np.uint8(4)
    return result


def _integers(codes: Codes, bits: int, block: int) -> NDArray[np.uint8]:
    rows = len(codes.codes)
    place = _places(codes, block)
    words = np.ascontiguousarray(codes.scale[place]).view(np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.isfinite(codes.scale * np.float32(_SPARE_BITS)).all():
            raise ValueError("a value is not finite")
    if (words & _SPARE_BITS).any():
        raise ValueError("a scale is not exact in 16 bits of mantissa")
    if codes.zero is not None:
        zero = codes.zero[place]
        if (zero < 0).any() or (zero > _SPARE_BITS).any():
            raise ValueError(f"a zero is not within 0 to {_SPARE_BITS}")
        words = words | zero.astype(np.uint32)
    runs = codes.codes.reshape(rows, -1, block // BLOCK, BLOCK)
    body = (_pairs(runs) if bits == 4 else runs).reshape(*words.shape, -1)
    head = words.view(np.uint8).reshape(*words.shape, 4)
    return np.concatenate([head, body], axis=2).reshape(rows, -1)


def _nvfp4(codes: Codes) -> NDArray[np.uint8]:
    if codes.parts is None:
        raise ValueError("its scales are not those of NVFP4")
    patterns, factor = codes.parts
    if not np.isfinite(codes.scale).all():
        raise ValueError("a scale is not finite")
    rows = len(codes.codes)
    heads = patterns.reshape(rows, -1, 4)
    factors = np.broadcast_to(np.array([factor], np.float32).view(np.uint8), heads.shape)
    body = _pairs(codes.codes.reshape(rows, -1, WIDE // BLOCK, BLOCK)).reshape(*heads.shape[:2], -1)
    return np.concatenate([factors, heads, body], axis=2).reshape(rows, -1)


def _fp8(codes: Codes) -> NDArray[np.uint8]:
    scale = np.ascontiguousarray(codes.scale[_places(codes, WIDE)])
    largest = np.float32(E4M3[0x7E])
    with np.errstate(over="ignore", invalid="ignore"):
        fine = np.isfinite(scale * largest).all() and (codes.codes & 0x7F != 0x7F).all()
    if not fine:
        raise ValueError("a value is not finite")
    rows = len(codes.codes)
    head = scale.view(np.uint8).reshape(*scale.shape, 4)
    return np.concatenate([head, codes.codes.reshape(rows, -1, WIDE)], axis=2).reshape(rows, -1)


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
