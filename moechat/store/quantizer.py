"""Quantisation of one expert's matrices into block records: by least squares, or by half-quadratic
quantisation (HQQ), natively or with the hqq package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moechat import _native
from moechat.errors import UsageError
from moechat.geometry import GROUP_SIZE, ExpertGeometry

# By least squares, with feedback from inputs that were measured (moechat.store.calibrated).
CALIBRATED = "calibrated"
QUANTIZERS = ("auto", "least-squares", "native", "hqq")
# Names of the native solvers.
_NATIVE = {"least-squares": "least-squares", "native": "half-quadratic"}
_FP16_MAX = 65504.0
Matrices = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
Biases = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]
Packer = Callable[[Matrices, Biases | None, NDArray[np.uint8]], None]


def choose_solver(quantizer: str, bits: int, *, calibrated: bool = False) -> str:
    """The solver to quantise with: for ``auto`` ``calibrated`` or ``least-squares``; ``none`` for 16 bits.

    Raises:
        UsageError: ``quantizer`` is unknown.
    """
    if quantizer not in QUANTIZERS:
        raise UsageError(f"quantizer {quantizer!r} is unknown", hint=f"choose one of {', '.join(QUANTIZERS)}")
    if bits == 16:
        return "none"
    if quantizer == "auto":
        return CALIBRATED if calibrated else "least-squares"
    return quantizer


def make_packer(geometry: ExpertGeometry, solver: str) -> Packer:
    """Create a function that writes one expert into ``uint8 [blocks, record_bytes]``.

    It takes the matrices gate, up ``[intermediate, hidden]`` and down ``[hidden, intermediate]`` (float32,
    float16, or uint16 for bf16, any strides), the biases or ``None``, and the output. When it quantises, it
    raises ``ValueError`` for weights that are not finite.
    """
    if solver == "hqq":
        return _HqqPacker(geometry, "cuda" if _cuda_available() else "cpu")

    native = _NATIVE.get(solver, "least-squares")

    def pack(matrices: Matrices, biases: Biases | None, out: NDArray[np.uint8]) -> None:
        _native.pack_expert(geometry.layout, *matrices, biases, out, solver=native)

    return pack


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
        _native.pack_quantized(
            self._geometry.layout,
            *self._quantize("gate", gate),
            *self._quantize("up", up),
            *self._quantize("down", down),
            biases,
            out,
        )

    def _quantize(
        self, name: str, matrix: NDArray[Any]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
        """Codes ``uint8 [rows, cols]``; scales, zeros ``float16 [rows, ceil(cols / 64)]`` of one matrix."""
        import torch
        from hqq.core.quantize import Quantizer

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
        padding = -cols % GROUP_SIZE
        if padding:
            # Padding with the last column keeps the value range of its group.
            weights = torch.cat([weights, weights[:, -1:].expand(rows, padding)], dim=1)
        _, meta = Quantizer.quantize(
            weights,
            nbits=self._geometry.bits,
            group_size=GROUP_SIZE,
            optimize=True,
            axis=1,
            bitpack=False,
            device=self._device,
        )
        # Codes are recomputed with the rounded scale and zero, so that storing those as fp16 adds no error.
        scale = meta["scale"].reshape(rows, -1).half()
        zero = meta["zero"].reshape(rows, -1).clamp(-_FP16_MAX, _FP16_MAX).half()
        groups = weights.reshape(rows, -1, GROUP_SIZE)
        codes = groups / scale.float()[:, :, None] + zero.float()[:, :, None]
        codes = codes.round_().clamp_(0, (1 << self._geometry.bits) - 1).to(torch.uint8)
        codes = codes.reshape(rows, -1)[:, :cols].contiguous()
        return codes.cpu().numpy(), scale.cpu().numpy(), zero.cpu().numpy()
