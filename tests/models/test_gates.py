"""Gates are recognised by what they compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from moechat.errors import UnsupportedModelError
from moechat.geometry import Activation, Gate
from moechat.models.gates import apply_gate, recognise_gate

NAME = "model.layers.0.mlp.experts"
GATES = [Gate(kind) for kind in Activation] + [
    Gate(alpha=1.702, limit=7.0, offset=1.0),  # gpt-oss
    Gate(limit=10.0),  # DeepSeek-V4
    Gate(limit=7.0, clamps_result=True),  # Step-3.7
    Gate(alpha=0.3),
    Gate(Activation.GELU_TANH, limit=100.0, offset=-0.5),
    Gate(Activation.RELU2, limit=1.5),
]


def experts(function: Any, **attributes: Any) -> Any:
    return SimpleNamespace(_apply_gate=function, **attributes)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_every_gate_of_the_kernels_is_recognised_by_its_results(gate: Gate, interleaved: bool) -> None:
    def function(fused: torch.Tensor) -> torch.Tensor:
        pair = (fused[..., ::2], fused[..., 1::2]) if interleaved else fused.chunk(2, dim=-1)
        return apply_gate(gate, *pair)

    assert recognise_gate(experts(function), NAME) == (gate, interleaved)


@pytest.mark.parametrize(
    "function",
    [
        lambda z: torch.sin(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
        lambda z: functional.silu(z.chunk(2, -1)[0]) + z.chunk(2, -1)[1],
        # Differs from SiLU only beyond a clamp at 10 or 150, and that of gate alone.
        lambda z: functional.silu(z.chunk(2, -1)[0].clamp(max=10)) * z.chunk(2, -1)[1],
        lambda z: functional.silu(z.chunk(2, -1)[0].clamp(max=150)) * z.chunk(2, -1)[1],
        lambda z: functional.silu(z.chunk(2, -1)[0].clamp(-2, 2)) * z.chunk(2, -1)[1].clamp(-2, 2),
        lambda z: torch.zeros_like(z.chunk(2, -1)[0]),
    ],
)
def test_another_gate_is_refused_by_name(function: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.mlp\.experts computes a gate"):
        recognise_gate(experts(function), NAME)


def test_a_gate_that_cannot_be_probed_is_refused_with_the_reason() -> None:
    def fails(fused: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing")

    with pytest.raises(UnsupportedModelError, match="could not be probed: no such thing"):
        recognise_gate(experts(fails), NAME)
    with pytest.raises(UnsupportedModelError, match="a gate that makes"):
        recognise_gate(experts(lambda fused: fused), NAME)


@pytest.mark.parametrize("activation", Activation)
def test_experts_without_a_gate_projection_have_their_activation_alone(activation: Activation) -> None:
    gate = Gate(activation, gated=False)
    module = experts(None, has_gate=False, act_fn=lambda rows: apply_gate(gate, rows))
    assert recognise_gate(module, NAME) == (gate, False)


def test_an_activation_that_the_kernels_lack_is_refused_by_name() -> None:
    module = experts(None, has_gate=False, act_fn=torch.sin)
    with pytest.raises(UnsupportedModelError, match=r"experts computes an activation that moechat does not"):
        recognise_gate(module, NAME)
    with pytest.raises(UnsupportedModelError, match="could not be probed"):
        recognise_gate(experts(None, has_gate=False), NAME)
