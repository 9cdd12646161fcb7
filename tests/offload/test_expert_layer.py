"""One expert layer over packed records against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from moechat import _native
from moechat.geometry import ExpertGeometry
from moechat.offload.experts import ExpertCounters, ExpertLayer

HIDDEN, NEURONS, EXPERTS = 72, 100, 6


def make_layer(bits: int = 16) -> ExpertLayer:
    geometry = ExpertGeometry(HIDDEN, NEURONS, EXPERTS, bits)
    generator = np.random.default_rng(0)
    records = np.empty((EXPERTS, geometry.blocks_per_expert, geometry.record_bytes), dtype=np.uint8)
    for expert in records:
        gate, up = generator.normal(0, 0.1, (2, NEURONS, HIDDEN)).astype(np.float32)
        down = generator.normal(0, 0.1, (HIDDEN, NEURONS)).astype(np.float32)
        _native.pack_expert(geometry.layout, gate, up, down, None, expert)
    return ExpertLayer(geometry, records, ExpertCounters(), 16)


def expected(layer: ExpertLayer, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert in range(EXPERTS):
        parts = _native.unpack_expert(layer.geometry.layout, layer.records[expert])[:3]
        gate, up, down = (torch.from_numpy(part).double() for part in parts)
        for token, slot in (index == expert).nonzero().tolist():
            hidden = x[token].double()
            value = down @ (functional.silu(gate @ hidden) * (up @ hidden))
            out[token] += weight[token, slot].double() * value
    return out.float()


def inputs(tokens: int, k: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:k] for _ in range(tokens)])
    return x, index, torch.rand(tokens, k, generator=generator)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_the_layer_sums_the_weighted_experts(tokens: int, bits: int) -> None:
    layer = make_layer(bits)
    x, index, weight = inputs(tokens)
    want = expected(layer, x, index, weight)
    # Quantised weights meet activations of 16 bits: steps of 1 / 32512 of the largest of 64.
    error = {"rtol": 0.0, "atol": 3e-4} if bits == 4 else {"rtol": 1.3e-6, "atol": 1e-5}
    torch.testing.assert_close(layer.forward(x, index, weight), want, **error)


def test_a_token_gives_the_same_bits_alone_and_among_others() -> None:
    layer = make_layer(4)
    x, index, weight = inputs(19)
    together = layer.forward(x, index, weight)
    for token in range(19):
        one = slice(token, token + 1)
        assert torch.equal(layer.forward(x[one], index[one], weight[one]), together[one])


@pytest.mark.parametrize("tokens", [1, 5])
def test_an_index_outside_the_layer_selects_no_expert(tokens: int) -> None:
    layer = make_layer()
    x, index, weight = inputs(tokens)
    index[0, 0], index[-1, 1] = EXPERTS, -1
    torch.testing.assert_close(layer.forward(x, index, weight), expected(layer, x, index, weight))
    nobody = torch.full_like(index, EXPERTS)
    assert not layer.forward(x, nobody, weight).any()


def test_counters_count_pairs_and_bytes() -> None:
    layer = make_layer()
    x, _, weight = inputs(2)
    layer.forward(x, torch.tensor([[0, 1, 2], [1, 2, 3]]), weight)
    assert layer.counters.activations == 6
    assert layer.counters.bytes_read == 4 * layer.geometry.expert_bytes


def test_the_result_has_the_dtype_of_the_hidden_states() -> None:
    layer = make_layer()
    x, index, weight = inputs(3)
    half = layer.forward(x.bfloat16(), index, weight.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected(layer, x, index, weight), rtol=0.05, atol=0.02)


def test_records_of_another_shape_are_refused() -> None:
    layer = make_layer()
    with pytest.raises(ValueError, match="do not fit"):
        ExpertLayer(layer.geometry, layer.records[:, :1], ExpertCounters())


def test_mismatched_shapes_are_refused() -> None:
    layer = make_layer()
    x, index, weight = inputs(4)
    with pytest.raises(ValueError, match="do not belong together"):
        layer.forward(x[:, :-1], index, weight)
    with pytest.raises(ValueError, match="do not belong together"):
        layer.forward(x, index, weight[:, :-1])
    with pytest.raises(ValueError, match="do not belong together"):
        layer.forward(x[:3], index[:, :1], weight[:, :1])
    with pytest.raises(ValueError, match="do not belong together"):
        layer.forward(x[:0], index, weight)
    with pytest.raises(ValueError, match="on meta"):
        layer.forward(x.to("meta"), index, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_does_not_matter(dtype: torch.dtype) -> None:
    layer = make_layer()
    x, index, weight = inputs(3)
    want = layer.forward(x, index, weight)
    torch.set_default_dtype(dtype)
    try:
        got = layer.forward(x, index, weight)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, want)


def test_inputs_can_be_views_with_any_strides_and_dtype() -> None:
    layer = make_layer(4)
    x, index, weight = inputs(6)
    want = layer.forward(x, index, weight)
    turned = x.t().contiguous().t()
    assert not turned.is_contiguous()
    assert torch.equal(layer.forward(turned, index.int(), weight.double()), want)
    assert torch.equal(layer.forward(x[::2], index[::2], weight[::2]), want[::2])


def test_no_tokens_give_no_rows_and_no_experts_give_zeros() -> None:
    layer = make_layer()
    x, index, weight = inputs(2)
    assert layer.forward(x[:0], index[:0], weight[:0]).shape == (0, HIDDEN)
    assert not layer.forward(x, index[:, :0], weight[:, :0]).any()
    assert layer.counters.activations == 0
