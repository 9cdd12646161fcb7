"""Routing statistics from recorded routing, by the same counter that the engine uses."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.errors import UsageError
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.trace import Trace

_RANKING_CHUNK = 1 << 22


class PolicySettings(Protocol):
    """An eviction policy with its parameters; see :class:`moechat.configurator.systems.CacheSettings`."""

    @property
    def policy(self) -> str:
        """Name of the policy."""
        ...

    @property
    def omega(self) -> float:
        """Parameter of ``lcp``."""
        ...

    @property
    def rho(self) -> float:
        """Parameter of ``lcp``."""
        ...

    @property
    def gamma(self) -> float:
        """Parameter of ``discount``."""
        ...


class RoutingCounter:
    """Counts the ranks that a policy gives to experts just before each access (MoEpic, section 3.4.2).

    Args:
        policy: Eviction policy; the counter takes ownership, and its state persists over calls of
            :meth:`feed`.
        top_k: Experts per token.

    Raises:
        ValueError: ``top_k`` is below 1, or the policy is in use already.
    """

    def __init__(self, policy: _native.EvictionPolicy, top_k: int) -> None:
        self._counter = _native.RoutingCounter(policy, top_k)

    @property
    def depth(self) -> int:
        """Number of top predicted experts that are counted."""
        return self._counter.depth

    def feed(
        self,
        experts: npt.NDArray[np.integer],
        predictions: npt.NDArray[np.integer] | None = None,
        passes: npt.NDArray[np.integer] | None = None,
    ) -> None:
        """Count recorded routing, in one native call without the GIL.

        Args:
            experts: ``[tokens, layers, k]``.
            predictions: ``[tokens, layers, n]`` predicted rankings of these choices, best first; only the
                first :attr:`depth` are used.
            passes: ``[n]`` tokens of each pass; default: 1 each. Passes of several tokens update the policy
                but are not counted.

        Raises:
            ValueError: Shapes do not match, or an expert index is out of range.
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
        """Copy of the current counts."""
        counter = self._counter
        return RoutingStatistics(counter.policy, counter.top_k, *counter.counts())

    def reset(self) -> None:
        """Set the counts to 0; the state of the policy stays."""
        self._counter.reset()


def statistics_of_trace(
    trace: Trace,
    policy: str | PolicySettings = "lcp",
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
        trace: The recorded choices.
        policy: Name of an eviction policy, or settings with name and parameters. ``static`` ranks by the
            frequency of experts in the trace; ``belady`` uses the future of the trace.
        predictions: ``[tokens, layers, n]`` predicted rankings of these choices, best first (see
            :func:`rankings`); ``None``: nothing counts as predicted.
        tokens: Use only the first tokens.
        prompts: Treat prompts as passes of many tokens, which are not counted, if the trace distinguishes
            them from answers; else every token counts.
        omega: Parameter of the policy, see :class:`moechat.configurator.systems.CacheSettings`; ignored, like
            the next two, if ``policy`` has its own.
        rho: See ``omega``.
        gamma: See ``omega``.

    Raises:
        UsageError: The policy is unknown, a parameter is out of range, or ``tokens`` is less than 1.
        ValueError: The shape of ``predictions`` does not match the trace.
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
    """Top experts of predicted scores, in the order in which the engine fetches them.

    Equal scores are ordered by expert index; NaNs come last.

    Args:
        scores: ``[..., experts]``.
        depth: Number of experts.

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
