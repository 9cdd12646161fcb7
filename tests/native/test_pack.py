import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integer_model import Matrix
from native_support import empty_records, from_bf16, pack, random_expert, to_bf16

from moechat import _native

SIZES = [(64, 64), (17, 5), (80, 96), (200, 130), (1, 1), (128, 65)]
SPECIAL = np.array(
    [0x7FC1, 0xFF81, 0x7F80, 0xFF80, 0x0001, 0x8000, 0x7F7F], np.uint16
)  # NaN, Inf, subnormal, -0, max


def random_patterns(rng: np.random.Generator, shape: tuple[int, int], fp16: bool) -> np.ndarray:
    """Any 16-bit patterns of numbers, with zeros and subnormals among them."""
    patterns = rng.integers(0, 1 << 16, shape).astype(np.uint16)
    flat = patterns.reshape(-1)
    flat[: min(len(flat), len(SPECIAL))] = SPECIAL[: len(flat)]
    exponent = 0x7C00 if fp16 else 0x7F80
    flat[(flat & exponent) == exponent] &= 0x83FF  # what is no number becomes a small one
    return patterns


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize(("hidden", "neurons"), SIZES)
def test_sixteen_bit_patterns_survive_exactly(hidden, neurons, fp16):
    rng = np.random.default_rng(hidden * neurons)
    layout = _native.BlockLayout(hidden, neurons, 16, fp16)
    shapes = [(neurons, hidden), (neurons, hidden), (hidden, neurons)]
    patterns = [random_patterns(rng, shape, fp16) for shape in shapes]
    given = [p.view(np.float16) for p in patterns] if fp16 else patterns
    restored = _native.unpack_expert(layout, pack(layout, given, None))[:3]
    for before, after in zip(patterns, restored, strict=True):
        expected = before.view(np.float16).astype(np.float32) if fp16 else from_bf16(before)
        assert np.isfinite(expected).all()
        assert np.array_equal(after.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 16, 64), (2, 64, 17)])
def test_sixteen_bits_that_are_no_number_are_refused(fp16, number, place):
    rng = np.random.default_rng(3)
    layout = _native.BlockLayout(65, 18, 16, fp16)
    matrices, _ = random_expert(rng, 65, 18, False)
    matrix, row, column = place
    matrices[matrix][row, column] = number
    given = [m.astype(np.float16) if fp16 else to_bf16(m) for m in matrices]
    for source in (matrices, given):
        with pytest.raises(ValueError, match=f"weight at row {row}, column {column} is .*: not finite"):
            pack(layout, source, None)


@pytest.mark.parametrize("fp16", [False, True])
def test_float32_is_rounded_to_nearest_even(fp16):
    rng = np.random.default_rng(1)
    hidden, neurons = 96, 70
    layout = _native.BlockLayout(hidden, neurons, 16, fp16)
    matrices, _ = random_expert(rng, hidden, neurons, False)
    scales = 10.0 ** rng.integers(-8, 4, matrices[0].shape)
    matrices[0] = (matrices[0] * scales).astype(np.float32)
    matrices[0] = np.clip(matrices[0], -60000, 60000)
    matrices[0][0, 0] = -0.0
    restored = _native.unpack_expert(layout, pack(layout, matrices, None))[:3]
    for before, after in zip(matrices, restored, strict=True):
        rounded = before.astype(np.float16).astype(np.float32) if fp16 else from_bf16(to_bf16(before))
        assert np.array_equal(after, rounded)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bf16"])
def test_any_strides_give_the_same_records(bits, dtype):
    rng = np.random.default_rng(bits)
    hidden, neurons = 150, 100
    layout = _native.BlockLayout(hidden, neurons, bits, dtype == "float16", True)
    matrices, biases = random_expert(rng, hidden, neurons, True)
    if dtype != "float32":
        matrices = [to_bf16(m) if dtype == "bf16" else m.astype(np.float16) for m in matrices]
    plain = pack(layout, matrices, biases)

    transposed = [np.ascontiguousarray(m.T).T for m in matrices]
    interleaved = np.empty((2 * neurons, hidden), matrices[0].dtype)
    interleaved[0::2], interleaved[1::2] = matrices[0], matrices[1]
    reversed_down = np.ascontiguousarray(matrices[2][::-1, ::-1])[::-1, ::-1]
    columns = np.empty((hidden, 2 * neurons), matrices[0].dtype)
    columns[:, 0::2], columns[:, 1::2] = matrices[0].T, matrices[1].T
    misaligned = [
        np.frombuffer(b"x" + m.tobytes(), np.uint8)[1:].view(m.dtype).reshape(m.shape) for m in matrices
    ]

    assert np.array_equal(plain, pack(layout, transposed, biases))
    assert np.array_equal(plain, pack(layout, [interleaved[0::2], interleaved[1::2], reversed_down], biases))
    assert np.array_equal(plain, pack(layout, [columns[:, 0::2].T, columns[:, 1::2].T, matrices[2]], biases))
    assert np.array_equal(plain, pack(layout, misaligned, biases))


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 16])
def test_every_byte_is_written_and_does_not_depend_on_threads(bits):
    rng = np.random.default_rng(bits)
    layout = _native.BlockLayout(130, 140, bits, False, True)
    matrices, biases = random_expert(rng, 130, 140, True)
    zeroed = np.zeros((layout.blocks, layout.record_bytes), np.uint8)
    _native.pack_expert(layout, *matrices, biases, zeroed, threads=1)
    filled = empty_records(layout)
    _native.pack_expert(layout, *matrices, biases, filled, threads=3)
    assert np.array_equal(zeroed, filled)
    assert not filled[:, layout.payload_bytes :].any()


def random_feedback(
    rng: np.random.Generator, cols: int, width: int, strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """Importances, and unit upper triangular factors."""
    blocks = -(-cols // width)
    factors = np.triu(strength * rng.standard_normal((blocks, width, width), np.float32), 1)
    return rng.random(cols, np.float32) + 0.1, factors + np.eye(width, dtype=np.float32)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("hidden", "neurons", "width"), [(128, 64, 128), (200, 130, 128), (65, 20, 64)])
def test_errors_of_columns_are_made_good_in_later_ones(bits, hidden, neurons, width):
    rng = np.random.default_rng(bits)
    layout = _native.BlockLayout(hidden, neurons, bits, False, False)
    matrices, _ = random_expert(rng, hidden, neurons, False)
    given = tuple(random_feedback(rng, cols, width, 0.1) for cols in (hidden, neurons))
    records = empty_records(layout)
    _native.pack_expert(layout, *matrices, None, records, threads=1, feedback=given)
    again = empty_records(layout)
    _native.pack_expert(layout, *matrices, None, again, threads=3, feedback=given)
    assert np.array_equal(records, again)
    found = _native.unpack_expert(layout, records)[:3]
    for weights, restored, (_, factors) in zip(matrices, found, (given[0], given[0], given[1]), strict=True):
        # GPTQ's rule, followed column by column in float64.
        rows, cols = weights.shape
        left = np.asarray(weights, np.float64).copy()
        agreeing = 0
        for c in range(cols):
            start = c // 32 * 32  # these columns have the same grid
            values = restored[:, start : start + 32].astype(np.float64)
            nearest = np.abs(values - left[:, c, None]).min(axis=1)
            error = left[:, c] - restored[:, c]
            # No value that the group has is nearer than the one chosen.
            agreeing += int((np.abs(error) <= nearest + 1e-5 * np.abs(left[:, c]) + 1e-6).sum())
            end = min(cols, (c // width + 1) * width)
            row = factors[c // width, c % width, c % width + 1 : c % width + end - c].astype(np.float64)
            left[:, c + 1 : end] -= error[:, None] * row
        assert agreeing > 0.999 * rows * cols


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_without_factors_feedback_changes_nothing(bits):
    rng = np.random.default_rng(bits)
    layout = _native.BlockLayout(200, 130, bits, False, True)
    matrices, biases = random_expert(rng, 200, 130, True)
    alike = tuple(
        (np.ones(cols, np.float32), np.broadcast_to(np.eye(256, dtype=np.float32), (1, 256, 256)).copy())
        for cols in (200, 130)
    )
    records = empty_records(layout)
    _native.pack_expert(layout, *matrices, biases, records, feedback=alike)
    found = _native.unpack_expert(layout, records)
    plain = _native.unpack_expert(layout, pack(layout, matrices, biases))
    for a, b in zip(found[:2], plain[:2], strict=True):  # down projections weigh neurons without feedback
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert all(np.array_equal(a, b) for a, b in zip(found[3], plain[3], strict=True))


def test_wrong_feedback_is_refused():
    rng = np.random.default_rng(0)
    layout = _native.BlockLayout(64, 64, 4, False, False)
    matrices, _ = random_expert(rng, 64, 64, False)
    good = random_feedback(rng, 64, 64, 0.1)

    def refused(message, *feedback, **options):
        with pytest.raises(ValueError, match=message):
            _native.pack_expert(layout, *matrices, None, empty_records(layout), feedback=feedback, **options)

    refused("least-squares solver", good, good, solver="half-quadratic")
    refused("input importance", (good[0][:-1], good[1]), good)
    refused("neuron factors", good, (good[0], good[1][:, :, :32]))
    refused("neuron factors", good, (good[0], np.concatenate([good[1]] * 2)))
    whole = _native.BlockLayout(64, 64, 16, False, False)
    with pytest.raises(ValueError, match="fewer than 16 bits"):
        _native.pack_expert(whole, *matrices, None, empty_records(whole), feedback=(good, good))


@settings(max_examples=25, deadline=None)
@given(
    hidden=st.integers(1, 150),
    neurons=st.integers(1, 150),
    bits=st.sampled_from((2, 3, 4, 6, 8)),
    bias=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_quantised_parts_come_back_as_their_scales_say(hidden, neurons, bits, bias, seed):
    rng = np.random.default_rng(seed)
    layout = _native.BlockLayout(hidden, neurons, bits, False, bias)
    _, biases = random_expert(rng, hidden, neurons, bias)
    shapes = ((neurons, hidden), (neurons, hidden), (hidden, neurons))
    matrices = [Matrix.random(rng, *shape, bits) for shape in shapes]
    arrays = [part for matrix in matrices for part in matrix.parts]
    expected = [matrix.values().astype(np.float32) for matrix in matrices]
    records = empty_records(layout)
    _native.pack_quantized(layout, *arrays, biases, records)
    *restored, restored_biases = _native.unpack_expert(layout, records)
    for want, got in zip(expected, restored, strict=True):
        # At 6 and 8 bits the difference of a code and a zero is rounded before it is multiplied.
        assert np.allclose(want, got, rtol=2e-7, atol=0) if bits > 4 else np.array_equal(want, got)
    assert (restored_biases is None) == (biases is None)
    for want, got in zip(biases or (), restored_biases or (), strict=True):
        assert np.array_equal(want, got)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_zero_weights_and_padding_restore_to_exactly_zero(bits):
    layout = _native.BlockLayout(70, 70, bits)
    padded = _native.BlockLayout(128, 128, bits)  # the same records, read without cropping
    assert padded.record_bytes == layout.record_bytes
    rng = np.random.default_rng(0)
    matrices, _ = random_expert(rng, 70, 70, False)
    matrices[0][3] = 0.0
    matrices[1][:] = -0.0
    records = pack(layout, matrices, None)
    gate, up, down, _ = _native.unpack_expert(padded, records)
    assert not gate[3].any()
    assert not up.any()
    assert not gate[70:].any()
    assert not down[70:].any()


@pytest.mark.parametrize(
    ("matrix", "row", "column", "value"),
    [("gate", 3, 70, np.nan), ("up", 0, 0, np.inf), ("down", 79, 4, -np.inf), ("gate", 64, 1, 1e6)],
)
def test_unquantisable_weights_are_named(matrix, row, column, value):
    rng = np.random.default_rng(0)
    layout = _native.BlockLayout(80, 70, 4)
    matrices, _ = random_expert(rng, 80, 70, False)
    matrices[("gate", "up", "down").index(matrix)][row, column] = value
    with pytest.raises(ValueError, match=f"{matrix} weight at row {row}, column {column} is "):
        pack(layout, matrices, None)


def test_float32_too_large_for_fp16_is_named_and_bf16_takes_it():
    rng = np.random.default_rng(0)
    matrices, _ = random_expert(rng, 80, 70, False)
    matrices[2][5, 6] = 70000.0
    with pytest.raises(ValueError, match=r"down weight at row 5, column 6 is 70000: too large for fp16"):
        pack(_native.BlockLayout(80, 70, 16, True), matrices, None)
    pack(_native.BlockLayout(80, 70, 16, False), matrices, None)


def test_wrong_arrays_are_refused_before_anything_is_written():
    rng = np.random.default_rng(0)
    layout = _native.BlockLayout(80, 70, 4)
    biased = _native.BlockLayout(80, 70, 4, False, True)
    (gate, up, down), biases = random_expert(rng, 80, 70, True)
    out = empty_records(layout)
    before = out.copy()
    frozen = out.copy()
    frozen.flags.writeable = False
    for arguments, words in [
        ((layout, gate[:, 1:], up, down, None, out), r"gate has shape \[70, 79\]; it must be \[70, 80\]"),
        ((layout, gate, up, down.T, None, out), "down has shape"),
        ((layout, gate.astype(np.float64), up, down, None, out), "gate has dtype float64"),
        ((layout, gate, up.ravel(), down, None, out), r"up has shape \[5600\]"),
        ((layout, gate, up, down, biases, out), "layout has no biases"),
        ((biased, gate, up, down, None, out), "has biases, but none were given"),
        ((layout, gate, up, down, None, out[:1]), "out has shape"),
        ((layout, gate, up, down, None, frozen), "out is read-only"),
        ((layout, gate, up, down, None, np.asfortranarray(out)), "out is not C-contiguous"),
        ((layout, gate, up, down, None, out, 0), "threads is 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            _native.pack_expert(*arguments)
    assert np.array_equal(out, before)


def test_bad_quantised_parts_are_refused():
    layout = _native.BlockLayout(64, 64, 3)
    q = np.zeros((64, 64), np.uint8)
    s = np.full((64, 1), 0x3C00, np.uint32)
    out = empty_records(layout)
    bad_q = q.copy()
    bad_q[7, 9] = 8
    with pytest.raises(ValueError, match="up code at row 7, column 9 is out of range"):
        _native.pack_quantized(layout, q, s, bad_q, s, q, s, None, out)
    with pytest.raises(ValueError, match="gate_s has dtype float32"):
        _native.pack_quantized(layout, q, s.astype(np.float32), q, s, q, s, None, out)
    eight = _native.BlockLayout(64, 64, 8)
    for name, bad in (("scale", 0x7C00), ("zero", 0x7C00 << 16)):
        bad_s = s.copy()
        bad_s[5, 0] = bad
        with pytest.raises(ValueError, match=f"down {name} at row 5, column 0 is out of range"):
            _native.pack_quantized(eight, q, s, q, s, q, bad_s, None, empty_records(eight))
    sixteen = _native.BlockLayout(64, 64, 16)
    with pytest.raises(ValueError, match="16-bit layout"):
        _native.pack_quantized(sixteen, q, s, q, s, q, s, None, empty_records(sixteen))
