"""Kernels over quantised activations: numerics, accuracy, and independence of threads and cuts."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integer_model import Expert
from native_support import Call, relative_error, run_isa

from moechat import _native

# Relative error of random experts against float64, with activations of 16 and 8 bits.
BOUNDS = {16: 1e-4, 8: 2.5e-2, 32: 3e-6}


@pytest.fixture(autouse=True)
def _keep_threads():
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


@functools.cache
def child(isa: str) -> dict[str, Any]:
    done = run_isa("import integer_child; integer_child.main()", isa)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["isa"] == isa
    return result


@pytest.mark.parametrize("isa", [isa for isa in _native.available_isas() if isa != "portable"])
def test_every_bit_is_that_of_the_stated_numerics(isa):
    result = child(isa)
    assert len(result["errors"]) == 5 * 2 * (5 + 4 + 2)
    assert [name for name, equal in result["equal"].items() if not equal] == []


def test_the_portable_build_differs_by_roundings_only():
    result = child("portable")

    def limit(name: str) -> float:
        # A rounding may move an activation of a block from one integer to the next.
        if name.startswith(("linear", "extreme")):
            return 2e-6
        return 5e-5 if "bits, 16" in name else 2e-2

    assert {name: e for name, e in result["errors"].items() if not e < limit(name)} == {}
    assert [name for name, equal in result["equal"].items() if "alone" in name and not equal] == []


def test_instruction_sets_with_fused_multiply_add_agree_bit_by_bit():
    digests = {isa: child(isa)["digest"] for isa in _native.available_isas() if isa != "portable"}
    assert len(set(digests.values())) <= 1, digests


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("activation_bits", [8, 16, 32])
def test_errors_against_float64_stay_within_the_stated_bounds(bits, activation_bits):
    call = Call.random(bits, 320, 256, bits, bias=True, tokens=9)
    error = relative_error(call.run(activation_bits=activation_bits), call.reference("silu"))
    assert error < BOUNDS[activation_bits]
    if activation_bits < 32:
        assert error > BOUNDS[activation_bits] / 100  # or it would not be this path


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    bits=st.sampled_from((2, 3, 4, 6, 8)),
    activation_bits=st.sampled_from((8, 16)),
    hidden=st.integers(1, 400),
    neurons=st.integers(1, 400),
    bias=st.booleans(),
    tokens=st.integers(1, 11),
    threads=st.integers(1, 4),
    data=st.data(),
)
def test_bits_do_not_depend_on_threads_cuts_or_neighbours(
    seed, bits, activation_bits, hidden, neurons, bias, tokens, threads, data
):
    call = Call.random(seed, hidden, neurons, bits, bias=bias, tokens=tokens)
    _native.set_num_threads(1)
    expected = call.run(activation_bits=activation_bits)
    cuts = data.draw(st.lists(st.integers(0, len(call.entries)), max_size=4))
    _native.set_num_threads(threads)
    assert np.array_equal(expected, call.run(activation_bits=activation_bits))
    assert np.array_equal(expected, call.run(cuts=cuts, activation_bits=activation_bits))
    token = data.draw(st.integers(0, tokens - 1))
    assert np.array_equal(expected[token], call.alone(token, activation_bits=activation_bits))


@pytest.mark.parametrize("activation_bits", [8, 16, 32])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_inputs_reach_only_the_output_of_their_token(activation_bits, value):
    rng = np.random.default_rng(0)
    expert = Expert.random(rng, 200, 130, 4, bias=False)
    x = rng.standard_normal((5, 200)).astype(np.float32)
    weights = np.ones(5, np.float32)
    clean = expert.native(x, weights, activation_bits)
    x[2, 70] = value
    got = expert.native(x, weights, activation_bits)
    assert not np.isfinite(got[2]).any()
    others = [0, 1, 3, 4]
    assert np.array_equal(got[others], clean[others])


@pytest.mark.parametrize("activation_bits", [8, 16])
def test_zeros_and_the_smallest_inputs_give_zero(activation_bits):
    rng = np.random.default_rng(0)
    expert = Expert.random(rng, 200, 130, 4, bias=False)
    x = np.zeros((3, 200), np.float32)
    x[1] = 1e-38
    x[2] = np.float32(1e-45)
    assert not expert.native(x, np.ones(3, np.float32), activation_bits).any()


def test_the_largest_inputs_stay_finite():
    layout = _native.LinearLayout(16, 64, 4)
    data = _native.pack_linear(layout, np.eye(16, 64, dtype=np.float32))
    x = np.full((1, 64), 3e38, np.float32)
    out = np.empty((1, 16), np.float32)
    _native.linear_forward(layout, data, x, None, out)
    assert np.allclose(out, 3e38, rtol=0.03)  # a lone 1 among zeros is stored 1.1 % off


@pytest.mark.parametrize("n", [0, 3, -1])
def test_weights_are_read_as_one_or_two_streams(n):
    with pytest.raises(ValueError, match="1 or 2 streams"):
        _native.set_weight_streams(n)


@pytest.mark.parametrize("bits", [0, 4, 15, 64])
def test_other_numbers_of_bits_are_refused(bits):
    call = Call.random(5, 96, 64, 4, tokens=3, experts=1)
    words = f"activations of {bits} bits are not supported; choose 8, 16 or 32"
    with pytest.raises(ValueError, match=words):
        call.run(activation_bits=bits)
    out = np.ones((1, 96), np.float32)
    index, weight = np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)
    with pytest.raises(ValueError, match=words):
        _native.resident_forward(
            call.layout, _native.Gate(), call.records, call.x[:1], index, weight, out, activation_bits=bits
        )
    assert (out == 1).all()


@pytest.mark.parametrize("fp16", [False, True])
def test_weights_of_16_bits_always_meet_float_activations(fp16):
    call = Call.random(5, 96, 130, 16, fp16=fp16, tokens=3)
    expected = call.run(activation_bits=32)
    for activation_bits in (8, 16):
        assert np.array_equal(call.run(activation_bits=activation_bits), expected)
