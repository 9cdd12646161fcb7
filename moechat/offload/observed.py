"""Costs of a token as they were observed while decoding, in place of a profile's or assumed ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moechat.configurator.costs import Costs
from moechat.configurator.estimate import ModelShape
from moechat.offload.gpu_clocks import GpuTimes

# Timed tokens and computed blocks that are enough to replace a cost.
_FEWEST_TOKENS, _FEWEST_FAR_BLOCKS = 4, 64
# Sampling and conversion to text take no longer for a token; more is noise of other programs.
_MOST_HOST_SECONDS = 1e-3


@dataclass(frozen=True)
class Observed:
    """What was counted while tokens were decoded.

    Attributes:
        shape: Sizes of the model.
        counted: Differences of the native runner's counters.
        tokens: Number of tokens.
        seconds: Seconds that they took.
    """

    shape: ModelShape
    counted: Mapping[str, float]
    tokens: int
    seconds: float


def observed_costs(before: Costs, observed: Observed) -> Costs | None:
    """Costs on a CPU, by the native runner's clocks; ``None``: no expert was computed, or no block moved.

    The time outside the experts is divided between layers and head in the ratio of ``before``. The link's
    rate is that of all its transfers over the time that it was busy.

    Args:
        before: Costs that these replace.
        observed: Counters of the tokens.
    """
    shape, counted, tokens = observed.shape, observed.counted, observed.tokens
    computed, computing = counted["bytes_computed"], counted["compute_seconds"]
    moved, busy = counted["link_bytes"], counted["link_busy_seconds"]
    if min(computed, computing, moved, busy, tokens) <= 0:
        return None
    rest = observed.seconds - computing - counted["stall_seconds"] - counted["begin_seconds"]
    rest = max(0.0, rest) / tokens
    layers = before.attention * shape.layers
    share = layers / (layers + before.head) if layers + before.head > 0 else 1.0
    return replace(
        before,
        attention=rest * share / shape.layers,
        head=rest * (1 - share),
        moe=shape.top_k * shape.expert_bytes * computing / computed,
        load=shape.expert_bytes * busy / moved,
        load_together=None,
    )


def observed_on_gpu(before: Costs, observed: Observed, times: GpuTimes) -> Costs | None:
    """Costs on a GPU, by its own clocks; ``None`` if too few tokens were timed.

    Costs of which nothing was seen stay: those of a link that moved nothing, or of a CPU that computed
    nothing. What was measured while link and CPU shared the memory replaces the costs of both together; the
    costs of each alone keep their ratio to these.

    Args:
        before: Costs that these replace.
        observed: Counters of all tokens.
        times: Times of those that were timed.
    """
    if times.tokens < _FEWEST_TOKENS or times.dense_layers < 1 or times.expert_bytes < 1:
        return None
    shape, counted = observed.shape, observed.counted
    # Computing anything takes `call`; at least half of the time goes to the bytes.
    kernels = max(times.expert_seconds - times.layers * before.call, times.expert_seconds / 2)
    sampling = observed.seconds / max(observed.tokens, 1) - times.token_seconds / times.tokens
    found = replace(
        before,
        attention=times.dense_seconds / times.dense_layers + times.deciding_seconds / times.layers,
        head=times.head_seconds / times.tokens + min(max(0.0, sampling), _MOST_HOST_SECONDS),
        moe=before.call + shape.top_k * shape.expert_bytes * kernels / times.expert_bytes,
    )
    moved, busy = counted["link_bytes"], counted["link_busy_seconds"]
    far, far_seconds = counted["blocks_far"], counted["far_seconds"]
    if moved > 0 and busy > 0:
        load = shape.expert_bytes * busy / moved
        if far >= _FEWEST_FAR_BLOCKS:
            found = replace(found, load=load * before.load / before.both_loads, load_together=load)
        else:
            found = replace(found, load=load, load_together=load * before.both_loads / before.load)
    if far >= _FEWEST_FAR_BLOCKS and far_seconds > 0 and math.isfinite(before.compute_far):
        compute = shape.blocks_per_expert * far_seconds / far
        alone = compute * before.compute_far / before.both_computes
        found = replace(found, compute_far=alone, compute_together=compute)
    return found
