"""The kernel for few tokens: sums that depend on nothing but the experts' shape, and cleared outputs."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernel_support import DEVICE, GpuCall, int32

from moechat.budget.gpu_sizes import FEW_SUMS, takes_few
from moechat.geometry import ExpertGeometry, WeightType
from moechat.offload.kernels.block_list import BlockList, Items
from moechat.offload.kernels.launch import BlockKernels, Shape


def geometry(hidden: int, neurons: int) -> ExpertGeometry:
    return ExpertGeometry(hidden, neurons, 8, 4, WeightType.BF16, has_bias=False)


@pytest.mark.parametrize("tokens", range(1, 10))
def test_any_number_of_tokens_matches_the_cpu(tokens):
    call = GpuCall.random(tokens, 80, 70, 4, bias=True, tokens=tokens)
    assert call.error(torch.float32) < 3e-6


# Speculative decoding: drafts are accepted or not by what the same tokens would give one at a time.
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_a_token_gets_the_same_bits_however_many_are_computed_with_it(bits):
    call = GpuCall.random(9, 64, 64, bits, tokens=5)
    x, found = call.x, []
    for tokens in (5, 1, 2, 3):
        everyone = int32(range(tokens))
        call.x = x[:tokens]
        call.tokens_of = [everyone] * call.experts
        call.weights_of = [np.ones(tokens, np.float32)] * call.experts
        found.append(call.run(torch.float32))
    assert all(torch.equal(few, found[0][: len(few)]) for few in found[1:])


@pytest.mark.parametrize("tokens", [2, 12])
def test_outputs_without_blocks_are_cleared_by_the_first_launch(tokens):
    call = GpuCall.random(3, 64, 150, 4, tokens=tokens)
    kernels = BlockKernels(call.geometry(), DEVICE)
    everyone = int32(range(tokens))
    rows, blocks = call.experts, call.blocks
    assert (rows, blocks) == (3, 3)
    starts = int32(np.arange(rows + 1) * tokens)
    ones = np.ones(rows * tokens, np.float32)
    items = Items.build(starts, np.concatenate([everyone] * rows), ones, tokens, DEVICE)
    pages = torch.from_numpy(call.records.reshape(rows * blocks, -1)).to(DEVICE)
    x = torch.from_numpy(call.x).to(DEVICE)
    # Two blocks of the second expert, then its last one; none of the others.
    first = BlockList.build(int32([3, 4]), int32([0, 0, 2, 2]), int32([0, 0, 0]), starts, DEVICE)
    then = BlockList.build(int32([5]), int32([0, 0, 1, 1]), int32([0, 2, 0]), starts, DEVICE)
    partial = kernels.partials(items, torch.float32).fill_(float("nan"))
    kernels.add(pages, first, items, x, partial, clear=True)
    kernels.add(pages, then, items, x, partial)
    assert partial.unflatten(1, (rows, tokens))[:, [0, 2]].eq(0).all()
    out = torch.empty_like(x)
    kernels.combine(partial, items, out)
    call.tokens_of = [int32([]), everyone, int32([])]
    call.weights_of = [np.ones(0, np.float32), np.ones(tokens, np.float32), np.ones(0, np.float32)]
    assert torch.equal(out.cpu(), call.run(torch.float32))


def test_no_launch_at_all_leaves_zeros():
    call = GpuCall.random(3, 64, 64, 4, tokens=1)
    kernels = BlockKernels(call.geometry(), DEVICE)
    starts = int32([0, 1])
    items = Items.build(starts, int32([0]), np.ones(1, np.float32), 1, DEVICE)
    partial = kernels.partials(items, torch.float32).fill_(float("nan"))
    none = BlockList.build(int32([]), int32([0, 0]), int32([0]), starts, DEVICE)
    kernels.add(torch.empty(0), none, items, torch.zeros(1, 64), partial, clear=True)
    assert partial.eq(0).all()


@pytest.mark.parametrize(
    ("hidden", "neurons", "picks"), [(4096, 14336, 2), (2048, 768, 8), (2880, 2880, 4), (2048, 1024, 8)]
)
def test_a_decoded_token_has_programs_for_small_and_large_gpus(hidden, neurons, picks):
    shape = Shape.of(geometry(hidden, neurons), 1, picks, {torch.bfloat16})
    assert shape.dot == 0
    # Three for each multiprocessor of an RTX 3060, and one for three quarters of an RTX 4090's, at least.
    assert picks * shape.splits >= 96
    assert shape.warps == 8


def test_chains_depend_on_the_shape_of_experts_alone():
    one = Shape.of(geometry(4096, 14336), 1, 2, {torch.bfloat16})
    eight = Shape.of(geometry(4096, 14336), 8, 16, {torch.bfloat16})
    assert one.splits == eight.splits == 64


def test_many_pairs_of_few_tokens_take_no_more_memory_than_is_counted():
    blocks = geometry(4096, 14336).blocks_per_expert
    assert takes_few(8, 16, blocks)
    assert not takes_few(8, 64, blocks)
    assert takes_few(1, FEW_SUMS // 64, blocks)
    assert not takes_few(1, FEW_SUMS // 64 + 1, blocks)
