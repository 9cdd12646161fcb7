"""Lets Mamba mixers go on from their states in a later part of a prompt.

transformers scans several tokens from a state of zeros, as the kernels do that it may use in place of its own
code. A scan is linear in its state: with ``h_t = exp(A dt_t) h_{t-1} + dt_t B_t u_t`` and ``y_t = C_t h_t``
(Gu and Dao, arXiv:2312.00752, section 3.2) a first state ``h_0`` adds ``C_t exp(A (dt_1 + … + dt_t)) h_0`` to
``y_t``. So it is added afterwards.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moechat.models.cache_argument import STATES

_SCAN = "mamba_selective_scan"
# Tokens whose decays, a state each, are made at once.
_TOKENS = 64

_first_state: ContextVar[torch.Tensor | None] = ContextVar("first_state", default=None)


def carry_scan_states(model: nn.Module) -> None:
    """Let every mixer of a model whose scan is of this form go on from the state in the cache."""
    module: Any
    for module in model.modules():
        namespace: Any = sys.modules.get(type(module).__module__)
        scan = getattr(namespace, _SCAN, None)
        if scan is None or not hasattr(module, "A_log") or not hasattr(module, "layer_idx"):
            continue
        if not hasattr(scan, "own"):
            setattr(namespace, _SCAN, _continued(scan))
        vars(module)["forward"] = _with_state(module.forward, module.layer_idx)


def _with_state(own: Callable[..., Any], layer: int) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(*rest: Any, **named: Any) -> Any:
        cache = named.get(STATES)
        hidden = named["hidden_states"] if "hidden_states" in named else rest[0]
        state = None
        if cache is not None and hidden.shape[1] > 1:
            state = _state(cache, layer)
        token = _first_state.set(state)
        try:
            return own(*rest, **named)
        finally:
            _first_state.reset(token)

    return forward


def _state(cache: Any, layer: int) -> torch.Tensor | None:
    """The first state of a layer; ``None`` before its first token."""
    read = getattr(cache, "get_recurrent_state", None)
    if read is None:  # until transformers 5.22
        found: torch.Tensor | None = cache.layers[layer].recurrent_states[0]
        return found
    state: torch.Tensor | None = read(layer, state_idx=0)
    return state


def _continued(own: Callable[..., Any]) -> Callable[..., Any]:
    """A scan of transformers, from the state of the mixer that calls it."""

    @functools.wraps(own)
    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803 - transformers' name
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        **named: Any,
    ) -> Any:
        found = own(hidden_states, dt, A, B, C, **named)
        state = _first_state.get()
        if state is None or not named.get("return_last_state"):
            return found
        out, last = found
        added, rest = _from_state(state, _steps(dt, **named), A, C)
        gate = named.get("z")
        if gate is not None:
            added *= functional.silu(gate)
        return (out + added).to(out.dtype), (last + rest).to(last.dtype)

    scan.__dict__["own"] = own
    return scan


def _steps(
    dt: torch.Tensor, *, delta_bias: torch.Tensor | None = None, delta_softplus: bool = False, **_: Any
) -> torch.Tensor:
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    return functional.softplus(dt) if delta_softplus else dt


def _from_state(
    state: torch.Tensor, steps: torch.Tensor, rates: torch.Tensor, reads: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a first state adds to outputs ``[1, dim, tokens]``, and what is left of it ``[1, dim, states]``.

    Args:
        state: ``[1, dim, states]``.
        steps: ``[1, dim, tokens]``.
        rates: A, ``[dim, states]``.
        reads: C, ``[1, states, tokens]``.
    """
    state = state.float()
    added = []
    for begin in range(0, steps.shape[2], _TOKENS):
        part = slice(begin, begin + _TOKENS)
        step, read = steps[..., part].float(), reads[..., part].float()
        left = torch.exp(rates[None, :, None, :] * step.cumsum(2)[..., None]) * state[:, :, None, :]
        added.append(torch.einsum("bdtn,bnt->bdt", left, read))
        state = left[:, :, -1]
    return torch.cat(added, dim=2), state
