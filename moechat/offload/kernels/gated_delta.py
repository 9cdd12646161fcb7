"""Linear attention by the gated delta rule for one token: three launches between its projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moechat.models.decode.gated_delta import UNIT_EPS, GatedDelta
from moechat.offload.kernels import triton_delta
from moechat.offload.kernels.launch import POINTERS, Kernel
from moechat.offload.kernels.steps import power

# Columns of a state that a program holds: rows of 128 bytes, and programs enough for a large GPU.
_COLUMNS = 32
_RULE_WARPS = 4
_CONVOLUTION_WARPS = 2
# Elements of a key that a program can hold.
MOST_KEY_DIM = 256


def step(
    delta: GatedDelta, rows: Sequence[torch.Tensor], before: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """What :func:`moechat.models.decode.gated_delta.reference` returns; overwrites the states as it does.

    Args:
        delta: The mixer; its keys have at most :data:`MOST_KEY_DIM` elements.
        rows: Outputs of its projections for a token, ``[1, out_features]``, contiguous, of its type.
        before: As of :meth:`~moechat.models.decode.gated_delta.GatedDelta.states_of`.
        state: Likewise.
    """
    taps, log_rates, biases, weight = delta.parameters()
    mixed = torch.empty(delta.channels, dtype=taps.dtype, device=taps.device)
    out = torch.empty((1, delta.v_heads * delta.v_dim), dtype=taps.dtype, device=taps.device)
    normed = torch.empty_like(out)
    triton_delta.convolved[(2 * delta.k_heads + delta.v_heads,)](
        rows[delta.q.source],
        taps,
        before,
        mixed,
        delta.q.start,
        delta.q.stride,
        delta.k.start,
        delta.k.stride,
        delta.v.start,
        delta.v.stride,
        num_warps=_CONVOLUTION_WARPS,
        **_convolution_constants(delta),
    )
    triton_delta.ruled[(delta.v_heads, -(-delta.v_dim // _columns(delta)))](
        mixed,
        rows[delta.beta.source],
        rows[delta.decay.source],
        log_rates,
        biases,
        state,
        out,
        delta.beta.start,
        delta.beta.stride,
        delta.decay.start,
        delta.decay.stride,
        delta.k_dim**-0.5,
        UNIT_EPS,
        num_warps=_RULE_WARPS,
        **_rule_constants(delta),
    )
    triton_delta.gated_norm[(delta.v_heads,)](
        out,
        rows[delta.gate.source],
        weight,
        normed,
        delta.gate.start,
        delta.gate.stride,
        delta.eps,
        num_warps=1,
        **_norm_constants(delta),
    )
    return normed


def _columns(delta: GatedDelta) -> int:
    return min(_COLUMNS, power(delta.v_dim))


def _sizes(delta: GatedDelta) -> dict[str, Any]:
    return {
        "K_HEADS": delta.k_heads,
        "GROUP": delta.group,
        "K_DIM": delta.k_dim,
        "V_DIM": delta.v_dim,
    }


def _convolution_constants(delta: GatedDelta) -> dict[str, Any]:
    return {
        **_sizes(delta),
        "TAPS": delta.taps,
        "PADDED": power(max(delta.k_dim, delta.v_dim)),
        "TAPS_PADDED": power(delta.taps),
    }


def _rule_constants(delta: GatedDelta) -> dict[str, Any]:
    return {
        **_sizes(delta),
        "K_PADDED": power(delta.k_dim),
        "COLUMNS": _columns(delta),
    }


def _norm_constants(delta: GatedDelta) -> dict[str, Any]:
    return {"GROUP": delta.group, "V_DIM": delta.v_dim, "PADDED": power(delta.v_dim)}


def launches(delta: GatedDelta, dtype: torch.dtype) -> list[Kernel]:
    """The kernels of a mixer, for compiling them ahead."""
    name = POINTERS[dtype]
    names = ("mixed", "taps", "before", "out", "beta", "decay", "log_rates", "biases", "x", "gate", "weight")
    pointers = dict.fromkeys(names, name)
    return [
        Kernel(triton_delta.convolved, _convolution_constants(delta), pointers, _CONVOLUTION_WARPS),
        Kernel(
            triton_delta.ruled,
            _rule_constants(delta),
            {**pointers, "state": POINTERS[torch.float32]},
            _RULE_WARPS,
        ),
        Kernel(triton_delta.gated_norm, _norm_constants(delta), pointers, 1),
    ]
