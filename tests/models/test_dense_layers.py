"""Layers that read 16-bit rows or packed groups against torch's own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name the field uses

from moechat import _native
from moechat.models.linear import PackedLinear, StoredEmbedding, StoredLinear

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    before = torch.get_num_threads(), _native.num_threads()
    yield
    torch.set_num_threads(before[0])
    _native.set_num_threads(before[1])


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    difference = torch.linalg.norm(ours.double() - reference.double())
    return float(difference / torch.linalg.norm(reference.double()))


def stored(
    half: torch.dtype, rows: int = 200, cols: int = 96, dtype: torch.dtype = torch.float32
) -> StoredLinear:
    bias = nn.Parameter(numbers(rows, seed=1), requires_grad=False)
    return StoredLinear(numbers(rows, cols).to(half), bias, dtype)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 70])
def test_products_in_float32_are_exact_for_any_number_of_tokens(half: torch.dtype, tokens: int) -> None:
    layer = stored(half)
    x = numbers(2, tokens, 96, seed=2)
    expected = F.linear(x.double(), layer.rows.double(), layer.bias.double())
    out = layer(x)
    assert out.dtype == torch.float32
    assert out.shape == (2, tokens, 200)
    assert relative(out, expected) < 1e-6


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_have_the_type_of_the_inputs(half: torch.dtype, dtype: torch.dtype) -> None:
    layer = stored(half, dtype=dtype)
    for tokens in (1, 40):
        x = numbers(tokens, 96, seed=2).to(dtype)
        out = layer(x)
        assert out.dtype == dtype
        assert relative(out, F.linear(x.double(), layer.rows.double(), layer.bias.double())) < 1e-2


def test_panels_of_many_rows_make_one_product() -> None:
    rows, cols = 700, 4096  # more weights than one panel has
    layer = StoredLinear(numbers(rows, cols).to(torch.bfloat16), None, torch.float32)
    x = numbers(20, cols, seed=2)
    assert relative(layer(x), F.linear(x.double(), layer.rows.double())) < 1e-6


@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_threads_change_no_bit_of_a_product(tokens: int) -> None:
    layer = stored(torch.bfloat16, rows=1000, cols=600)
    x = numbers(tokens, 600, seed=2)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        _native.set_num_threads(threads)
        results.append(layer(x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_rows_are_read_in_place() -> None:
    words = numbers(64, 64).to(torch.bfloat16)
    layer = StoredLinear(words, None, torch.float32)
    assert layer.rows.data_ptr() == words.data_ptr() == layer._words.ctypes.data
    x = numbers(1, 64)
    before = layer(x)
    words.zero_()
    assert layer(x).abs().max() == 0 < before.abs().max()
    assert list(layer.parameters()) == []


def test_the_weight_can_be_read_in_the_type_of_the_model() -> None:
    layer = stored(torch.float16)
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight, layer.rows.float())
    assert layer.nbytes == 200 * 96 * 2 + 200 * 4


@pytest.mark.parametrize("weight", [torch.zeros(4, 4), torch.zeros(8, 4, dtype=torch.bfloat16).T])
def test_rows_of_another_kind_are_refused(weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="not rows of 16-bit floats"):
        StoredLinear(weight, None, torch.float32)


def test_an_embedding_widens_what_is_looked_up() -> None:
    words = numbers(50, 16).to(torch.bfloat16)
    embedding = StoredEmbedding(words, torch.float32)
    ids = torch.tensor([[3, 49, 3]])
    out = embedding(ids)
    assert out.dtype == torch.float32
    assert torch.equal(out, F.embedding(ids, words.float()))
    assert embedding.weight.dtype == torch.float32
    assert (embedding.num_embeddings, embedding.nbytes) == (50, 1600)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("activation_bits", [32, 16, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_are_those_of_the_packed_weights(
    bits: int, activation_bits: int, dtype: torch.dtype
) -> None:
    rows, cols = 150, 200
    layout = _native.LinearLayout(rows, cols, bits)
    data = _native.pack_linear(layout, numbers(rows, cols).numpy())
    layer = PackedLinear(layout, data, numbers(rows, seed=1), activation_bits, dtype)
    tolerance = {32: 1e-6, 16: 2e-4, 8: 2e-2}[activation_bits] + (1e-2 if dtype == torch.bfloat16 else 0)
    for tokens in (1, 5, 60):
        x = numbers(tokens, cols, seed=2).to(dtype)
        expected = F.linear(x.double(), layer.weight.double(), layer.bias.double())
        out = layer(x)
        assert out.dtype == dtype
        assert relative(out, expected) < tolerance
    assert isinstance(layer.data, np.ndarray)
