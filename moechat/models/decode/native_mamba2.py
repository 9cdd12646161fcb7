"""Mamba-2 mixers on the CPU: of a prompt, and of one token, alone and in a layer's native step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moechat import _native
from moechat.models.decode.mamba2 import Mamba2
from moechat.models.decode.products import is_sequence, native_products
from moechat.models.decode.state_steps import StateMixer
from moechat.models.decode.wiring import only_known_arguments
from moechat.models.element_types import ELEMENTS
from moechat.models.state_layer import StateLayer


def native_mamba2(mamba: Mamba2) -> Callable[..., Any] | None:
    """A ``forward`` for ``mamba.mixer``; ``None`` if native code does not read its projections."""
    products, weights, bias = native_products(mamba.projections), mamba.parameters(), mamba.mixer.conv1d.bias
    if products is None:
        return None
    taps, log_rates, step_biases, skips, norm = weights
    dtype, hidden_size, inner = taps.dtype, mamba.projections[0].in_features, mamba.inner
    try:
        run = _native.MambaMixer(
            ELEMENTS[dtype],
            mamba.heads,
            mamba.head_dim,
            mamba.groups,
            mamba.state_size,
            mamba.taps,
            mamba.norm_group,
            mamba.eps,
            taps.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            log_rates.data_ptr(),
            step_biases.data_ptr(),
            skips.data_ptr(),
            norm.data_ptr(),
            *products,
        )
    except ValueError:
        return None
    own, hooks, states_of, begun_in = mamba.mixer.forward, mamba.hooks(), mamba.states_of, mamba.begun_in
    (first, last), limits = mamba.projections, mamba.limits

    def forward(
        hidden_states: torch.Tensor,
        cache_params: Any = None,
        attention_mask: torch.Tensor | None = None,
        **named: Any,
    ) -> Any:
        states, many = None, False
        if (
            is_sequence(hidden_states, hidden_size, dtype)
            and attention_mask is None
            and not any(hooks)
            and only_known_arguments(named)
        ):
            found = states_of(cache_params)
            many = found is None or hidden_states.shape[1] > 1
            states = begun_in(cache_params) if found is None else found
        if states is None or states[0].dtype is not dtype:
            return own(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **named)
        before, state = (each.data_ptr() for each in states)
        if not many:
            out = torch.empty_like(hidden_states)
            run(hidden_states.data_ptr(), before, state, out.data_ptr())
            return out
        tokens, rows = hidden_states.shape[1], first(hidden_states).contiguous()
        made = torch.empty((1, tokens, inner), dtype=dtype)
        run.many(tokens, rows.data_ptr(), before, state, made.data_ptr(), limits)
        return last(made)

    forward.__dict__["weights"] = (weights, bias)  # keeps the memory alive that ``run`` reads
    forward.__dict__["mixer"] = run
    return forward


def mamba_mixer(mamba: Mamba2) -> StateMixer:
    """``mamba`` as :func:`moechat.models.decode.state_steps.step_of` takes it."""
    dtype, states_in = mamba.mixer.conv1d.weight.dtype, mamba.states_in

    def places(slot: Any) -> tuple[int, int] | None:
        states = states_in(slot)
        if states is None or states[0].dtype is not dtype:
            return None
        return states[0].data_ptr(), states[1].data_ptr()

    def fill(slot: StateLayer, generator: torch.Generator) -> None:
        before, state = (torch.randn(shape, generator=generator) for shape in mamba.shapes)
        slot.update_conv_state(before.to(dtype), conv_kernel_size=mamba.taps)
        slot.update_recurrent_state(state)

    return StateMixer(mamba.index, dtype, mamba.projections[0].in_features, _native.MambaStep, places, fill)
