"""Packs tensors in ggml's types: those of the gguf package, and K-quants and IQ1 to IQ3, which it only
decodes.

K-quants follow the layouts in ggml's ``ggml-common.h``. Of IQ1 to IQ3 the codes are random, of values about
as large as the tensor's: it serves tests, whose weights are random anyway.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray

GRIDS = (Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S, Kind.IQ1_S, Kind.IQ1_M)


def encode(values: NDArray[np.float32], kind: Kind) -> NDArray[Any]:
    """Pack a tensor, rows of whole blocks."""
    if kind in GRIDS:
        return _random_codes(values, kind)
    if kind is Kind.Q4_K:
        return _by_rows(values, _encode_q4_k)
    if kind is Kind.Q6_K:
        return _by_rows(values, _encode_q6_k)
    if kind is Kind.I32:
        return values.astype(np.int32)
    return gguf.quantize(np.ascontiguousarray(values), kind)


def put_scales(blocks: NDArray[np.uint8], scales: NDArray[np.float16], *, in_nibbles: bool) -> None:
    """Write the fp16 scales of blocks ``[..., bytes]`` of IQ1 to IQ3.

    Args:
        blocks: Changed.
        scales: ``[...]``.
        in_nibbles: They are in the highest bits of four words, as in IQ1_M; else they come first.
    """
    if not in_nibbles:
        blocks[..., :2] = scales[..., None].view(np.uint8)
        return
    patterns = scales.view(np.uint16)
    for word in range(4):
        high = (patterns >> (4 * word) & 15).astype(np.uint8) << 4
        blocks[..., 49 + 2 * word] = blocks[..., 49 + 2 * word] & 15 | high


def _random_codes(values: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(values).view(np.uint8)))
    blocks = rng.integers(0, 256, (values.size // block, size), dtype=np.uint8)
    scales = np.full(len(blocks), 2.0**-6, np.float16)
    put_scales(blocks, scales, in_nibbles=kind is Kind.IQ1_M)
    much = values.std() / gguf.dequantize(blocks, kind).std()
    put_scales(blocks, (scales * much).astype(np.float16), in_nibbles=kind is Kind.IQ1_M)
    return blocks.reshape(*values.shape[:-1], -1)


def _by_rows(
    values: NDArray[np.float32], blocks: Callable[[NDArray[np.float32]], NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    packed = blocks(values.reshape(-1, 256))
    return packed.reshape(*values.shape[:-1], -1)


def _encode_q4_k(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """``d, dmin: fp16 | scales: 12 bytes, 8 x (6-bit scale, 6-bit min) | 128 bytes of nibbles``."""
    groups = x.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0)
    span = groups.max(axis=2) - low
    d = (span.max(axis=1) / 15 / 63).astype(np.float16)
    dmin = ((-low).max(axis=1) / 63).astype(np.float16)
    scale = np.clip(np.rint(span / 15 / np.maximum(d[:, None].astype(np.float32), 1e-12)), 0, 63).astype(
        np.uint8
    )
    least = np.clip(np.rint(-low / np.maximum(dmin[:, None].astype(np.float32), 1e-12)), 0, 63).astype(
        np.uint8
    )
    step = d[:, None].astype(np.float32) * scale
    offset = dmin[:, None].astype(np.float32) * least
    codes = np.clip(
        np.rint((groups + offset[:, :, None]) / np.maximum(step, 1e-12)[:, :, None]), 0, 15
    ).astype(np.uint8)
    packed = np.zeros((len(x), 12), np.uint8)
    packed[:, 0:4] = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    packed[:, 4:8] = least[:, :4] | (least[:, 4:] >> 4) << 6
    packed[:, 8:12] = (scale[:, 4:] & 15) | (least[:, 4:] & 15) << 4
    pairs = codes.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([d[:, None].view(np.uint8), dmin[:, None].view(np.uint8), packed, nibbles], axis=1)


def _encode_q6_k(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """``ql: 128 bytes | qh: 64 bytes | scales: 16 int8 | d: fp16``."""
    groups = x.reshape(-1, 16, 16)
    most = np.abs(groups).max(axis=2)
    d = (most.max(axis=1) / 31 / 127).astype(np.float16)
    scale = np.clip(np.rint(most / 31 / np.maximum(d[:, None].astype(np.float32), 1e-12)), 0, 127).astype(
        np.int8
    )
    step = d[:, None].astype(np.float32) * scale
    codes = np.clip(np.rint(groups / np.maximum(step, 1e-12)[:, :, None]), -32, 31).astype(np.int8) + 32
    quarters = codes.astype(np.uint8).reshape(-1, 2, 4, 32)  # two halves of 128, four runs of 32 each
    ql = np.concatenate(
        [
            quarters[:, :, 0] & 15 | (quarters[:, :, 2] & 15) << 4,
            quarters[:, :, 1] & 15 | (quarters[:, :, 3] & 15) << 4,
        ],
        axis=2,
    ).reshape(-1, 128)
    qh = np.zeros((len(x), 2, 32), np.uint8)
    for number in range(4):
        qh |= (quarters[:, :, number] >> 4) << (2 * number)
    return np.concatenate([ql, qh.reshape(-1, 64), scale.view(np.uint8), d[:, None].view(np.uint8)], axis=1)
