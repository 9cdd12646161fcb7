"""Recognises the gate of an experts module by its results, not by the name of its family.

transformers gives every decorated experts class ``_apply_gate(gate_up) -> [tokens, intermediate]``. Its
results for known inputs tell the constants of a :class:`~moechat.geometry.Gate`, and whether gate and up are
interleaved. The gate that they make is then compared over a wide range. A gate without a match is rejected,
not approximated. Experts without a gate projection apply ``act_fn`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - the name the field uses

from moechat.errors import UnsupportedModelError
from moechat.geometry import Activation, Gate

# A value beyond any clamp, and significant digits of constants, which configurations write with few.
_HUGE = 1e6
_DIGITS = 9

# [tokens, intermediate] of gate and, if the experts have it, of up, to the result.
_Function = Callable[..., torch.Tensor]


def apply_gate(gate: Gate, gate_rows: torch.Tensor, up_rows: torch.Tensor | None = None) -> torch.Tensor:
    """Reference implementation of the kernels' gates; inputs ``[tokens, intermediate]``, up if it exists."""
    if not gate.clamps_result:
        gate_rows = gate_rows.clamp(max=gate.limit)
    active = _act(gate, gate_rows)
    if gate.clamps_result:
        active = active.clamp(max=gate.limit)
    if up_rows is None:
        return active
    return active * (up_rows.clamp(-gate.limit, gate.limit) + gate.offset)


def _act(gate: Gate, x: torch.Tensor) -> torch.Tensor:
    match gate.activation:
        case Activation.SILU:
            return F.silu(x) if gate.alpha == 1 else x * torch.sigmoid(gate.alpha * x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.RELU2:
            return F.relu(x).square()


def recognise_gate(experts: Any, name: str) -> tuple[Gate, bool]:
    """Find the gate of ``experts``.

    Args:
        experts: A decorated experts module of transformers; its parameters may be on the meta device.
        name: Module name, for the error.

    Returns:
        The gate, and whether the rows of gate and up alternate (``g0 u0 g1 u1 …``); else all gate rows come
        first.

    Raises:
        UnsupportedModelError: The kernels do not have their gate.
    """
    if not getattr(experts, "has_gate", True):
        return _recognise_activation(experts, name), False
    for interleaved in (False, True):
        function = _probed(experts, name, interleaved)
        for gate in _candidates(function):
            if _same(function, gate):
                return gate, interleaved
    raise UnsupportedModelError(
        f"{name} computes a gate that moechat does not have (it has {', '.join(Activation)}, with a slope, a "
        "clamp and an offset)",
        hint=f"the experts class is {type(experts).__name__}",
    )


def _recognise_activation(experts: Any, name: str) -> Gate:
    """The gate of experts without a gate projection: their activation alone."""

    def function(rows: torch.Tensor) -> torch.Tensor:
        try:
            with torch.no_grad():
                found: torch.Tensor = experts.act_fn(rows)
        except Exception as error:
            raise UnsupportedModelError(
                f"{name} has an activation that could not be probed: {error}"
            ) from error
        return found

    for activation in Activation:
        gate = Gate(activation, gated=False)
        if _same(function, gate):
            return gate
    raise UnsupportedModelError(
        f"{name} computes an activation that moechat does not have (it has {', '.join(Activation)})",
        hint=f"the experts class is {type(experts).__name__}",
    )


def _probed(experts: Any, name: str, interleaved: bool) -> _Function:
    def function(gate_rows: torch.Tensor, up_rows: torch.Tensor) -> torch.Tensor:
        pair = (gate_rows, up_rows)
        fused = torch.stack(pair, dim=-1).flatten(1) if interleaved else torch.cat(pair, dim=-1)
        try:
            with torch.no_grad():
                found: torch.Tensor = experts._apply_gate(fused)
        except Exception as error:
            raise UnsupportedModelError(f"{name} has a gate that could not be probed: {error}") from error
        if found.shape != gate_rows.shape:
            raise UnsupportedModelError(
                f"{name} has a gate that makes {list(found.shape)} of {list(fused.shape)}"
            )
        return found

    return function


def _candidates(function: _Function) -> Iterator[Gate]:
    """Gates whose constants agree with some results; most have other constants than the module's."""

    def at(gate: float, up: float) -> float:
        # A probe has several neurons, or interleaved rows could not be told from others.
        rows = torch.full((1, 4), gate, dtype=torch.float64), torch.full((1, 4), up, dtype=torch.float64)
        return float(function(*rows)[0, 0])

    # With act(1) as a unit the result is a line in up, up to a clamp; clamps below 1 are not expected.
    nothing, one = at(1.0, 0.0), at(1.0, 1.0)
    active = one - nothing
    if not (math.isfinite(active) and active != 0):
        return
    offset = _constant(nothing / active)
    most = at(1.0, _HUGE) / active - offset
    limit = _constant(most) if most < _HUGE / 2 else math.inf
    slopes = [1.0]
    if 0 < active < 1:
        slopes.append(_constant(math.log(active / (1 - active))))
    for clamps_result in (False, True) if limit < math.inf else (False,):
        for activation in Activation:
            for slope in slopes if activation is Activation.SILU else slopes[:1]:
                if limit > 0:
                    yield Gate(activation, slope, limit, offset, clamps_result)


def _constant(value: float) -> float:
    """A constant without the errors of its measurement."""
    return round(value, _DIGITS) + 0.0 if abs(value) < 1 else float(f"{value:.{_DIGITS}g}")


def _same(function: _Function, gate: Gate) -> bool:
    """Whether results agree over values beyond usual clamps, dense near zero where activations differ; every
    value of gate is paired with positive and negative ones of up.
    """
    ends = torch.tensor([-1e4, -1e3, -200.0, -75.0, 75.0, 200.0, 1e3, 1e4])
    gate_rows = torch.cat([ends, torch.linspace(-40, 40, 41), torch.linspace(-3, 3, 55)]).repeat(2, 1)
    count = gate_rows.shape[1]
    up_rows = torch.stack([torch.linspace(-300, 300, count), torch.linspace(2, -2, count)])
    rows = (gate_rows, up_rows) if gate.gated else (gate_rows,)
    found, wanted = function(*rows), apply_gate(gate, *rows)
    # The third term allows for cancellation, where torch's vectorisation decides the last bits of the
    # operands. Different gates differ a thousand times more.
    allowed = 1e-6 + 1e-5 * wanted.abs() + 2e-6 * (gate_rows * up_rows).abs()
    return bool(((found - wanted).abs() <= allowed).all())
