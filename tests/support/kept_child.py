"""Child of test_kept.py: kernels for kept weights under the MOECHAT_ISA of its environment.

Prints JSON: the instruction set; for every case the relative errors against float64 at 8, 16 and 32 bits a
activation, and whether many tokens have the bits of single ones; a digest of the integer results.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
from kept_support import ENCODINGS, file_rows, kept_call, values
from native_support import relative_error

from moechat import _native

# Below and above the thresholds of the many-token paths.
COUNTS = (29, 12, 7, 5, 4, 3, 1, 0)


def linear(number: int, encoding: str, digest: hashlib._Hash) -> tuple[dict[int, float], bool]:
    """Errors of a linear layer by bits of an activation, and whether many tokens have the bits of one."""
    rng = np.random.default_rng(100 + number)
    rows, columns = 70, 768 if _native.kept_encodings()[encoding][1] == 256 else 352
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
        if bits != 32:
            digest.update(alone.tobytes())
    return errors, same


def main() -> None:
    digest = hashlib.sha256()
    cases = {}
    for number, encoding in enumerate(ENCODINGS):
        cases[f"linear {encoding}"] = linear(number, encoding, digest)
    for number, encoding in enumerate(ENCODINGS):
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
    print(json.dumps({"isa": _native.active_isa(), "cases": cases, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main()
