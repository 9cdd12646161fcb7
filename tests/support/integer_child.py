"""Child of test_integer_kernels.py: compares kernels under the MOECHAT_ISA of its environment with the model.

Prints JSON: the instruction set, for every case whether the bits are those of the model and the relative
error against it, and a digest of all bits.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
from integer_model import Expert, Matrix, linear_codes, scales_of
from native_support import relative_error

from moechat import _native

BITS = (2, 3, 4, 6, 8)
SIZES = [(64, 64), (17, 5), (80, 130), (200, 96), (320, 256)]


def extreme_inputs(cols: int) -> np.ndarray:
    """Inputs whose bytes are as large as they get: (127, 0), (-127, 0), (127, -128) and (-126, -128)."""
    x = np.ones((4, cols), np.float32)
    x[1] = -1
    x[2, 1:] = np.float32(32384 / 32512)
    x[3, 1:] = -np.float32(32384 / 32512)
    return x


def main() -> None:
    equal: dict[str, bool] = {}
    errors: dict[str, float] = {}
    digest = hashlib.sha256()

    def note(name: str, got: np.ndarray, want: np.ndarray) -> None:
        equal[name] = bool(np.array_equal(got, want))
        errors[name] = relative_error(got, want)
        digest.update(got.tobytes())

    rng = np.random.default_rng(0)
    for bits in BITS:
        for index, (hidden, neurons) in enumerate(SIZES):
            expert = Expert.random(rng, hidden, neurons, bits, bias=index % 2 == 1)
            x = rng.standard_normal((7, hidden)).astype(np.float32)
            x[1] *= 1e-20
            x[2, : hidden // 2] = 0
            weights = rng.random(7).astype(np.float32)
            for activation_bits in (16, 8):
                name = f"{bits} bits, {activation_bits}, {hidden} x {neurons}"
                got = expert.native(x, weights, activation_bits)
                note(name, got, expert.model(x, weights, activation_bits))
                for token in range(7):
                    one = slice(token, token + 1)
                    _native.set_weight_streams(1 + token % 2)
                    alone = expert.native(x[one], weights[one], activation_bits)
                    equal[f"{name}, token {token} alone"] = bool(np.array_equal(got[token], alone[0]))
        for rows, cols in [(1, 1), (33, 130), (48, 64), (70, 200)]:
            layout = _native.LinearLayout(rows, cols, bits)
            data = _native.pack_linear(layout, rng.standard_normal((rows, cols)).astype(np.float32))
            bias = rng.standard_normal(rows).astype(np.float32)
            x = rng.standard_normal((7, cols)).astype(np.float32)
            codes = linear_codes(layout, data)
            for activation_bits in (16, 8):
                out = np.full((7, rows), np.nan, np.float32)
                _native.linear_forward(layout, data, x, bias, out, activation_bits)
                name = f"linear {bits} bits, {activation_bits}, {rows} x {cols}"
                note(name, out, codes.times(x, activation_bits) + bias)
                for token in range(4):
                    _native.set_weight_streams(1 + token % 2)
                    alone = np.full((1 + token // 2, rows), np.nan, np.float32)
                    _native.linear_forward(layout, data, x[: len(alone)], bias, alone, activation_bits)
                    equal[f"{name}, {token}, alone"] = bool(np.array_equal(out[: len(alone)], alone))
        # Codes and inputs so large that sums of 16 bits would overflow if they could.
        top = (1 << bits) - 1
        layout = _native.LinearLayout(32, 192, bits)
        data = _native.pack_linear(layout, np.zeros((32, 192), np.float32))
        data[: layout.sz] = 0xFF
        if bits > 4:  # scale 1, zero 0
            data[layout.sz :].view(np.float16).reshape(2, 3, 2, 16)[:] = np.array([1, 0])[:, None]
        else:  # the largest factors, and no offsets to make the sums smaller
            data[layout.sz :].view(np.uint32)[:] = 0xC0 << 24 | 0xFF00
        matrix = Matrix(bits, np.full((32, 192), top, np.uint8), scales_of(layout, data))
        for activation_bits in (16, 8):
            for times in (1, 3):  # a few tokens, and as many as the many-token path takes
                x = np.tile(extreme_inputs(192), (times, 1))
                out = np.empty((len(x), 32), np.float32)
                _native.linear_forward(layout, data, x, None, out, activation_bits)
                name = f"extreme {bits} bits, {activation_bits}, {len(x)} tokens"
                note(name, out, matrix.times(x, activation_bits))
    print(
        json.dumps(
            {"isa": _native.active_isa(), "equal": equal, "errors": errors, "digest": digest.hexdigest()}
        )
    )


if __name__ == "__main__":
    main()
