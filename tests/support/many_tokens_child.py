"""Child of test_many_tokens.py: many tokens against one at a time, under its MOECHAT_ISA."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
from native_support import Call

from moechat import _native

# Around the threshold of the many-token path, register blocks of 4 and 12, tiles of 16, chunks of 144.
COUNTS = (150, 145, 144, 25, 17, 16, 13, 12, 9, 8, 7, 6, 5, 1, 0)
# Fewer groups than are unpacked at a time, and more; an odd number of output tiles; padding.
SIZES = ((200, 130, True), (700, 70, False), (64, 16, True))
NAN_TOKEN = 3


def expert_call(seed: int, hidden: int, neurons: int, bits: int, bias: bool) -> Call:
    """Experts with COUNTS tokens each, one token whose input is not finite."""
    tokens = max(COUNTS)
    call = Call.random(seed, hidden, neurons, bits, bias=bias, tokens=tokens, experts=len(COUNTS))
    rng = np.random.default_rng(seed)
    call.tokens_of = [rng.permutation(tokens)[:count].astype(np.int32) for count in COUNTS]
    call.weights_of = [rng.standard_normal(count).astype(np.float32) for count in COUNTS]
    call.x[NAN_TOKEN, hidden // 2] = np.inf
    call.x[NAN_TOKEN + 1] = 0
    return call


def run(call: Call, activation_bits: int) -> np.ndarray:
    out = np.zeros_like(call.x)
    _native.moe_forward(
        call.layout, _native.Gate(), call.x, *call.arrays(), out, activation_bits=activation_bits
    )
    return out


def run_alone(call: Call, activation_bits: int) -> np.ndarray:
    """The same with one call for each token, so that no row has many tokens."""
    out = np.empty_like(call.x)
    for token in range(len(call.x)):
        chosen = [np.flatnonzero(t == token) for t in call.tokens_of]
        single = Call(
            call.layout,
            call.records,
            call.x[token : token + 1],
            [np.zeros(len(c), np.int32) for c in chosen],
            [w[c] for w, c in zip(call.weights_of, chosen, strict=True)],
            call.entries,
        )
        out[token] = run(single, activation_bits)[0]
    return out


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit by bit, but for the pattern of a NaN."""
    nan = np.isnan(a)
    return bool(np.array_equal(nan, np.isnan(b)) and np.array_equal(a[~nan].view("u4"), b[~nan].view("u4")))


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.nan_to_num(a).tobytes() for a in arrays)).hexdigest()


def experts(equal: dict[str, bool], digests: dict[str, str]) -> None:
    for bits in (2, 3, 4, 6, 8):
        for hidden, neurons, bias in SIZES:
            call = expert_call(bits + hidden, hidden, neurons, bits, bias)
            for activation_bits in (8, 16):
                name = f"{bits} bits, {hidden} x {neurons}, activations of {activation_bits}"
                _native.set_num_threads(1)
                whole = run(call, activation_bits)
                _native.set_num_threads(3)
                equal[f"{name}, threads"] = same(whole, run(call, activation_bits))
                equal[name] = same(whole, run_alone(call, activation_bits))
                equal[f"{name}, NaN"] = set(np.flatnonzero(np.isnan(whole).any(1))) == {NAN_TOKEN}
                digests[name] = digest(whole)


def repeated(close: dict[str, bool]) -> None:
    """An expert that gets the same token many times adds to its row each time."""
    for bits in (4, 6, 8):
        often = Call.random(bits, 200, 130, bits, bias=True, tokens=2, experts=1)
        weights = np.linspace(0.5, 1.5, 40, dtype=np.float32)
        tokens = np.arange(40, dtype=np.int32) % 2
        once = replace(often, tokens_of=[tokens[:2]], weights_of=[np.ones(2, np.float32)])
        often = replace(often, tokens_of=[tokens], weights_of=[weights])
        for activation_bits in (8, 16):
            want = run(once, activation_bits) * weights.reshape(-1, 2).sum(0)[:, None]
            name = f"{bits} bits, activations of {activation_bits}, repeated"
            close[name] = bool(np.allclose(run(often, activation_bits), want, rtol=1e-4, atol=1e-4))


def linear(equal: dict[str, bool], digests: dict[str, str]) -> None:
    rng = np.random.default_rng(1)
    for bits in (2, 3, 4, 6, 8):
        for rows, cols, biased in ((70, 200, True), (96, 700, False)):
            layout = _native.LinearLayout(rows, cols, bits)
            data = _native.pack_linear(layout, rng.standard_normal((rows, cols)).astype(np.float32))
            bias = rng.standard_normal(rows).astype(np.float32) if biased else None
            x = rng.standard_normal((150, cols)).astype(np.float32)
            for activation_bits in (8, 16):
                alone = np.empty((150, rows), np.float32)
                for t in range(150):
                    _native.linear_forward(
                        layout, data, x[t : t + 1], bias, alone[t : t + 1], activation_bits
                    )
                for tokens in (5, 6, 8, 9, 13, 17, 144, 145, 150):
                    out = np.empty((tokens, rows), np.float32)
                    _native.linear_forward(layout, data, x[:tokens], bias, out, activation_bits)
                    name = f"linear, {bits} bits, {rows} x {cols}, activations of {activation_bits}"
                    equal[f"{name}, {tokens} tokens"] = same(out, alone[:tokens])
                digests[name] = digest(alone, out)


def main() -> None:
    equal: dict[str, bool] = {}
    digests: dict[str, str] = {}
    experts(equal, digests)
    repeated(equal)
    linear(equal, digests)
    print(json.dumps({"isa": _native.active_isa(), "equal": equal, "digests": digests}))


if __name__ == "__main__":
    main()
