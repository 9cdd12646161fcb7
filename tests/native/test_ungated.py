"""Experts without a gate projection: ``y = W_down · act(W x)``, for every encoding and number of tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from kept_support import file_rows
from torch.nn import functional as F  # noqa: N812 - the name the field uses

from moechat import _native

TOKENS = (1, 2, 3, 4, 9, 40)  # few, and many enough for the path that unpacks weights once
TOLERANCE = {8: 3e-2, 16: 2e-4, 32: 1e-5}  # by bits of the activations
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def forward(
    layout: _native.BlockLayout, records: np.ndarray, name: str, x: np.ndarray, bits: int
) -> np.ndarray:
    """The expert's output for all rows of x."""
    out, tokens = np.zeros_like(x), len(x)
    addresses = records.ctypes.data + np.arange(layout.blocks, dtype=np.uint64) * layout.record_bytes
    _native.moe_forward(
        layout,
        _native.Gate(name, gated=False),
        x,
        addresses.astype(np.uint64),
        np.arange(layout.blocks, dtype=np.int32),
        np.zeros(layout.blocks, np.int32),
        np.array([0, tokens], np.int32),
        np.arange(tokens, dtype=np.int32),
        np.ones(tokens, np.float32),
        out,
        activation_bits=bits,
    )
    return out


def check(layout: _native.BlockLayout, records: np.ndarray, exact: bool) -> None:
    """Compare with torch; a token's output does not depend on how many there are."""
    rows, up, down, biases = _native.unpack_expert(layout, records)
    assert up is None
    bias_in, bias_out = (0, 0) if biases is None else (biases[0], biases[2])
    rng = np.random.default_rng(3)
    for name, act in ACTIVATIONS.items():
        for tokens in TOKENS:
            x = rng.standard_normal((tokens, layout.hidden_size)).astype(np.float32)
            wanted = act(torch.from_numpy(x @ rows.T + bias_in)).numpy() @ down.T + bias_out
            for bits, tolerance in TOLERANCE.items():
                found = forward(layout, records, name, x, bits)
                error = np.abs(found - wanted).max() / np.abs(wanted).max()
                assert error < (TOLERANCE[32] if exact else tolerance), (name, tokens, bits)
                for token in range(tokens):
                    alone = forward(layout, records, name, x[token : token + 1], bits)
                    assert alone.tobytes() == found[token].tobytes(), (name, tokens, bits)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 16])
def test_packed_experts_are_computed_as_by_torch(bits: int, has_bias: bool) -> None:
    hidden, neurons = 96, 200
    rng = np.random.default_rng(bits)
    weights = (rng.standard_normal((neurons, hidden)) / 8).astype(np.float16)
    down = (rng.standard_normal((hidden, neurons)) / 8).astype(np.float16)
    biases = None
    if has_bias:
        biases = tuple(rng.standard_normal(size).astype(np.float32) for size in (neurons, hidden))
        biases = (biases[0], None, biases[1])
    layout = _native.BlockLayout(hidden, neurons, bits, True, has_bias, gated=False)
    gated = _native.BlockLayout(hidden, neurons, bits, True, has_bias)
    assert layout.payload_bytes < 0.7 * gated.payload_bytes
    records = np.empty((layout.blocks, layout.record_bytes), np.uint8)
    _native.pack_expert(layout, weights, None, down, biases, records)
    check(layout, records, exact=bits == 16)


@pytest.mark.parametrize("pair", [("q4_k", "q6_k"), ("mxfp4", "mxfp4"), ("q8_0", "q8_0"), ("q3_k", "q5_k")])
def test_kept_experts_are_computed_as_by_torch(pair: tuple[str, str]) -> None:
    hidden, neurons = 256, 512
    rng = np.random.default_rng(7)
    layout = _native.kept_layout(hidden, neurons, *pair, gated=False)
    records = np.empty((layout.blocks, layout.record_bytes), np.uint8)
    weights = file_rows(rng, pair[0], neurons, hidden)
    down = file_rows(rng, pair[1], hidden, neurons)
    _native.pack_kept(layout, weights, None, down, None, records)
    check(layout, records, exact=False)


def test_an_up_projection_must_be_there_exactly_if_the_layout_has_one() -> None:
    matrix = np.zeros((64, 64), np.float32)
    for gated, up in ((True, None), (False, matrix)):
        layout = _native.BlockLayout(64, 64, 4, gated=gated)
        records = np.empty((layout.blocks, layout.record_bytes), np.uint8)
        with pytest.raises(ValueError, match="up"):
            _native.pack_expert(layout, matrix, up, matrix, None, records)


def test_a_gate_must_fit_the_layout() -> None:
    layout = _native.BlockLayout(64, 64, 4)
    records = np.empty((layout.blocks, layout.record_bytes), np.uint8)
    zeros = np.zeros((64, 64), np.float32)
    _native.pack_expert(layout, zeros, zeros, zeros, None, records)
    with pytest.raises(ValueError, match="has up, which the gate ignores"):
        forward(layout, records, "relu2", zeros, 8)
