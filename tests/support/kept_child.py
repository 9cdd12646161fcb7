"""Child of test_kept.py: kernels for kept weights under the MOECHAT_ISA of its environment.

Prints JSON: the instruction set; for every case the relative errors against float64 at 8, 16 and 32 bits a
activation, and whether many tokens have the bits of single ones; a digest of the integer results; the
encodings in which 16 rows at a time are packed in another way than fewer; a digest of packed rows.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
from integer_child import extreme_inputs
from kept_support import DENSE_ENCODINGS, ENCODINGS, file_rows, kept_call, values
from native_support import relative_error

from moechat import _native

# Below and above the thresholds of the many-token paths.
COUNTS = (29, 12, 7, 5, 4, 3, 1, 0)


def linear(number: int, encoding: str, digest: hashlib._Hash) -> tuple[dict[int, float], bool]:
    """Errors of a linear layer by bits of an activation, and whether many tokens have the bits of one."""
    rng = np.random.default_rng(100 + number)
    rows, columns = 70, {32: 352, 64: 448, 256: 768}[_native.kept_encodings()[encoding][1]]
    layout = _native.LinearLayout(rows, columns, encoding)
    source = file_rows(rng, encoding, rows, columns)
    data = np.empty(layout.nbytes, np.uint8)
    _native.pack_kept_linear(layout, source, data)
    bias = rng.standard_normal(rows).astype(np.float32) if number % 2 else None
    x = rng.standard_normal((40, columns)).astype(np.float32)
    reference = x.astype(np.float64) @ values(encoding, source).astype(np.float64).T
    reference += 0 if bias is None else bias

    def run(x: np.ndarray, bits: int) -> np.ndarray:
        out = np.full((len(x), rows), np.nan, np.float32)
        _native.linear_forward(layout, data, x, bias, out, bits)
        return out

    errors, same = {}, True
    for bits in (8, 16, 32):
        alone = np.concatenate([run(x[t : t + 1], bits) for t in range(len(x))])
        errors[bits] = relative_error(alone, reference)
        same = same and all(np.array_equal(run(x[:n], bits), alone[:n]) for n in (2, 3, 4, 7, 8, 9, 29, 40))
        if bits != 32 and encoding != "fp8":
            digest.update(alone.tobytes())
    return errors, same


def extreme(number: int, encoding: str) -> tuple[dict[int, float], bool]:
    """The same for codes and inputs so large that sums of 16 bits would overflow if they could."""
    rng = np.random.default_rng(300 + number)
    columns = {32: 192, 64: 192, 256: 256}[_native.kept_encodings()[encoding][1]]
    layout = _native.LinearLayout(32, columns, encoding)
    source = file_rows(rng, encoding, 32, columns)
    data = np.empty(layout.nbytes, np.uint8)
    _native.pack_kept_linear(layout, source, data)
    errors, same = {8: 0.0, 16: 0.0, 32: 0.0}, True
    for codes in (0xFF, 0x77):  # the largest numbers, and the place of the largest value of e2m1
        data[: layout.sz] = codes
        weights = _native.unpack_linear(layout, data).astype(np.float64)
        x = np.tile(extreme_inputs(columns), (3, 1))
        reference = x.astype(np.float64) @ weights.T
        for bits in errors:
            out = np.empty((len(x), 32), np.float32)
            _native.linear_forward(layout, data, x, None, out, bits)
            alone = np.empty((1, 32), np.float32)
            for token in range(4):
                _native.linear_forward(layout, data, x[token : token + 1], None, alone, bits)
                same = same and np.array_equal(alone[0], out[token])
            errors[bits] = max(errors[bits], relative_error(out, reference))
    return errors, same


def packed_alike(number: int, encoding: str, digest: hashlib._Hash) -> bool:
    """Whether 16 rows, which the vector kernels pack, become the same lanes as 15, packed row by row."""
    rng = np.random.default_rng(200 + number)
    _, block, _ = _native.kept_encodings()[encoding]
    source = file_rows(rng, encoding, 16, 3 * block)
    halves = _native.kept_form(encoding)["super_halves"]
    lanes = []
    for rows in (16, 15):
        layout = _native.LinearLayout(rows, 3 * block, encoding)
        data = np.full(layout.nbytes, 0xA5, np.uint8)
        _native.pack_kept_linear(layout, source[:rows], data)
        words = data[: layout.super].view(np.uint32).reshape(-1, 16)
        supers = data[layout.super :].view(np.uint16).reshape(-1, 16 * max(halves, 1))
        lanes.append((words[:, :15], supers[:, : 15 * halves]))
        digest.update(data)
    return all(np.array_equal(ours, theirs) for ours, theirs in zip(*lanes, strict=True))


def main() -> None:
    digest, packing = hashlib.sha256(), hashlib.sha256()
    unlike = [name for number, name in enumerate(ENCODINGS) if not packed_alike(number, name, packing)]
    cases = {}
    for number, encoding in enumerate(DENSE_ENCODINGS):
        cases[f"linear {encoding}"] = linear(number, encoding, digest)
    for number, encoding in enumerate(ENCODINGS):
        cases[f"extreme {encoding}"] = extreme(number, encoding)
        down = ENCODINGS[(number + 4) % len(ENCODINGS)]
        call = kept_call(number, encoding, down, counts=COUNTS, bias=number % 2 == 1)
        reference = call.reference("silu")
        errors, same = {}, True
        for bits in (8, 16, 32):
            out = call.run(activation_bits=bits)
            errors[bits] = relative_error(out, reference)
            if bits != 32:
                digest.update(out.tobytes())
            alone = np.stack([call.alone(token, activation_bits=bits) for token in range(len(call.x))])
            same = same and bool(np.array_equal(out, alone))
        cases[f"{encoding} {down}"] = (errors, same)
    result = {"isa": _native.active_isa(), "cases": cases, "digest": digest.hexdigest()}
    print(json.dumps(result | {"packed": packing.hexdigest(), "unlike": unlike}))


if __name__ == "__main__":
    main()
