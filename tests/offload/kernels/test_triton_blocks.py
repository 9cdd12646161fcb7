"""The GPU kernels, in Triton's interpreter on machines without a GPU, against the CPU's.

The interpreter shows what they compute, not that they compile: for that see ``test_triton_compiles.py``.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kernel_support import ENCODINGS, GpuCall
from native_support import GATES

from moechat.offload.kernels.block_list import BlockList, Items, items_of_tokens

# Of float32 inputs. What 16-bit ones cost in rounding is taken out by giving the CPU the rounded ones; the
# output is rounded once, and activations of many tokens are kept in 16 bits.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 8e-4}


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize(("bits", "fp16"), ENCODINGS)
def test_every_encoding_matches_the_cpu(bits, fp16, tokens):
    call = GpuCall.random(1, 100, 130, bits, fp16=fp16, bias=bits != 8, tokens=tokens)
    assert call.error(torch.float32) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize(("bits", "fp16"), ENCODINGS)
def test_every_encoding_takes_sixteen_bit_inputs(bits, fp16, tokens, dtype):
    call = GpuCall.random(2, 64, 70, bits, fp16=fp16, tokens=tokens)
    assert call.error(dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("gate", GATES)
def test_every_gate_matches_the_cpu(gate, tokens):
    call = GpuCall.random(3, 64, 64, 4, bias=True, tokens=tokens, gate=gate)
    assert call.error(torch.float32) < TOLERANCE[torch.float32]


@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    encoding=st.sampled_from(ENCODINGS),
    hidden=st.integers(1, 130),
    neurons=st.integers(1, 150),
    bias=st.booleans(),
    tokens=st.sampled_from([1, 2, 5, 8, 9, 17]),
    data=st.data(),
)
def test_bits_do_not_depend_on_the_division_into_launches(
    seed, encoding, hidden, neurons, bias, tokens, data
):
    bits, fp16 = encoding
    call = GpuCall.random(seed, hidden, neurons, bits, fp16=fp16, bias=bias, tokens=tokens)
    whole = call.run(torch.float32)
    cuts = [data.draw(st.integers(0, call.blocks)) for _ in range(call.experts)]
    assert torch.equal(whole, call.run(torch.float32, cuts=cuts))
    assert call.error(torch.float32) < TOLERANCE[torch.float32]


def test_results_of_the_cpu_are_added():
    call = GpuCall.random(4, 64, 64, 4, tokens=2)
    others = torch.randn(2, 64)
    assert torch.allclose(call.run(torch.float32, others=others), call.run(torch.float32) + others, atol=1e-6)


def test_a_token_without_experts_gets_zeros():
    call = GpuCall.random(5, 64, 64, 4, tokens=3)
    call.tokens_of = [np.array([0], np.int32), np.array([], np.int32), np.array([0], np.int32)]
    call.weights_of = [np.ones(1, np.float32), np.ones(0, np.float32), np.ones(1, np.float32)]
    out = call.run(torch.float32)
    assert not out[0].eq(0).all()
    assert out[1:].eq(0).all()


def test_the_items_of_a_token_are_ordered_by_expert():
    table = items_of_tokens(np.array([2, 0, 2, 1, 2], np.int32), 4)
    assert table.tolist() == [[1, -1, -1], [3, -1, -1], [0, 2, 4], [-1, -1, -1]]


def test_launch_lists_start_at_aligned_addresses():
    ends, cpu = np.array([0, 1, 3], np.int32), torch.device("cpu")
    items = Items.build(ends, np.zeros(3, np.int32), np.ones(3, np.float32), 1, cpu)
    blocks = BlockList.build(
        np.array([7, 8, 9], np.int32), np.array([0, 1, 3], np.int32), np.array([4, 0], np.int32), ends, cpu
    )
    assert blocks.entry_row.tolist() == [0, 1, 1]
    assert blocks.entry_slot.tolist() == [0, 1, 3]
    assert blocks.slots == 5
    for tensor in (blocks.entry_page, blocks.entry_row, blocks.entry_slot, items.item_weight):
        assert tensor.data_ptr() % 16 == 0
