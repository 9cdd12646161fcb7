"""Child of test_kept.py: kernels for kept weights under the MOECHAT_ISA of its environment.

Prints JSON: the instruction set; for every case the relative errors against float64 at 8, 16 and 32 bits a
activation, and whether many tokens have the bits of single ones; a digest of the integer results.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
from kept_support import ENCODINGS, kept_call
from native_support import relative_error

from moechat import _native

# Below and above the thresholds of the many-token paths.
COUNTS = (29, 12, 7, 5, 4, 3, 1, 0)


def main() -> None:
    digest = hashlib.sha256()
    cases = {}
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
