"""Mamba-2 mixers on the CPU: of a prompt, and of one token, alone and in a layer's native step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moechat import _native
from moechat.models.decode.mamba2 import Mamba2
from moechat.models.decode.mixer_forward import States, mixer_forward
from moechat.models.decode.products import native_products
from moechat.models.decode.state_steps import StateMixer
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
    (first, last), limits = mamba.projections, mamba.limits

    def compute(hidden: torch.Tensor, states: States, fresh: bool) -> torch.Tensor:
        before, state = (each.data_ptr() for each in states)
        tokens = hidden.shape[1]
        if tokens == 1 and not fresh:  # the limits do not hold then
            out = torch.empty_like(hidden)
            run(hidden.data_ptr(), before, state, out.data_ptr())
            return out
        rows, made = first(hidden).contiguous(), torch.empty((1, tokens, inner), dtype=dtype)
        run.many(tokens, rows.data_ptr(), before, state, made.data_ptr(), limits)
        result: torch.Tensor = last(made)
        return result

    forward = mixer_forward(mamba, hidden_size, dtype, compute)
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
