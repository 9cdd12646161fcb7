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
    """A quantised matrix: codes [rows, cols] and scales uint32 [rows, groups], see block_layout.h."""

    bits: int
    codes: np.ndarray
    scales: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, rows: int, cols: int, bits: int) -> Matrix:
        groups = -(-cols // 64)
        codes = rng.integers(0, 1 << bits, (rows, cols)).astype(np.uint8)
        if bits > 4:
            scales = (rng.random((rows, groups)) * 0.2 / (1 << bits)).astype(np.float16).view(np.uint16)
            zeros = (rng.random((rows, groups)) * ((1 << bits) - 1)).astype(np.float16).view(np.uint16)
            return cls(bits, codes, scales | zeros.astype(np.uint32) << np.uint32(16))
        words = rng.integers(0, 1 << 24, (rows, groups)).astype(np.uint32)
        steps = rng.integers(100, 160, (rows, groups)).astype(np.uint32)  # 2^-12 to 2^-4
        return cls(bits, codes, words | steps << np.uint32(24))

    @property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        return self.codes, self.scales

    def scale_and_zero(self) -> tuple[np.ndarray, np.ndarray]:
        """float32 [rows, groups], at 6 and 8 bits."""
        halves = (self.scales & 0xFFFF, self.scales >> 16)
        scale, zero = (half.astype(np.uint16).view(np.float16).astype(np.float32) for half in halves)
        return scale, zero

    def steps(self) -> np.ndarray:
        """float32 [rows, groups], at 2 to 4 bits."""
        exponent, mantissa = self.scales >> 27, self.scales >> 24 & 7
        return (2.0 ** (exponent.astype(np.float64) - 24) * (1 + mantissa / 8)).astype(np.float32)

    def factors_and_offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [rows, groups, 2], at 2 to 4 bits."""
        half = np.arange(2)
        words = self.scales.astype(np.int64)[:, :, None]
        return words >> (8 + 4 * half) & 15, words >> (16 * half) & 255

    def values(self) -> np.ndarray:
        column = np.arange(self.codes.shape[1])
        codes = self.codes.astype(np.float64)
        if self.bits > 4:
            scale, zero = (part.astype(np.float64)[:, column // 64] for part in self.scale_and_zero())
            return (codes - zero) * scale
        factors, offsets = (part[:, column // 64, column % 64 // 32] for part in self.factors_and_offsets())
        return (codes * factors - offsets) * self.steps().astype(np.float64)[:, column // 64]

    def times(self, x: np.ndarray, activation_bits: int) -> np.ndarray:
        """[tokens, rows] of x [tokens, cols]: one chain over the groups for every row."""
        integers, x_scales = quantised(x, activation_bits)
        rows, cols = self.codes.shape
        codes = np.zeros((rows, integers.shape[1] * 64), np.int64)
        codes[:, :cols] = self.codes
        acc = np.zeros((len(x), rows), np.float32)
        for g in range(integers.shape[1]):
            group = codes[:, g * 64 : g * 64 + 64]
            if self.bits > 4:
                isum = integers[:, g] @ group.T
                sums = integers[:, g].sum(axis=1).astype(np.float32)[:, None]
                scale, zero = (part[None, :, g] for part in self.scale_and_zero())
                term = fma(-zero, sums, isum.astype(np.float32))
            else:
                scale = self.steps()[None, :, g]
                factors, offsets = (part[:, g] for part in self.factors_and_offsets())
                halves = integers[:, g].reshape(len(x), 2, 32)
                products = np.einsum("thc,rhc->trh", halves, group.reshape(rows, 2, 32))
                isum = (products * factors - halves.sum(axis=2)[:, None] * offsets).sum(axis=2)
                assert np.abs(products * factors).sum(axis=2).max() < 2**31
                term = isum.astype(np.float32)
            assert np.abs(isum).max() < 2**31
            acc = fma(scale * x_scales[:, g, None], term, acc)
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
            _native.Gate(),
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
        act = _native.apply_gate(_native.Gate(), gate.ravel(), up.ravel()).reshape(gate.shape)
        out = np.zeros_like(x)
        for block in range(self.layout.blocks):
            part = slice(block * 64, block * 64 + 64)
            down = Matrix(self.down.bits, self.down.codes[:, part], self.down.scales[:, block, None])
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

    if bits == 3:
        codes = field(0, 2) + 4 * field(4, 1)
    elif bits == 6:
        high = words[:, :, 8 + column // 16]
        place = 8 * (column % 8 // 2) + 4 * (column % 16 // 8) + 2 * (column % 2)
        codes = field(0, 4) + 16 * (high >> place[:, None] & 3)
    else:
        codes = field(0, bits)
    matrix = codes.transpose(0, 3, 1, 2).reshape(tiles * 16, groups * 64)
    return Matrix(bits, matrix[: layout.rows, : layout.cols].astype(np.uint8), scales_of(layout, data))


def scales_of(layout: _native.LinearLayout, data: np.ndarray) -> np.ndarray:
    """The scales uint32 [rows, groups] of a packed linear matrix."""
    tiles, groups = -(-layout.rows // 16), -(-layout.cols // 64)
    if layout.bits > 4:
        halves = data[layout.sz :].view(np.uint16).reshape(tiles, groups, 2, 16).astype(np.uint32)
        words = halves[:, :, 0] | halves[:, :, 1] << np.uint32(16)
    else:
        words = data[layout.sz :].view(np.uint32).reshape(tiles, groups, 16)
    return words.transpose(0, 2, 1).reshape(tiles * 16, groups)[: layout.rows]
