"""Linear attention by the gated delta rule for a token, in Triton's interpreter without a GPU.

The interpreter shows what the kernels compute, not that they compile: for that see
``test_triton_compiles.py``.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from delta_support import drawn_states, mixer_of
from kernel_support import DEVICE
from step_support import TOLERANCE, TYPES, close, drawn

from moechat.models.decode.gated_delta import reference
from moechat.offload.kernels import gated_delta

SIZES = [
    # heads of keys and of values, their elements, taps
    (2, 4, 16, 16, 4),
    (1, 1, 8, 24, 4),
    (3, 9, 12, 40, 3),
    (2, 2, 128, 128, 4),
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", ["together", "apart"])
@pytest.mark.parametrize("sizes", SIZES)
@torch.inference_mode()
def test_a_token_has_the_results_of_the_reference(sizes, layout, dtype) -> None:
    delta = mixer_of(layout, *sizes, dtype=dtype, device=DEVICE)
    before, state = drawn_states(delta, dtype, DEVICE)
    wanted_before, wanted_state = before.clone(), state.clone()
    for token in range(3):
        rows = [
            drawn(1, module.out_features, dtype=dtype, seed=5 * token + place)
            for place, module in enumerate(delta.projections)
        ]
        found = gated_delta.step(delta, rows, before, state)
        wanted = reference(delta, rows, wanted_before, wanted_state)
        assert torch.equal(before, wanted_before)
        error = (state - wanted_state).abs().max() / wanted_state.abs().max()
        assert float(error) <= 10 * TOLERANCE[dtype]
        assert close(found, wanted, 100 if dtype is torch.float32 else 4)
