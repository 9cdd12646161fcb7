"""Child of test_forward.py: runs kernels under the MOECHAT_ISA of its environment, prints errors as JSON."""

from __future__ import annotations

import json

import numpy as np
from native_support import ACTIVATIONS, ENCODINGS, Call, relative_error

from moechat import _native

SIZES = [(64, 64), (80, 96), (17, 5), (200, 130), (320, 256)]


def main() -> None:
    errors: dict[str, float] = {}
    digests: dict[str, list[bool]] = {}
    for bits, fp16 in ENCODINGS:
        for hidden, neurons in SIZES:
            for bias in (False, True):
                call = Call.random(bits * hidden, hidden, neurons, bits, fp16=fp16, bias=bias, tokens=7)
                name = f"{bits} bits, fp16 {fp16}, {hidden} x {neurons}, bias {bias}"
                for activation in ACTIVATIONS:
                    error = relative_error(call.run(activation), call.reference(activation))
                    errors[f"{name}, {activation}"] = error
                whole = call.run()
                digests[name] = [
                    bool(np.array_equal(whole, call.run(cuts=[1, len(call.entries) // 2]))),
                    bool(all(np.array_equal(whole[t], call.alone(t)) for t in range(7))),
                ]
    print(json.dumps({"isa": _native.active_isa(), "errors": errors, "equal": digests}))


if __name__ == "__main__":
    main()
