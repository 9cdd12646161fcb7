"""Gates are recognised by what they compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from moechat.errors import UnsupportedModelError
from moechat.geometry import Activation
from moechat.models.gates import Gate, apply_gate, recognise_gate


def experts(function: Any, **attributes: Any) -> Any:
    return SimpleNamespace(_apply_gate=function, **attributes)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", list(Activation))
def test_every_gate_of_the_kernels_is_recognised(activation: Activation, interleaved: bool) -> None:
    clamped = activation is Activation.CLAMPED_SWIGLU
    gate = Gate(activation, 1.702 if clamped else 0.0, 7.0 if clamped else 0.0, interleaved)

    def function(fused: torch.Tensor) -> torch.Tensor:
        pair = (fused[..., ::2], fused[..., 1::2]) if interleaved else fused.chunk(2, dim=-1)
        return apply_gate(gate, *pair)

    found = recognise_gate(experts(function, alpha=1.702, limit=7.0), "model.layers.0.mlp.experts")
    assert found == gate


@pytest.mark.parametrize(
    "function",
    [
        lambda z: torch.sin(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
        lambda z: functional.silu(z.chunk(2, -1)[0]) + z.chunk(2, -1)[1],
        # Differs from SiLU only beyond a clamp at 10.
        lambda z: functional.silu(z.chunk(2, -1)[0].clamp(max=10)) * z.chunk(2, -1)[1],
    ],
)
def test_another_gate_is_refused_by_name(function: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.4\.mlp\.experts"):
        recognise_gate(experts(function), "model.layers.4.mlp.experts")


def test_experts_without_a_gate_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="without a gate"):
        recognise_gate(experts(None, has_gate=False), "model.layers.0.mixer.experts")
