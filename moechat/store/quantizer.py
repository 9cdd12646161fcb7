"""Quantisation of one expert's matrices into block records: by least squares, or by half-quadratic
quantisation (HQQ), natively or with the hqq package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import UsageError
from moechat.geometry import GROUP_SIZE, KEEP, MOST_HALVED_BITS, ExpertGeometry, scale_columns

# By least squares, with feedback from inputs that were measured (moechat.store.calibrated).
CALIBRATED = "calibrated"
QUANTIZERS = ("auto", "least-squares", "native", "hqq")
_OWN_NAMES = ("native", "hqq")  # of solvers that `auto` does not choose
# Names of the native solvers.
_NATIVE = {"least-squares": "least-squares", "native": "half-quadratic"}
_FP16_MAX = 65504.0
_NARROW = 1e-4  # hqq does not scale a range of values below this
# Of gate, up and down; up is None in experts without a gate projection (see moechat.geometry).
Matrices = tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any]]
Biases = tuple[NDArray[np.float32], NDArray[np.float32] | None, NDArray[np.float32]]
Packer = Callable[[Matrices, Biases | None, NDArray[np.uint8]], None]


def choose_solver(quantizer: str, bits: int, *, calibrated: bool = False) -> str:
    """The solver to quantise with: for ``auto`` ``calibrated`` or ``least-squares``; ``none`` for 16 bits
    and for encodings that are kept.

    Raises:
        UsageError: ``quantizer`` is unknown.
    """
    if quantizer not in QUANTIZERS:
        raise UsageError(f"quantizer {quantizer!r} is unknown", hint=f"choose one of {', '.join(QUANTIZERS)}")
    if bits in (16, KEEP):
        return "none"
    if quantizer == "auto":
        return CALIBRATED if calibrated else "least-squares"
    return quantizer


def quantizer_of(solver: str) -> str:
    """The quantizer that :func:`choose_solver` makes this solver of, as a store's manifest names it."""
    return solver if solver in _OWN_NAMES else "auto"


def make_packer(geometry: ExpertGeometry, solver: str) -> Packer:
    """Create a function that writes one expert into ``uint8 [blocks, record_bytes]``.

    It takes the matrices gate, up ``[intermediate, hidden]`` and down ``[hidden, intermediate]`` (float32,
    float16, or uint16 for bf16, any strides), the biases or ``None``, and the output; up is ``None`` in both
    if the experts have none. When it quantises, it raises ``ValueError`` for weights that are not finite.
    """
    if solver == "hqq":
        return _HqqPacker(geometry, "cuda" if _cuda_available() else "cpu")

    native = _NATIVE.get(solver, "least-squares")

    def pack(matrices: Matrices, biases: Biases | None, out: NDArray[np.uint8]) -> None:
        _native.pack_expert(geometry.layout, *matrices, biases, out, solver=native)

    return pack


def relative_loss(geometry: ExpertGeometry, matrices: Matrices, record: NDArray[np.uint8]) -> float:
    """Root mean square of what packing changed, relative to that of the weights.

    Args:
        geometry: Shape and encoding.
        matrices: Gate, up and down, as for :func:`make_packer`.
        record: ``uint8 [blocks, record_bytes]`` that they were packed into.
    """
    error = size = 0.0
    for matrix, packed in zip(matrices, _native.unpack_expert(geometry.layout, record)[:3], strict=True):
        if matrix is None or packed is None:
            continue
        weights = matrix.astype(np.float32)
        if matrix.dtype == np.uint16:
            weights = (matrix.astype(np.uint32) << 16).view(np.float32)
        error += float(np.square(packed - weights, dtype=np.float64).sum())
        size += float(np.square(weights, dtype=np.float64).sum())
    return math.sqrt(error / size) if size else 0.0


def _cuda_available() -> bool:
    import torch

    return bool(torch.cuda.is_available())


class _HqqPacker:
    """Quantises with hqq's optimiser (Badri & Shaji 2023) on a torch device, then packs natively."""

    def __init__(self, geometry: ExpertGeometry, device: str) -> None:
        self._geometry = geometry
        self._device = device

    def __call__(self, matrices: Matrices, biases: Biases | None, out: NDArray[np.uint8]) -> None:
        gate, up, down = matrices
        up_codes, up_scales = (None, None) if up is None else self._quantize("up", up)
        _native.pack_quantized(
            self._geometry.layout,
            *self._quantize("gate", gate),
            up_codes,
            up_scales,
            *self._quantize("down", down),
            biases,
            out,
        )

    def _quantize(self, name: str, matrix: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Codes ``uint8 [rows, cols]`` and scales ``uint32 [rows, ceil(cols / 64)]`` of one matrix; see
        :func:`moechat._native.pack_quantized`.
        """
        import torch
        from hqq.core.quantize import Quantizer

        bits = self._geometry.bits
        rows, cols = matrix.shape
        copied = np.array(matrix, order="C")  # torch needs writable arrays
        source = torch.from_numpy(copied.view(np.int16) if copied.dtype == np.uint16 else copied)
        if copied.dtype == np.uint16:
            source = source.view(torch.bfloat16)
        weights = source.to(self._device).float()
        finite = torch.isfinite(weights)
        if not bool(finite.all()):
            row, col = (int(n) for n in (~finite).nonzero()[0])
            raise ValueError(f"{name} is not finite at row {row}, column {col}")
        most = _native.max_quantisable(bits)
        if float(weights.abs().max()) > most:
            row, col = (int(n) for n in (weights.abs() > most).nonzero()[0])
            raise ValueError(
                f"{name} weight at row {row}, column {col} is {float(weights[row, col]):g}: magnitudes above "
                f"{most:g} cannot be quantised"
            )
        padding = -cols % GROUP_SIZE
        if padding:
            # Padding with the last column keeps the value range of its group.
            weights = torch.cat([weights, weights[:, -1:].expand(rows, padding)], dim=1)
        _, meta = Quantizer.quantize(
            weights,
            nbits=bits,
            group_size=scale_columns(bits),
            optimize=True,
            axis=1,
            bitpack=False,
            device=self._device,
        )
        scale, zero = (meta[name].float().reshape(rows, -1) for name in ("scale", "zero"))
        if bits <= MOST_HALVED_BITS:
            # hqq gives a group of nearly equal weights the scale 1. Two groups of a row share a step here, so
            # that scale would leave the other group without precision.
            low, high = weights.reshape(rows, -1, scale_columns(bits)).aminmax(dim=2)
            narrow = high - low <= _NARROW
            low, high = low.clamp(max=0), high.clamp(min=0)
            scale = torch.where(narrow, (high - low) / ((1 << bits) - 1), scale)
            zero = torch.where(narrow, torch.where(scale > 0, -low / scale, 0), zero)
        # Codes are recomputed with the scale and zero as stored.
        words, scales, zeros = stored_scales(bits, scale.cpu().numpy(), zero.cpu().numpy())
        scale, zero = (torch.from_numpy(part).to(self._device)[:, :, None] for part in (scales, zeros))
        codes = weights.reshape(rows, -1, scale_columns(bits)) / scale + zero
        codes = codes.round_().clamp_(0, (1 << bits) - 1).to(torch.uint8)
        return codes.reshape(rows, -1)[:, :cols].contiguous().cpu().numpy(), words


def stored_scales(
    bits: int, scales: NDArray[np.float32], zeros: NDArray[np.float32]
) -> tuple[NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]:
    """Scales for the native core, and the scales and zeros that they stand for.

    Args:
        bits: 2, 3, 4, 6 or 8.
        scales: float32 ``[rows, parts]``, parts of :func:`moechat.geometry.scale_columns` columns; at 2 to 4
            bits an even number of parts.
        zeros: As ``scales``, in codes.

    Returns:
        uint32 ``[rows, groups]`` for :func:`moechat._native.pack_quantized`, then scales and zeros as stored.
    """
    if bits > MOST_HALVED_BITS:
        low, high = (part.clip(-_FP16_MAX, _FP16_MAX).astype(np.float16) for part in (scales, zeros))
        words = low.view(np.uint16) | high.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return words, low.astype(np.float32), high.astype(np.float32)
    pairs = (np.ascontiguousarray(part, np.float32).reshape(-1, 2) for part in (scales, zeros))
    words = _native.fit_scale_words(bits, *pairs)
    steps, factors, offsets = _native.read_scale_words(words)
    whole = factors.astype(np.float32)
    stored_scale, stored_zero = steps[:, None] * whole, offsets.astype(np.float32) / whole
    return (
        words.reshape(len(scales), -1),
        stored_scale.reshape(scales.shape),
        stored_zero.reshape(scales.shape),
    )
