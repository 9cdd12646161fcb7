import numpy as np
import pytest
from native_support import pack, run_isa

from moechat import _native
from moechat.geometry import scale_columns

torch = pytest.importorskip("torch")


def real_looking(rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Row scales that differ, heavy tails, a few outliers."""
    scale = 0.02 * np.exp(0.4 * rng.standard_normal((rows, 1)))
    body = np.where(
        rng.random((rows, cols)) < 0.1, rng.standard_t(4, (rows, cols)), rng.standard_normal((rows, cols))
    )
    outliers = np.where(rng.random((rows, cols)) < 5e-4, 8.0, 1.0)
    return (scale * body * outliers).astype(np.float32)


def hqq_restored(weights: np.ndarray, bits: int) -> np.ndarray:
    # Imported here, for this takes seconds: every process that runs tests imports this file.
    quantizer = pytest.importorskip("hqq.core.quantize").Quantizer
    codes, meta = quantizer.quantize(
        torch.from_numpy(weights),
        nbits=bits,
        group_size=scale_columns(bits),
        optimize=True,
        axis=1,
        device="cpu",
    )
    return quantizer.dequantize(codes, dict(meta, compute_dtype=torch.float32)).numpy()


def our_restored(weights: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The matrix as gate and, transposed, as down, with neurons of equal importance."""
    rows, cols = weights.shape
    layout = _native.BlockLayout(cols, rows, bits)
    gate = _native.unpack_expert(layout, pack(layout, [weights, weights, weights.T], None))[0]
    equal = np.full_like(weights, 0.01)
    down = _native.unpack_expert(layout, pack(layout, [equal, equal, weights.T], None))[2]
    return gate, down


def mean_abs(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.float64) - b).mean())


def rmse(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(((a.astype(np.float64) - b) ** 2).mean()))


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("spread", [1.0, 40.0])  # at 40 the errors exceed the shrink threshold: W_e is not 0
def test_errors_stay_within_half_a_percent_of_hqq(bits, spread):
    weights = real_looking(128, 256, np.random.default_rng(bits)) * np.float32(spread)
    gate, down = our_restored(weights, bits)
    for ours, target in ((gate, weights), (down, np.ascontiguousarray(weights.T))):
        theirs = hqq_restored(target, bits)
        assert mean_abs(ours, target) <= 1.005 * mean_abs(theirs, target)
        assert rmse(ours, target) <= 1.005 * rmse(theirs, target)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("tiny", -2e-5, 3e-5), ("far from zero", 5.0, 5.01), ("one-sided", 0.1, 0.3), ("large", -4e3, 4e3)],
)
def test_unusual_groups_are_no_worse_than_rounding_to_their_grid(bits, name, low, high):
    rng = np.random.default_rng(0)
    weights = rng.uniform(low, high, (64, 64)).astype(np.float32)
    gate, _ = our_restored(weights, bits)
    top = (1 << bits) - 1
    # A grid over the range, or over the range with 0 where a zero point far outside is not representable; the
    # scale's fp16 step of 2^-24 is felt in the tiny group.
    span = max(high, 0.0) - min(low, 0.0)
    if bits > 4:  # with fewer, least squares may give up single weights for the others
        assert np.abs(gate - weights).max() <= span / top * 0.5 + span * 2.0**-10 + top * 2.0**-24
    assert rmse(gate, weights) <= span / top * 0.5
    if name == "tiny":
        assert rmse(gate, weights) < 0.9 * rmse(hqq_restored(weights, bits), weights)


@pytest.mark.parametrize("bits", [6, 8])
def test_constant_groups_are_exact_where_fp16_is(bits):
    weights = np.full((64, 64), 0.375, np.float32)
    weights[1] = -2.0
    weights[2] = 0.0
    weights[3] = 65504.0
    gate, down = our_restored(weights, bits)
    assert np.array_equal(gate, weights)
    assert rmse(down, weights.T) < rmse(weights, np.zeros(1))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_constant_groups_are_near_at_2_to_4_bits(bits):
    weights = np.full((64, 64), 0.375, np.float32)
    weights[1] = -2.0
    weights[2] = 0.0
    weights[3] = 4096.0
    weights[4, :32] = 1e-4
    gate, _ = our_restored(weights, bits)
    assert np.allclose(gate[:4], weights[:4], rtol=0.04, atol=0)
    assert not gate[2].any()
    # Scales of the halves are at most 15 to 1.
    assert np.abs(gate[4] - weights[4]).max() <= 0.375 / 15


def expert_output(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_neurons_with_large_activations_lose_less_in_the_down_projection(bits):
    rng = np.random.default_rng(bits)
    sizes = np.exp(rng.standard_normal((128, 1)))  # neurons differ, as in trained models
    gate = (rng.standard_normal((128, 192)) * 0.1 * sizes).astype(np.float32)
    up = (rng.standard_normal((128, 192)) * 0.1 * sizes).astype(np.float32)
    down = (rng.standard_normal((192, 128)) * 0.02).astype(np.float32)
    layout = _native.BlockLayout(192, 128, bits)
    weighted = _native.unpack_expert(layout, pack(layout, [gate, up, down], None))[2]
    equal = np.full_like(gate, 0.01)
    plain = _native.unpack_expert(layout, pack(layout, [equal, equal, down], None))[2]
    x = rng.standard_normal((256, 192))
    exact = expert_output(x, gate, up, down)
    assert rmse(expert_output(x, gate, up, weighted), exact) < 0.9 * rmse(
        expert_output(x, gate, up, plain), exact
    )


@pytest.mark.parametrize("neuron", [0, 70, 99])
def test_one_dominant_neuron_does_not_spoil_the_others(neuron):
    # 100 neurons: the last group has padding.
    rng = np.random.default_rng(neuron)
    gate, up, down = ((rng.standard_normal(shape) * 0.02).astype(np.float32) for shape in [(100, 64)] * 3)
    gate[neuron] *= 1000
    down = np.ascontiguousarray(down.T)
    layout = _native.BlockLayout(64, 100, 4)
    restored = _native.unpack_expert(layout, pack(layout, [gate, up, down], None))[2]
    error = np.abs(restored - down)
    group = slice(neuron // 64 * 64, min(100, neuron // 64 * 64 + 64))
    step = np.ptp(down[:, group], axis=1, keepdims=True) / 15
    # Its own column lies closer to a grid point than rounding alone would put it.
    assert rmse(restored[:, [neuron]], down[:, [neuron]]) < 0.5 * float(np.mean(step)) / np.sqrt(12)
    assert (error[:, group] <= 2.5 * step).all()


def test_instruction_sets_agree_on_the_quality():
    code = """
import numpy as np
from native_support import pack
from moechat import _native
from moechat.geometry import scale_columns
weights = (np.random.default_rng(1).standard_normal((128, 192)) * 0.02).astype(np.float32)
for bits in (2, 3, 4, 6, 8):
    layout = _native.BlockLayout(192, 128, bits)
    gate = _native.unpack_expert(layout, pack(layout, [weights, weights, weights.T], None))[0]
    print(repr(float(np.sqrt(((gate - weights) ** 2).mean()))))
"""
    results = [run_isa(code, isa).stdout.split() for isa in _native.available_isas()]
    reference = np.array(results[0], float)
    assert len(reference) == 5
    for result in results:
        assert np.allclose(np.array(result, float), reference, rtol=1e-3)


@pytest.mark.parametrize("valid", [1, 7, 33, 63])
def test_padding_columns_do_not_spoil_the_last_group(valid):
    rng = np.random.default_rng(valid)
    weights = (rng.standard_normal((64, 64 + valid)) * 0.02 + 0.05).astype(np.float32)
    gate, _ = our_restored(weights, 4)
    last = weights[:, 64:]
    # A uniform grid over the real columns (and 0 where it must lie on the grid) rounds by step / sqrt(12).
    step = (np.maximum(last.max(1), 0) - np.minimum(last.min(1), 0)) / 15
    assert (np.sqrt(((gate[:, 64:] - last) ** 2).mean(1)) <= 0.5 * step).all()


@pytest.mark.parametrize("valid", [33, 40, 63])
def test_padding_of_the_second_half_repeats_its_own_columns(valid):
    rng = np.random.default_rng(valid)
    weights = rng.uniform(-1, 1, (64, 64 + valid)).astype(np.float32)
    weights[:, 96:] *= 0.1
    gate, _ = our_restored(weights, 4)
    # Steps of 0.2 / 15, or the least beside 2 / 15. With steps of 2 / 15 the mean would be 0.033.
    assert np.abs(gate - weights)[:, 96:].mean() <= 0.0045


def test_weights_already_on_a_grid_are_found_again():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (64, 64))
    codes[:, 0::32], codes[:, 1::32] = 0, 15
    weights = ((codes - 7) * 0.015625).astype(np.float32)
    gate, _ = our_restored(weights, 4)
    assert np.array_equal(gate, weights)
