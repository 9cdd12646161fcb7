"""Estimates how long a calibrated conversion takes on this machine, by timing small samples of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from moechat import _native
from moechat.calibration.moments import feedback, moments
from moechat.calibration.text import MOST_ROWS, ROW_TOKENS
from moechat.store.expert_refs import CheckpointPlan

_NEURONS = 256
_COLUMNS = 2048
_TOKENS = 512


def calibrated_seconds(plan: CheckpointPlan, bits: int, top_k: int) -> float:
    """Seconds for the experts of a checkpoint, without reading them from the disk.

    Args:
        plan: Of the checkpoint.
        bits: Bits per expert weight, 2 to 4.
        top_k: Experts per token and layer.
    """
    whole = plan.geometry(bits)
    tokens = MOST_ROWS * ROW_TOKENS * top_k / whole.num_experts  # of an expert
    weights = whole.expert_weights
    columns = whole.hidden_size + whole.intermediate_size

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_TOKENS, _COLUMNS, generator=generator)
    matrix = torch.randn(_NEURONS, _COLUMNS, generator=generator)
    measured = moments(inputs)
    neurons = feedback(moments(inputs[:, :_NEURONS]), _NEURONS)
    given = (feedback(measured, _COLUMNS).arrays, neurons.arrays)
    geometry = replace(whole, num_experts=1, intermediate_size=_NEURONS, hidden_size=_COLUMNS, has_bias=False)
    out = np.empty((geometry.blocks_per_expert, geometry.record_bytes), np.uint8)
    rows, down = matrix.numpy(), matrix.T.contiguous().numpy()
    packing = (
        _fastest(
            lambda: _native.pack_expert(
                geometry.layout, rows, rows if geometry.gate.gated else None, down, None, out, feedback=given
            )
        )
        / geometry.expert_weights
    )
    measuring = _fastest(lambda: moments(inputs)) / (_TOKENS * _COLUMNS)
    solving = _fastest(lambda: feedback(measured, _COLUMNS)) / _COLUMNS
    multiplying = _fastest(lambda: inputs @ matrix.T) / (_TOKENS * _NEURONS * _COLUMNS)

    # Activations take all products of an expert but that with down, the pass itself all of them.
    of_down = whole.hidden_size * whole.intermediate_size
    products = multiplying * tokens * (2 * weights - of_down)
    of_expert = packing * weights + (measuring * tokens + solving) * columns + products
    return of_expert * whole.num_experts * len(plan.layers)


def _fastest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(2):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
