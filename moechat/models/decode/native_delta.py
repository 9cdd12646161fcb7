"""A native ``forward`` for linear attention by the gated delta rule, for one token on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moechat import _native
from moechat.models.decode.delta_layer import DeltaLayer
from moechat.models.decode.gated_delta import GatedDelta
from moechat.models.decode.probe import ELEMENTS
from moechat.models.decode.products import native_products
from moechat.models.decode.wiring import only_known_arguments

Forward = Callable[..., Any]
_States = tuple[torch.Tensor, torch.Tensor]
# (hidden state, states) -> result.
_Step = Callable[[torch.Tensor, _States], torch.Tensor]


def native_delta(delta: GatedDelta) -> Forward | None:
    """A ``forward`` for ``delta.mixer``; ``None`` if the native code does not serve its sizes."""
    step = _step(delta)
    if step is None:
        return None
    own, hooks, states_for = delta.mixer.forward, delta.hooks(), _states_for(delta)

    def forward(
        hidden_states: torch.Tensor,
        cache_params: Any = None,
        attention_mask: torch.Tensor | None = None,
        **named: Any,
    ) -> Any:
        states = states_for(hidden_states, cache_params)
        if states is None or attention_mask is not None or any(hooks) or not only_known_arguments(named):
            return own(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **named)
        return step(hidden_states, states)

    forward.__dict__["mixer"] = step.__dict__.get("mixer")
    return forward


def native_delta_layer(layer: Any, found: DeltaLayer, norms: Sequence[_native.RmsNorm]) -> Forward | None:
    """A ``forward`` for a decoder layer with such linear attention; ``None`` if its mixer is no native call.

    Args:
        layer: The layer; :func:`native_delta` has the ``forward`` of its mixer.
        found: Its parts.
        norms: Natively: before linear attention, and behind it.
    """
    wiring, delta = found.wiring, found.delta
    mixer = getattr(vars(wiring.attention).get("forward"), "__dict__", {}).get("mixer")
    if mixer is None:
        return None
    before, after = norms
    run = _native.DeltaStep(before, mixer, after)
    own, hooks, mlp, states_for = layer.forward, wiring.hooks(), wiring.mlp, _states_for(delta)

    def forward(hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        states = states_for(hidden_states, named.get("past_key_values"))
        if (
            states is None
            or rest
            or named.get("attention_mask") is not None
            or any(hooks)
            or not only_known_arguments(named)
        ):
            return own(hidden_states, *rest, **named)
        residual, normed = torch.empty_like(hidden_states), torch.empty_like(hidden_states)
        held, state = states
        at = hidden_states.data_ptr(), held.data_ptr(), state.data_ptr()
        run(*at, residual.data_ptr(), normed.data_ptr())
        out = mlp(normed)
        return residual + (out[0] if isinstance(out, tuple) else out)

    return forward


def _states_for(delta: GatedDelta) -> Callable[[torch.Tensor, Any], _States | None]:
    """A function from hidden states and a cache to the states of a token that native code serves."""
    dtype, shape = delta.parameters()[0].dtype, (1, 1, delta.projections[0].in_features)

    def states_for(hidden: torch.Tensor, cache: Any) -> _States | None:
        if not (hidden.shape == shape and hidden.dtype is dtype and hidden.is_cpu and hidden.is_contiguous()):
            return None
        states = delta.states_of(cache)
        return None if states is None or states[0].dtype is not dtype else states

    return states_for


def _step(delta: GatedDelta) -> _Step | None:
    """Computes a token: in one call, or between the projections, if native code does not read these."""
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
            *(weight.data_ptr() for weight in weights),
        )
    except ValueError:
        return None
    sources = [place.source for place in (delta.q, delta.gate, delta.beta, delta.decay)]
    projections, output, width = delta.projections, delta.output, delta.v_heads * delta.v_dim
    products = native_products([*projections, output])
    if products is not None:
        mixer = _native.DeltaMixer(run, products[:-1], sources, products[-1])

        def whole(hidden: torch.Tensor, states: _States) -> torch.Tensor:
            out = torch.empty_like(hidden)
            before, state = states
            mixer(hidden.data_ptr(), before.data_ptr(), state.data_ptr(), out.data_ptr())
            return out

        whole.__dict__.update(weights=weights, mixer=mixer)  # keeps the memory alive that ``run`` reads
        return whole

    def between(hidden: torch.Tensor, states: _States) -> torch.Tensor:
        rows = [module(hidden).contiguous() for module in projections]
        out = torch.empty((1, 1, width), dtype=hidden.dtype)
        mixed, gate, beta, decay = (rows[source].data_ptr() for source in sources)
        before, state = states
        run(mixed, gate, beta, decay, before.data_ptr(), state.data_ptr(), out.data_ptr())
        result: torch.Tensor = output(out)
        return result

    between.__dict__["weights"] = weights
    return between
