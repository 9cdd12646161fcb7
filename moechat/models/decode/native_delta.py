"""Linear attention by the gated delta rule on the CPU: of a prompt, and of one token, alone and in a layer's
native step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moechat import _native
from moechat.models.decode.gated_delta import GatedDelta
from moechat.models.decode.mixer_forward import States, mixer_forward
from moechat.models.decode.products import native_products
from moechat.models.decode.state_steps import StateMixer
from moechat.models.element_types import ELEMENTS
from moechat.models.state_layer import StateLayer

Forward = Callable[..., Any]
# (hidden states, states) -> result.
_Step = Callable[[torch.Tensor, States], torch.Tensor]


def native_delta(delta: GatedDelta) -> Forward | None:
    """A ``forward`` for ``delta.mixer``; ``None`` if the native code does not serve its sizes."""
    steps = _steps(delta)
    if steps is None:
        return None
    one, many = steps
    dtype, hidden_size = delta.parameters()[0].dtype, delta.projections[0].in_features

    def compute(hidden: torch.Tensor, states: States, _: bool) -> torch.Tensor:
        return (one if hidden.shape[1] == 1 else many)(hidden, states)

    forward = mixer_forward(delta, hidden_size, dtype, compute)
    forward.__dict__["mixer"] = one.__dict__.get("mixer")
    return forward


def delta_mixer(delta: GatedDelta) -> StateMixer:
    """``delta`` as :func:`moechat.models.decode.state_steps.state_step` takes it."""
    weight = delta.parameters()[0]
    dtype, states_in = weight.dtype, delta.states_in

    def places(slot: Any) -> tuple[int, int] | None:
        states = states_in(slot)
        if states is None or states[0].dtype is not dtype:
            return None
        return states[0].data_ptr(), states[1].data_ptr()

    def fill(slot: StateLayer, generator: torch.Generator) -> None:
        drawn = [
            torch.randn(each.shape, generator=generator).to(each.dtype) for each in delta.first_states(weight)
        ]
        slot.update_conv_state(drawn[0], conv_kernel_size=delta.taps)
        slot.update_recurrent_state(drawn[1])

    return StateMixer(delta.index, dtype, delta.projections[0].in_features, _native.DeltaStep, places, fill)


def _steps(delta: GatedDelta) -> tuple[_Step, _Step] | None:
    """What computes one token, in one call if native code reads the projections, and several tokens."""
    weights = delta.parameters()
    places = (delta.q, delta.k, delta.v, delta.gate, delta.beta, delta.decay)
    try:
        run = _native.GatedDelta(
            ELEMENTS[weights[0].dtype],
            delta.k_heads,
            delta.group,
            delta.k_dim,
            delta.v_dim,
            delta.taps,
            [(place.start, place.stride) for place in places],
            delta.eps,
            weights[0].data_ptr(),
            weights[1].data_ptr(),
            weights[2].data_ptr(),
            weights[3].data_ptr(),
        )
    except ValueError:
        return None
    sources = [place.source for place in (delta.q, delta.gate, delta.beta, delta.decay)]
    projections, output, width = delta.projections, delta.output, delta.v_heads * delta.v_dim

    def between(hidden: torch.Tensor, states: States) -> torch.Tensor:
        tokens = hidden.shape[1]
        rows = [module(hidden).contiguous() for module in projections]
        out = torch.empty((1, tokens, width), dtype=hidden.dtype)
        read = [rows[source] for source in sources]
        addresses, cols = [row.data_ptr() for row in read], [row.shape[-1] for row in read]
        before, state = states
        run.many(tokens, addresses, cols, before.data_ptr(), state.data_ptr(), out.data_ptr())
        result: torch.Tensor = output(out)
        return result

    between.__dict__["weights"] = weights  # keeps the memory alive that ``run`` reads
    products = native_products([*projections, output])
    if products is None:
        return between, between
    try:
        mixer = _native.DeltaMixer(run, products[:-1], sources, products[-1])
    except ValueError:
        return None

    def whole(hidden: torch.Tensor, states: States) -> torch.Tensor:
        out = torch.empty_like(hidden)
        before, state = states
        mixer(hidden.data_ptr(), before.data_ptr(), state.data_ptr(), out.data_ptr())
        return out

    whole.__dict__.update(weights=weights, mixer=mixer)
    return whole, between
