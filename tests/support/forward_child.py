"""Child of test_forward.py: runs kernels under the MOECHAT_ISA of its environment, prints errors as JSON."""

from __future__ import annotations

import json

import numpy as np
from native_support import ENCODINGS, GATES, Call, relative_error

from moechat import _native

ACTIVATION_BITS = (32, 16, 8)
SIZES = [(64, 64), (80, 96), (17, 5), (200, 130), (320, 256)]


def main() -> None:
    errors: dict[str, float] = {}
    digests: dict[str, list[bool]] = {}
    for bits, fp16 in ENCODINGS:
        for hidden, neurons in SIZES:
            for bias in (False, True):
                call = Call.random(bits * hidden, hidden, neurons, bits, fp16=fp16, bias=bias, tokens=7)
                name = f"{bits} bits, fp16 {fp16}, {hidden} x {neurons}, bias {bias}"
                for gate in GATES:
                    reference = call.reference(gate)
                    for kept in ACTIVATION_BITS:
                        error = relative_error(call.run(gate, activation_bits=kept), reference)
                        errors[f"{name}, {gate}, {kept}"] = error
                whole = call.run(activation_bits=32)
                cuts = [1, len(call.entries) // 2]
                digests[name] = [
                    bool(np.array_equal(whole, call.run(cuts=cuts, activation_bits=32))),
                    all(np.array_equal(whole[t], call.alone(t, activation_bits=32)) for t in range(7)),
                ]
    print(json.dumps({"isa": _native.active_isa(), "errors": errors, "equal": digests}))


if __name__ == "__main__":
    main()
