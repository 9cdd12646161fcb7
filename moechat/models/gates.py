"""Recognises the gate of an experts module by its results, not by the name of its family.

transformers gives every decorated experts class ``_apply_gate(gate_up) -> [tokens, intermediate]``. Its
results for known inputs are compared with the gates of the kernels, which determines the activation, its
constants, and whether gate and up are interleaved. A gate without a match is rejected, not approximated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - the name the field uses

from moechat.errors import UnsupportedModelError
from moechat.geometry import Activation


@dataclass(frozen=True)
class Gate:
    """The computation between the first and second projection of an experts module.

    Attributes:
        activation: One of the kernels' gates.
        alpha: Sigmoid slope of ``CLAMPED_SWIGLU``, else 0.
        limit: Clamp of ``CLAMPED_SWIGLU``, else 0.
        interleaved: Gate and up rows alternate (``g0 u0 g1 u1 …``); else all gate rows come first.
    """

    activation: Activation
    alpha: float
    limit: float
    interleaved: bool


def apply_gate(gate: Gate, gate_rows: torch.Tensor, up_rows: torch.Tensor) -> torch.Tensor:
    """Reference implementation of the kernels' gates; both inputs ``[tokens, intermediate]``."""
    match gate.activation:
        case Activation.SILU:
            return F.silu(gate_rows) * up_rows
        case Activation.GELU:
            return F.gelu(gate_rows) * up_rows
        case Activation.GELU_TANH:
            return F.gelu(gate_rows, approximate="tanh") * up_rows
        case Activation.CLAMPED_SWIGLU:
            g = gate_rows.clamp(max=gate.limit)
            u = up_rows.clamp(min=-gate.limit, max=gate.limit)
            return (u + 1) * g * torch.sigmoid(gate.alpha * g)


def recognise_gate(experts: Any, name: str) -> Gate:
    """Find the gate of ``experts``.

    Args:
        experts: A decorated experts module of transformers; its parameters may be on the meta device.
        name: Module name, for the error.

    Raises:
        UnsupportedModelError: The experts have no gate, or the kernels do not have their gate.
    """
    if not getattr(experts, "has_gate", True):
        raise UnsupportedModelError(f"{name} has experts without a gate projection, which moechat cannot run")
    alpha, limit = _constant(experts, "alpha"), _constant(experts, "limit")
    kinds: list[tuple[Activation, float, float]] = [
        (Activation.SILU, 0.0, 0.0),
        (Activation.GELU, 0.0, 0.0),
        (Activation.GELU_TANH, 0.0, 0.0),
    ]
    if alpha > 0 and limit > 0:
        kinds.append((Activation.CLAMPED_SWIGLU, alpha, limit))

    # The probe extends beyond any clamp, is dense near zero where the activations differ, and pairs every
    # gate value with positive and negative up values.
    gate_rows = torch.cat([torch.linspace(-40, 40, 41), torch.linspace(-3, 3, 55)]).repeat(2, 1)
    up_rows = torch.stack([torch.linspace(-30, 30, 96), torch.linspace(2, -2, 96)])
    for interleaved in (False, True):
        pair = (gate_rows, up_rows)
        probe = torch.stack(pair, dim=-1).flatten(1) if interleaved else torch.cat(pair, dim=-1)
        try:
            with torch.no_grad():
                answer = experts._apply_gate(probe)
        except Exception as error:
            raise UnsupportedModelError(f"{name} has a gate that could not be probed: {error}") from error
        for activation, a, b in kinds:
            gate = Gate(activation, a, b, interleaved)
            # The third term allows for cancellation, where torch's vectorisation decides the last bits of
            # the operands. Different gates differ a thousand times more.
            wanted = apply_gate(gate, gate_rows, up_rows)
            allowed = 1e-6 + 1e-5 * wanted.abs() + 2e-6 * (gate_rows * up_rows).abs()
            if bool(((answer - wanted).abs() <= allowed).all()):
                return gate
    raise UnsupportedModelError(
        f"{name} computes a gate that moechat does not have (it has {', '.join(Activation)})",
        hint=f"the experts class is {type(experts).__name__}",
    )


def _constant(experts: Any, suffix: str) -> float:
    for attribute in (suffix, f"swiglu_{suffix}"):
        value = getattr(experts, attribute, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return 0.0
