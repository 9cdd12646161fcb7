"""The GPU kernels over experts in kept encodings, against the CPU's; see ``test_triton_blocks.py``."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kept_support import ENCODINGS
from kernel_support import GpuCall, int32

from moechat import _native

# Those with grids are in ``test_kept_grids.py``.
PLANES = [name for name in ENCODINGS if _native.kept_form(name)["table"] != "grid"]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 8e-4}


def down_of(gate_up: str) -> str:
    """Another encoding, so that all occur as down too."""
    return PLANES[(PLANES.index(gate_up) + 4) % len(PLANES)]


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("encoding", PLANES)
def test_every_encoding_matches_the_cpu(encoding: str, tokens: int) -> None:
    counts = (tokens, max(0, tokens - 2))
    call = GpuCall.kept(1, encoding, down_of(encoding), counts=counts, bias=PLANES.index(encoding) % 2 == 0)
    assert call.error(torch.float32) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("encoding", ["q4_k", "q8_0", "iq4_xs", "mxfp4"])
def test_encodings_take_sixteen_bit_inputs(encoding: str, tokens: int, dtype: torch.dtype) -> None:
    call = GpuCall.kept(2, encoding, encoding, counts=(tokens,))
    assert call.error(dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 20])
def test_experts_without_a_gate_projection_match_the_cpu(tokens: int) -> None:
    call = GpuCall.kept(3, "q5_0", "q4_k", counts=(tokens,), gated=False, gate="relu2")
    assert call.error(torch.float32) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("encoding", ["q5_k", "mxfp4"])
def test_a_token_gets_the_same_bits_however_many_are_computed_with_it(encoding: str) -> None:
    call = GpuCall.kept(4, encoding, "q6_k", counts=(5, 5))
    x, found = call.x, []
    for tokens in (5, 1, 2, 3):
        call.x = x[:tokens]
        call.tokens_of = [int32(range(tokens))] * call.experts
        call.weights_of = [np.ones(tokens, np.float32)] * call.experts
        found.append(call.run(torch.float32))
    assert all(torch.equal(few, found[0][: len(few)]) for few in found[1:])


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    pair=st.tuples(st.sampled_from(PLANES), st.sampled_from(PLANES)),
    tokens=st.sampled_from([1, 2, 5, 9]),
    data=st.data(),
)
def test_bits_do_not_depend_on_the_division_into_launches(seed, pair, tokens, data) -> None:
    call = GpuCall.kept(seed, *pair, counts=(tokens, 1))
    whole = call.run(torch.float32)
    cuts = [data.draw(st.integers(0, call.blocks)) for _ in range(call.experts)]
    assert torch.equal(whole, call.run(torch.float32, cuts=cuts))
    assert call.error(torch.float32) < TOLERANCE[torch.float32]
