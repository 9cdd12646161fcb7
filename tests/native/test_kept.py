"""Blocks that keep the values of GGUF files: packing, and the kernels of every instruction set."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_support import DENSE_ENCODINGS, ENCODINGS, file_rows, kept_call, random_records, values
from native_support import empty_records, relative_error, run_isa

from moechat import _native

ISAS = _native.available_isas()
FUSED = [isa for isa in ISAS if isa != "portable"]


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return {}


def result_of(isa: str, results: dict[str, dict]) -> dict:
    if isa not in results:
        done = run_isa("import kept_child; kept_child.main()", isa)
        assert done.returncode == 0, done.stderr
        results[isa] = json.loads(done.stdout)
    return results[isa]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_value_is_that_of_the_file_bit_by_bit(encoding):
    rng = np.random.default_rng(1)
    layout = _native.kept_layout(512, 256, encoding, encoding)
    records, sources = random_records(rng, layout, 1)
    *matrices, biases = _native.unpack_expert(layout, records[0])
    assert biases is None
    for matrix, rows in zip(matrices, sources[0], strict=True):
        np.testing.assert_array_equal(matrix, values(encoding, rows))


def test_floats_are_no_encoding_of_experts():
    for pair in (("fp8", "int4"), ("int4", "fp8")):
        with pytest.raises(ValueError, match="one of dense matrices"):
            _native.kept_layout(64, 64, *pair)


def test_rows_may_be_strided_and_biases_are_kept():
    rng = np.random.default_rng(2)
    layout = _native.kept_layout(96, 64, "mxfp4", "mxfp4", True)
    both = file_rows(rng, "mxfp4", 128, 96)  # gate and up interleaved
    down = file_rows(rng, "mxfp4", 96, 64)
    biases = tuple(rng.standard_normal(n).astype(np.float32) for n in (64, 64, 96))
    records = empty_records(layout)
    _native.pack_kept(layout, both[0::2], both[1::2], down, biases, records)
    gate, up, _, stored = _native.unpack_expert(layout, records)
    np.testing.assert_array_equal(gate, values("mxfp4", both)[0::2])
    np.testing.assert_array_equal(up, values("mxfp4", both)[1::2])
    for ours, theirs in zip(stored, biases, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=25, deadline=None)
@given(
    gate_up=st.sampled_from(ENCODINGS),
    down=st.sampled_from(ENCODINGS),
    hidden=st.integers(1, 3),
    neurons=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_any_pair_of_encodings_and_sizes_is_packed_without_a_loss(gate_up, down, hidden, neurons, seed):
    blocks = {name: form[1] for name, form in _native.kept_encodings().items()}
    layout = _native.kept_layout(hidden * blocks[gate_up], neurons * blocks[down], gate_up, down)
    records, sources = random_records(np.random.default_rng(seed), layout, 1)
    *matrices, _ = _native.unpack_expert(layout, records[0])
    names = (gate_up, gate_up, down)
    for matrix, rows, name in zip(matrices, sources[0], names, strict=True):
        np.testing.assert_array_equal(matrix, values(name, rows))


def test_records_of_layers_can_have_one_size():
    small = _native.kept_layout(512, 256, "q4_k", "q4_k")
    large = _native.kept_layout(512, 256, "q4_k", "q6_k")
    padded = _native.kept_layout(512, 256, "q4_k", "q4_k", False, large.record_bytes)
    assert small.record_bytes < padded.record_bytes == large.record_bytes
    assert padded.payload_bytes == small.payload_bytes


@pytest.mark.parametrize("isa", ISAS)
def test_kernels_compute_what_the_values_of_the_file_give(isa, results):
    result = result_of(isa, results)
    assert result["isa"] == isa
    assert len(result["cases"]) == len(DENSE_ENCODINGS) + 2 * len(ENCODINGS)
    for name, (errors, _) in result["cases"].items():
        assert errors["32"] < 2e-6, name
        assert errors["16"] < 2e-4, name
        assert errors["8"] < 0.03, name


@pytest.mark.parametrize("isa", ISAS)
def test_many_tokens_give_bit_by_bit_what_one_at_a_time_gives(isa, results):
    assert [name for name, (_, same) in result_of(isa, results)["cases"].items() if not same] == []


@pytest.mark.parametrize("isa", FUSED[1:])
def test_instruction_sets_with_fused_multiply_add_give_the_same_bits(isa, results):
    assert result_of(isa, results)["digest"] == result_of(FUSED[0], results)["digest"]


@pytest.mark.parametrize("isa", ISAS)
def test_rows_are_packed_alike_one_at_a_time_and_sixteen_at_a_time(isa, results):
    assert result_of(isa, results)["unlike"] == []


@pytest.mark.parametrize("isa", ISAS[1:])
def test_all_instruction_sets_pack_the_same_bytes(isa, results):
    assert result_of(isa, results)["packed"] == result_of(ISAS[0], results)["packed"]


@pytest.mark.parametrize("gate", ["gpt_oss", "gelu_tanh"])
def test_other_gates_are_computed_too(gate):
    call = kept_call(5, "mxfp4", "mxfp4", bias=True)
    assert relative_error(call.run(gate, activation_bits=32), call.reference(gate)) < 2e-6


def test_threads_cuts_and_order_change_no_bit():
    call = kept_call(6, "q4_k", "q6_k", counts=(1, 1, 1, 1, 1))
    whole = call.run(activation_bits=8)
    cut = call.run(activation_bits=8, cuts=[1, 2, 5])
    before = _native.num_threads()
    try:
        _native.set_num_threads(1)
        single = call.run(activation_bits=8)
    finally:
        _native.set_num_threads(before)
    np.testing.assert_array_equal(whole, cut)
    np.testing.assert_array_equal(whole, single)


@pytest.mark.parametrize(("encoding", "place"), [("q4_k", 2), ("q6_k", 208), ("q8_0", 0), ("iq4_xs", 0)])
def test_scales_that_are_not_finite_are_refused_with_their_place(encoding, place):
    rng = np.random.default_rng(3)
    layout = _native.kept_layout(512, 256, encoding, encoding)
    rows = [file_rows(rng, encoding, n, m) for n, m in ((256, 512), (256, 512), (512, 256))]
    rows[1][17, place : place + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match=r"up scale at row 17, columns 0 to 63 is not finite"):
        _native.pack_kept(layout, *rows, None, empty_records(layout))


def test_an_exponent_that_is_not_a_number_is_refused():
    rng = np.random.default_rng(4)
    layout = _native.kept_layout(64, 64, "mxfp4", "mxfp4")
    rows = [file_rows(rng, "mxfp4", 64, 64) for _ in range(3)]
    rows[2][5, 17] = 255
    with pytest.raises(ValueError, match="down scale at row 5"):
        _native.pack_kept(layout, *rows, None, empty_records(layout))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((256, 256, "q4_k", "q9"), 'encoding "q9" is unknown'),
        ((256, 256, "4 bits", "q4_k"), 'encoding "4 bits" is unknown'),
        ((320, 256, "q4_k", "q4_k"), "hidden_size is 320; this encoding has blocks of 256 columns"),
        ((256, 96, "q4_k", "q4_k"), "intermediate_size is 96; this encoding has blocks of 256"),
        ((256, 256, "q4_k", "q4_k", False, 5000), "records of 5000 bytes are not a multiple of 4096"),
    ],
)
def test_layouts_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        _native.kept_layout(*arguments)


def test_rows_of_another_size_are_refused():
    layout = _native.kept_layout(256, 256, "q4_k", "q4_k")
    good = file_rows(np.random.default_rng(5), "q4_k", 256, 256)
    out = empty_records(layout)
    with pytest.raises(ValueError, match=r"up must be uint8 \[256, 144\]"):
        _native.pack_kept(layout, good, good[:, :-1], good, None, out)
    with pytest.raises(ValueError, match="does not keep the values"):
        _native.pack_kept(_native.BlockLayout(256, 256, 4), good, good, good, None, out)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows_are_decoded_as_by_the_gguf_package(encoding):
    rows = file_rows(np.random.default_rng(6), encoding, 19, 512)
    expected = values(encoding, rows)
    floats, halves = np.empty((19, 512), np.float32), np.empty((19, 512), np.uint16)
    most = _native.decode_file_rows(encoding, rows, floats)
    np.testing.assert_array_equal(floats, expected)
    assert most == np.abs(expected).max()
    assert _native.decode_file_rows(encoding, rows, halves) == most
    np.testing.assert_array_equal(halves.view(np.float16), expected.astype(np.float16))


def test_rows_with_a_scale_that_is_not_finite_are_reported_by_the_magnitude():
    rows = file_rows(np.random.default_rng(7), "q8_0", 64, 64)
    rows[40, 34:36] = np.array([np.inf], np.float16).view(np.uint8)
    out = np.empty((64, 64), np.float32)
    assert np.isnan(_native.decode_file_rows("q8_0", rows, out))
    assert np.isfinite(out[:40]).all()
