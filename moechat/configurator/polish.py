"""Small changes to an allocation, tried with all that follows from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moechat.configurator.curves import Floats
from moechat.configurator.targets import Targets, pages_of

# Changes of C and of b that are tried.
_STEPS = ((1, 0), (-1, 0), (0, 1), (0, -1), (3, 0), (-3, 0), (0, 3), (0, -3), (1, -1), (-1, 1))
# Changes of single layers that pairs are made of, and pairs that are tried.
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
    """Change one layer, or take from one and give to another, while the exposed time falls.

    Changes of single layers are evaluated first, whether they fit or not; then the pairs that promise most
    and do fit. Windows of all layers behind are part of each evaluation, which the choice under a price of
    windows sees only in a straight line.

    Args:
        targets: Within the budget.
        total: Exposed seconds that they come to.
        totals: The same for several targets, ``[candidates, layers, 2]``.
        experts: N.
        blocks: B.
        pages: Budget.
        free_split: θ may change.
        work: Most evaluations.
    """
    steps = np.array([step for step in _STEPS if free_split or step[1] == 0], dtype=np.int32)
    while work > 0 and total > 0:
        left = pages - pages_of(targets)
        changed = (targets[:, None] + steps).reshape(-1, 2)
        layers = np.repeat(np.arange(len(targets)), len(steps))
        possible = (
            (changed[:, 0] >= 0)
            & (changed[:, 0] <= experts)
            & (changed[:, 1] >= 1)
            & (changed[:, 1] <= blocks)
        )
        changed, layers = changed[possible], layers[possible]
        if not len(layers):
            break
        single = np.repeat(targets[None], len(layers), axis=0)
        single[np.arange(len(layers)), layers] = changed
        gains = total - totals(single)
        sizes = changed.prod(axis=1) - targets.prod(axis=1)[layers]
        work -= len(single)
        # Takers by what they gain, givers by what they lose.
        order = np.argsort(-gains, kind="stable")
        takers, givers = order[sizes[order] > 0][:_SINGLES], order[sizes[order] <= 0][:_SINGLES]
        tried = [single[order[sizes[order] <= left]][:1]]
        if len(takers) and len(givers):
            promise = gains[takers][:, None] + gains[givers]
            promise[
                (sizes[takers][:, None] + sizes[givers] > left) | (layers[takers][:, None] == layers[givers])
            ] = -np.inf
            # Also those that promise nothing: together two changes can do what neither does alone.
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
