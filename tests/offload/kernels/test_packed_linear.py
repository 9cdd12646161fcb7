"""Packed dense layers on a GPU, in Triton's interpreter on machines without one, against the CPU's kernels.

The interpreter shows what they compute, not that they compile: for that see ``test_triton_compiles.py``.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kept_support import DENSE_ENCODINGS, file_rows
from kernel_support import DEVICE

from moechat import _native
from moechat.models.dense_form import DenseForm
from moechat.offload.kernels.packed_linear import DevicePackedLinear, Strips

TOKENS = (1, 3, 8, 9, 40)
# Columns that are and are not whole groups, rows that are and are not whole tiles; more groups than a program
# reads at a time.
SHAPES = [(64, 64), (100, 130), (33, 1000)]
# Inputs are the same rounded ones on both sides. The output is rounded once, and what many tokens meet are
# weights rounded to the type.
ROUNDING = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def layer(
    rows: int,
    cols: int,
    bits: int,
    *,
    bias: bool = False,
    strips: int = 1 << 20,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[DevicePackedLinear, np.ndarray, np.ndarray | None]:
    """A layer with random weights, its packed weights and its bias."""
    rng = np.random.default_rng(seed)
    layout = _native.LinearLayout(rows, cols, bits)
    data = _native.pack_linear(layout, rng.standard_normal((rows, cols)).astype(np.float32))
    return on_device(layout, data, rng, bias, strips, dtype)


def kept_layer(
    rows: int, cols: int, encoding: str, *, bias: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[DevicePackedLinear, np.ndarray, np.ndarray | None]:
    """As :func:`layer`, with random rows of a GGUF file."""
    rng = np.random.default_rng(3)
    layout = _native.LinearLayout(rows, cols, encoding)
    data = np.empty(layout.nbytes, np.uint8)
    _native.pack_kept_linear(layout, file_rows(rng, encoding, rows, cols), data)
    return on_device(layout, data, rng, bias, 1 << 20, dtype)


def on_device(
    layout: _native.LinearLayout,
    data: np.ndarray,
    rng: np.random.Generator,
    bias: bool,
    strips: int,
    dtype: torch.dtype,
) -> tuple[DevicePackedLinear, np.ndarray, np.ndarray | None]:
    """A layer of packed weights, those weights, and its random bias."""
    added = torch.from_numpy(rng.standard_normal(layout.rows).astype(np.float32)).to(dtype) if bias else None
    made = DevicePackedLinear(
        layout,
        torch.from_numpy(data).to(DEVICE),
        None if added is None else added.to(DEVICE),
        Strips(strips, DEVICE),
        dtype,
    )
    return made, data, None if added is None else added.float().numpy()


def inputs(tokens: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = np.random.default_rng(1).standard_normal((tokens, cols)).astype(np.float32)
    return torch.from_numpy(x).to(DEVICE, dtype)


def by_cpu(
    made: DevicePackedLinear, data: np.ndarray, bias: np.ndarray | None, x: torch.Tensor
) -> np.ndarray:
    out = np.empty((len(x), made.out_features), np.float32)
    _native.linear_forward(made.layout, data, x.float().cpu().numpy(), bias, out, activation_bits=32)
    return out


def error(found: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(found.float().cpu().numpy() - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_outputs_match_the_cpu(bits: int, rows: int, cols: int, bias: bool, tokens: int) -> None:
    made, data, added = layer(rows, cols, bits, bias=bias)
    x = inputs(tokens, cols)
    assert error(made(x), by_cpu(made, data, added, x)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_sixteen_bit_inputs_give_sixteen_bit_outputs(bits: int, tokens: int, dtype: torch.dtype) -> None:
    made, data, added = layer(48, 200, bits, bias=True, dtype=dtype)
    x = inputs(tokens, 200, dtype)
    out = made(x)
    assert out.dtype == dtype
    assert error(out, by_cpu(made, data, added, x)) < ROUNDING[dtype]


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_the_unpacked_weight_equals_the_cpus(bits: int) -> None:
    made, data, _ = layer(70, 150, bits)
    expected = torch.from_numpy(_native.unpack_linear(made.layout, data))
    # A fused product and sum on a GPU may round its last bit in another way.
    assert torch.allclose(made.weight.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_strips_of_any_size_keep_the_order_of_rows(bias: bool) -> None:
    cols = 100
    results = []
    for rows_at_a_time in (16, 48, 128):
        made, _, _ = layer(105, cols, 4, bias=bias, strips=rows_at_a_time * cols * 4)
        assert made._strips.rows(cols, torch.float32) == rows_at_a_time
        results.append(made(inputs(9, cols)))
    for out in results[1:]:
        assert torch.allclose(out, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_token_gives_the_same_bits_alone_and_among_a_few(bits: int) -> None:
    made, _, _ = layer(40, 300, bits, bias=True)
    x = inputs(8, 300)
    together = made(x)
    for token in range(8):
        assert torch.equal(made(x[token : token + 1])[0], together[token])


def test_leading_dimensions_are_kept_and_zero_tokens_are_allowed() -> None:
    made, _, _ = layer(32, 64, 4)
    x = inputs(6, 64)
    assert torch.equal(made(x.view(2, 3, 64)), made(x).view(2, 3, 32))
    across = x.view(3, 2, 64).transpose(0, 1)
    assert torch.equal(made(across), made(x).view(3, 2, 32).transpose(0, 1))
    assert made(x[:0]).shape == (0, 32)


def test_infinity_and_nan_affect_only_their_token() -> None:
    made, _, _ = layer(50, 130, 4)
    x = inputs(3, 130)
    x[1, 129] = float("nan")
    out = made(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_the_strip_memory_is_bounded_and_fits_every_matrix() -> None:
    def taken(*shapes: tuple[int, int], itemsize: int = 2, bits: int = 4) -> int:
        form = DenseForm(bits, 16, linears={str(shape): shape for shape in shapes})
        return form.sizes.unpacked_bytes(itemsize)

    assert taken((4096, 4096), (1024, 4096)) == 32 << 20
    assert taken((1 << 17, 8192), itemsize=4) == 32 << 20
    assert taken((100, 64)) == 112 * 64 * 2
    assert taken((16, 1 << 20)) == 16 * (1 << 20) * 4
    assert taken((4096, 4096), bits=16) == 0


def columns_of(encoding: str, wanted: int) -> int:
    """``wanted`` rounded up to whole blocks of the encoding."""
    block = _native.kept_encodings()[encoding][1]
    return -(-wanted // block) * block


@pytest.mark.parametrize("encoding", DENSE_ENCODINGS)
def test_kept_weights_are_unpacked_to_the_values_of_the_file(encoding: str) -> None:
    made, data, _ = kept_layer(70, columns_of(encoding, 290), encoding)
    expected = torch.from_numpy(_native.unpack_linear(made.layout, data))
    largest = expected.abs().max()
    # A fused product and sum on a GPU may round its last bit in another way.
    assert torch.allclose(made.weight.cpu(), expected, rtol=1e-6, atol=1e-6 * float(largest))


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("encoding", DENSE_ENCODINGS)
def test_outputs_of_kept_weights_match_the_cpu(encoding: str, tokens: int) -> None:
    # Columns that are not whole groups where blocks are smaller, and rows that are not whole tiles.
    cols = columns_of(encoding, 1000)
    made, data, added = kept_layer(40, cols, encoding, bias=True)
    x = inputs(tokens, cols)
    assert error(made(x), by_cpu(made, data, added, x)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("encoding", ["q4_0", "q5_1", "q3_k", "q4_k", "q6_k", "iq4_xs", "mxfp4", "iq2_s"])
def test_kept_weights_take_sixteen_bit_inputs(encoding: str, tokens: int, dtype: torch.dtype) -> None:
    made, data, added = kept_layer(48, 512, encoding, bias=True, dtype=dtype)
    x = inputs(tokens, 512, dtype)
    out = made(x)
    assert out.dtype == dtype
    assert error(out, by_cpu(made, data, added, x)) < ROUNDING[dtype]


@pytest.mark.parametrize("encoding", ["q5_0", "q2_k", "q6_k"])
def test_kept_weights_give_a_token_the_same_bits_alone_and_among_a_few(encoding: str) -> None:
    made, _, _ = kept_layer(40, 512, encoding)
    x = inputs(8, 512)
    together = made(x)
    for token in range(8):
        assert torch.equal(made(x[token : token + 1])[0], together[token])
