"""Local search: small changes to an allocation, evaluated with all their effects."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moechat.configurator.curves import Floats
from moechat.configurator.targets import BLOCKS, EXPERTS, Targets, pages_of

# Changes of (C, b) to try.
_STEPS = ((1, 0), (-1, 0), (0, 1), (0, -1), (3, 0), (-3, 0), (0, 3), (0, -3), (1, -1), (-1, 1))
# Number of single changes to combine to pairs, and of pairs to try.
_SINGLES, _PAIRS = 96, 48


def polished(
    targets: Targets,
    total: float,
    totals: Callable[[Targets], Floats],
    experts: int,
    blocks: int,
    pages: int,
    *,
    free_split: bool,
    work: int,
) -> Targets:
    """Change one layer, or move pages between two, while the exposed time decreases.

    Changes of single layers are evaluated first, even if they exceed the budget; then the most promising
    pairs that fit. Evaluations include the windows of all later layers exactly, while window prices are
    linear.

    Args:
        targets: Targets within the budget.
        total: Their exposed seconds.
        totals: Gives the exposed seconds of several targets, ``[candidates, layers, 2]``.
        experts: N.
        blocks: B.
        pages: Budget.
        free_split: Whether θ may change.
        work: Most evaluations.
    """
    steps = np.array([step for step in _STEPS if free_split or step[1] == 0], dtype=np.int32)
    while work > 0 and total > 0:
        left = pages - pages_of(targets)
        changed = (targets[:, None] + steps).reshape(-1, 2)
        layers = np.repeat(np.arange(len(targets)), len(steps))
        possible = (
            (changed[:, EXPERTS] >= 0)
            & (changed[:, EXPERTS] <= experts)
            & (changed[:, BLOCKS] >= 1)
            & (changed[:, BLOCKS] <= blocks)
        )
        changed, layers = changed[possible], layers[possible]
        if not len(layers):
            break
        single = np.repeat(targets[None], len(layers), axis=0)
        single[np.arange(len(layers)), layers] = changed
        gains = total - totals(single)
        sizes = changed.prod(axis=1) - targets.prod(axis=1)[layers]
        work -= len(single)
        # Takers ordered by gain, givers by loss.
        order = np.argsort(-gains, kind="stable")
        takers, givers = order[sizes[order] > 0][:_SINGLES], order[sizes[order] <= 0][:_SINGLES]
        tried = [single[order[sizes[order] <= left]][:1]]
        if len(takers) and len(givers):
            promise = gains[takers][:, None] + gains[givers]
            promise[
                (sizes[takers][:, None] + sizes[givers] > left) | (layers[takers][:, None] == layers[givers])
            ] = -np.inf
            # Including pairs without expected gain: two changes together can gain more than their sum.
            flat = np.argsort(-promise, axis=None, kind="stable")[:_PAIRS]
            first, second = np.unravel_index(flat[promise.ravel()[flat] > -np.inf], promise.shape)
            both = single[takers[first]]
            other = givers[second]
            both[np.arange(len(other)), layers[other]] = changed[other]
            tried.append(both)
        candidates = np.concatenate(tried)
        if not len(candidates):
            break
        results = totals(candidates)
        work -= len(candidates)
        best = int(results.argmin())
        if not results[best] < total:
            break
        targets, total = candidates[best], float(results[best])
    return targets
