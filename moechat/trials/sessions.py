"""Compares ways to run over several starts of a program.

A machine is faster today than yesterday, so tokens of different starts do not compare. Each start has a
comparison of its own, and the gaps of all are averaged by their certainty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moechat.trials.comparison import Comparison, Gap


def pooled_gap(sessions: Sequence[Comparison], way: str, reference: str) -> Gap | None:
    """The gap over all sessions that have both ways, weighted by their certainty; ``None``: none has."""
    weights = total = 0.0
    for session in sessions:
        gap = session.gap(way, reference)
        if gap is not None:
            weight = 1 / max(gap.error, 1e-6) ** 2
            weights += weight
            total += weight * gap.share
    return Gap(total / weights, 1 / math.sqrt(weights)) if weights else None
