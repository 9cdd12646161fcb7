"""A native ``forward`` for linear attention by the gated delta rule, for one token on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moechat import _native
from moechat.models.decode.gated_delta import GatedDelta
from moechat.models.decode.probe import ELEMENTS
from moechat.models.decode.wiring import only_known_arguments

Forward = Callable[..., Any]


def native_delta(delta: GatedDelta) -> Forward | None:
    """A ``forward`` for ``delta.mixer``; ``None`` if the native code does not serve its sizes."""
    weights, log_rates, biases, norm = delta.parameters()
    places = (delta.q, delta.k, delta.v, delta.gate, delta.beta, delta.decay)
    try:
        run = _native.GatedDelta(
            ELEMENTS[weights.dtype],
            delta.k_heads,
            delta.group,
            delta.k_dim,
            delta.v_dim,
            delta.taps,
            [(place.start, place.stride) for place in places],
            delta.eps,
            *(weight.data_ptr() for weight in (weights, log_rates, biases, norm)),
        )
    except ValueError:
        return None
    own, hooks, dtype = delta.mixer.forward, delta.hooks(), weights.dtype
    projections, output, width = delta.projections, delta.output, delta.v_heads * delta.v_dim
    sources = [place.source for place in (delta.q, delta.gate, delta.beta, delta.decay)]

    def forward(
        hidden_states: torch.Tensor,
        cache_params: Any = None,
        attention_mask: torch.Tensor | None = None,
        **named: Any,
    ) -> Any:
        states = None
        if hidden_states.shape[:-1] == (1, 1) and hidden_states.dtype is dtype and hidden_states.is_cpu:
            states = delta.states_of(cache_params)
        if (
            states is None
            or states[0].dtype is not dtype
            or attention_mask is not None
            or any(hooks)
            or not only_known_arguments(named)
        ):
            return own(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **named)
        rows = [module(hidden_states).contiguous() for module in projections]
        out = torch.empty((1, 1, width), dtype=dtype)
        before, state = states
        mixed, gate, beta, decay = (rows[source].data_ptr() for source in sources)
        run(mixed, gate, beta, decay, before.data_ptr(), state.data_ptr(), out.data_ptr())
        return output(out)

    # Keeps the memory alive that ``run`` reads.
    forward.__dict__["weights"] = weights, log_rates, biases, norm
    return forward
