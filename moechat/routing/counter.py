"""Routing statistics from recorded routing, by the counter that the engine runs as well."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.errors import UsageError
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.trace import Trace

_RANKING_CHUNK = 1 << 22


class RanksBy(Protocol):
    """Settings that name an eviction policy; :class:`moechat.configurator.systems.CacheSettings` is one."""

    @property
    def policy(self) -> str:
        """Name of the policy."""
        ...

    @property
    def omega(self) -> float:
        """Of ``lcp``."""
        ...

    @property
    def rho(self) -> float:
        """Of ``lcp``."""
        ...

    @property
    def gamma(self) -> float:
        """Of ``discount``."""
        ...


class RoutingCounter:
    """Ranks experts by a policy just before each access, and counts (MoEpic, section 3.4.2).

    Args:
        policy: Taken over; it remembers over calls of :meth:`feed`.
        top_k: Experts that a token uses.

    Raises:
        ValueError: ``top_k`` is below 1, or the policy was taken already.
    """

    def __init__(self, policy: _native.EvictionPolicy, top_k: int) -> None:
        self._counter = _native.RoutingCounter(policy, top_k)

    @property
    def depth(self) -> int:
        """Places of a prediction that are counted."""
        return self._counter.depth

    def feed(
        self,
        experts: npt.NDArray[np.integer],
        predictions: npt.NDArray[np.integer] | None = None,
        passes: npt.NDArray[np.integer] | None = None,
    ) -> None:
        """Count recorded routing. One native call, which drops the GIL.

        Args:
            experts: ``[tokens, layers, k]``.
            predictions: ``[tokens, layers, n]`` rankings, best first, made for each of these; those beyond
                :attr:`depth` places are not looked at.
            passes: ``[n]`` tokens of each pass; one each if not given. Longer ones reach the policy, but are
                not counted.

        Raises:
            ValueError: Shapes do not match, or there is no such expert.
        """
        self._counter.run(
            np.ascontiguousarray(experts, dtype=np.int32),
            None
            if predictions is None
            else np.ascontiguousarray(
                predictions[..., : max(self.depth, self._counter.top_k)], dtype=np.int32
            ),
            None if passes is None else np.ascontiguousarray(passes, dtype=np.int64),
        )

    def snapshot(self) -> RoutingStatistics:
        """What has been counted so far; a copy."""
        counter = self._counter
        return RoutingStatistics(counter.policy, counter.top_k, *counter.counts())

    def reset(self) -> None:
        """Set the counts to 0; the policy remembers."""
        self._counter.reset()


def statistics_of_trace(
    trace: Trace,
    policy: str | RanksBy = "lcp",
    *,
    predictions: npt.NDArray[np.integer] | None = None,
    tokens: int | None = None,
    prompts: bool = False,
    omega: float = 128.0,
    rho: float = 0.25,
    gamma: float = 0.9,
) -> RoutingStatistics:
    """Statistics of a recorded routing.

    Args:
        trace: What the routers chose.
        policy: Name of an eviction policy, or settings that hold it with its parameters. ``static`` ranks by
            how often the trace chose each expert; ``belady`` looks into the trace.
        predictions: ``[tokens, layers, n]`` rankings, best first, for these choices (:func:`rankings` makes
            them from scores); without it nothing counts as predicted.
        tokens: The first tokens only.
        prompts: Take the prompts of a trace that tells them from the answers as passes of many tokens, which
            are not counted; else every token counts.
        omega: See :class:`moechat.configurator.systems.CacheSettings`; as for the next two. Not looked at
            where ``policy`` holds its own.
        rho: See ``omega``.
        gamma: See ``omega``.

    Raises:
        UsageError: No such policy, a parameter is out of range, or no token was asked for.
        ValueError: ``predictions`` does not fit the trace.
    """
    name = policy
    if not isinstance(policy, str):
        name, omega, rho, gamma = policy.policy, policy.omega, policy.rho, policy.gamma
    if tokens is not None and tokens < 1:
        raise UsageError(f"tokens is {tokens}; it must be at least 1")
    if tokens is not None:
        trace = trace.head(tokens)
    ranks = trace.counts().astype(np.float64) if name == "static" else None
    future = trace.experts if name == "belady" else None
    try:
        made = _native.EvictionPolicy(
            str(name),
            trace.layers,
            trace.num_experts,
            omega=omega,
            rho=rho,
            gamma=gamma,
            ranks=ranks,
            future=future,
        )
    except ValueError as error:
        raise UsageError(f"no policy to rank experts by: {error}") from error
    counter = RoutingCounter(made, trace.top_k)
    counter.feed(
        trace.experts,
        None if predictions is None else predictions[:tokens],
        trace.passes() if prompts else None,
    )
    return counter.snapshot()


def rankings(scores: npt.NDArray[np.floating], depth: int) -> npt.NDArray[np.int32]:
    """The best experts of predicted scores, in the order in which the engine would fetch them.

    Of equal scores the lower number comes first, those that are not a number come last.

    Args:
        scores: ``[..., experts]``.
        depth: How many of them.

    Returns:
        int32 ``[..., min(depth, experts)]``.
    """
    experts = scores.shape[-1]
    flat = scores.reshape(-1, experts)
    best = np.empty((len(flat), min(depth, experts)), dtype=np.int32)
    step = max(1, _RANKING_CHUNK // experts)
    for start in range(0, len(flat), step):
        chunk = flat[start : start + step]
        order = np.argsort(np.where(np.isnan(chunk), np.inf, -chunk), axis=-1, kind="stable")
        best[start : start + step] = order[:, :depth]
    return best.reshape(*scores.shape[:-1], best.shape[-1])
