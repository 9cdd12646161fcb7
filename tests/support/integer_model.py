"""The integer kernels in numpy, bit by bit as specified in native/src/kernels/isa/kernel_api.h."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moechat import _native

RANGES = {16: np.float32(32512), 8: np.float32(127)}


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c, rounded once: the product is exact in a long double, the sum nearly."""
    assert np.finfo(np.longdouble).nmant >= 63
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)


def quantised(x: np.ndarray, activation_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers [rows, groups, 64] and scales [rows, groups] of finite inputs [rows, cols]."""
    rows, cols = x.shape
    padded = np.zeros((rows, -(-cols // 64) * 64), np.float32)
    padded[:, :cols] = x
    grouped = padded.reshape(rows, -1, 64)
    largest = np.abs(grouped).max(axis=2)
    there = largest >= np.float32(1e-30)
    divisor = np.where(there, largest, np.float32(1))
    scale = np.where(there, divisor / RANGES[activation_bits], np.float32(0))
    inverse = np.where(there, RANGES[activation_bits] / divisor, np.float32(0))
    return np.rint(grouped * inverse[:, :, None]).astype(np.int64), scale.astype(np.float32)


@dataclass
class Matrix:
    """A quantised matrix: codes [rows, cols], scales and zeros [rows, groups] that fp16 holds."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, rows: int, cols: int, bits: int) -> Matrix:
        groups = -(-cols // 64)
        codes = rng.integers(0, 1 << bits, (rows, cols)).astype(np.uint8)
        scales = (rng.random((rows, groups)) * 0.2 / (1 << bits)).astype(np.float16)
        zeros = (rng.random((rows, groups)) * ((1 << bits) - 1)).astype(np.float16)
        return cls(codes, scales, zeros)

    @property
    def parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.codes, self.scales, self.zeros

    def values(self) -> np.ndarray:
        groups = np.arange(self.codes.shape[1]) // 64
        scales, zeros = (part.astype(np.float64)[:, groups] for part in (self.scales, self.zeros))
        return (self.codes - zeros) * scales

    def times(self, x: np.ndarray, activation_bits: int) -> np.ndarray:
        """[tokens, rows] of x [tokens, cols]: one chain over the groups for every row."""
        integers, x_scales = quantised(x, activation_bits)
        rows, cols = self.codes.shape
        codes = np.zeros((rows, integers.shape[1] * 64), np.int64)
        codes[:, :cols] = self.codes
        acc = np.zeros((len(x), rows), np.float32)
        for g in range(integers.shape[1]):
            isum = integers[:, g] @ codes[:, g * 64 : g * 64 + 64].T
            assert np.abs(isum).max() < 2**31
            sums = integers[:, g].sum(axis=1).astype(np.float32)[:, None]
            zeros, scales = (part.astype(np.float32)[None, :, g] for part in (self.zeros, self.scales))
            term = fma(-zeros, sums, isum.astype(np.float32))
            acc = fma(scales * x_scales[:, g, None], term, acc)
        return acc


@dataclass
class Expert:
    """One expert over quantised matrices, its records, and its partial outputs added up by the model."""

    layout: _native.BlockLayout
    gate: Matrix
    up: Matrix
    down: Matrix
    biases: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    records: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, hidden: int, neurons: int, bits: int, bias: bool) -> Expert:
        layout = _native.BlockLayout(hidden, neurons, bits, False, bias)
        sizes = ((neurons, hidden), (neurons, hidden), (hidden, neurons))
        matrices = [Matrix.random(rng, *size, bits) for size in sizes]
        biases = tuple(rng.standard_normal(size).astype(np.float32) for size in (neurons, neurons, hidden))
        records = np.empty((layout.blocks, layout.record_bytes), np.uint8)
        parts = [part for matrix in matrices for part in matrix.parts]
        _native.pack_quantized(layout, *parts, biases if bias else None, records)
        return cls(layout, *matrices, biases if bias else None, records)

    def native(self, x: np.ndarray, weights: np.ndarray, activation_bits: int) -> np.ndarray:
        """All blocks for all tokens by moe_forward."""
        blocks, tokens = self.layout.blocks, len(x)
        out = np.zeros_like(x)
        _native.moe_forward(
            self.layout,
            "silu",
            0,
            0,
            x,
            np.array([record.ctypes.data for record in self.records], np.uint64),
            np.arange(blocks, dtype=np.int32),
            np.zeros(blocks, np.int32),
            np.array([0, tokens], np.int32),
            np.arange(tokens, dtype=np.int32),
            weights,
            out,
            activation_bits,
        )
        return out

    def model(self, x: np.ndarray, weights: np.ndarray, activation_bits: int) -> np.ndarray:
        """The same by the model; only the gate's exponential is the native one."""
        gate, up = (matrix.times(x, activation_bits) for matrix in (self.gate, self.up))
        if self.biases is not None:
            gate, up = gate + self.biases[0], up + self.biases[1]
        act = _native.apply_activation("silu", 0, 0, gate.ravel(), up.ravel()).reshape(gate.shape)
        out = np.zeros_like(x)
        for block in range(self.layout.blocks):
            part = slice(block * 64, block * 64 + 64)
            down = Matrix(self.down.codes[:, part], *(p[:, block, None] for p in self.down.parts[1:]))
            partial = down.times(act[:, part], activation_bits)
            if self.biases is not None:
                rows = slice(block * self.layout.down_bias_rows, (block + 1) * self.layout.down_bias_rows)
                partial[:, rows] += self.biases[2][rows]
            out = fma(np.broadcast_to(weights[:, None], out.shape), partial, out)
        return out


def linear_codes(layout: _native.LinearLayout, data: np.ndarray) -> Matrix:
    """Reads the codes of a packed linear matrix from its bytes (native/src/kernels/layout/block_layout.h)."""
    tiles, groups, bits = -(-layout.rows // 16), -(-layout.cols // 64), layout.bits
    words = data[: layout.sz].view(np.uint32).reshape(tiles, groups, -1, 16).astype(np.int64)
    column = np.arange(64)

    def field(first: int, width: int) -> np.ndarray:
        per_word = 32 // width
        steps = words[:, :, first + column // per_word]  # [tiles, groups, 64, 16]
        return (steps >> (column % per_word * width)[:, None]) & ((1 << width) - 1)

    codes = field(0, 2) + 4 * field(4, 1) if bits == 3 else field(0, bits)
    matrix = codes.transpose(0, 3, 1, 2).reshape(tiles * 16, groups * 64)
    sz = data[layout.sz :].view(np.float16).reshape(tiles, groups, 2, 16).transpose(2, 0, 3, 1)
    scales, zeros = sz.reshape(2, tiles * 16, groups)[:, : layout.rows]
    return Matrix(matrix[: layout.rows, : layout.cols].astype(np.uint8), scales, zeros)
