"""Draws routing and predictions for simulations, once for all simulations of a plan.

A plan simulates the same routing with several budgets and rates. Draws take up to a third of that time, and
depend only on the statistics. They are kept no longer than :func:`shared_draws` lasts: they take megabytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moechat.routing.statistics import RoutingStatistics
from moechat.routing.trace import Trace
from moechat.simulate.drawn_routing import draw_routing
from moechat.simulate.predictions import draw_rankings

_Input = TypeVar("_Input")
_Output = TypeVar("_Output")
_Drawn = TypeVar("_Drawn", Trace, npt.NDArray[np.int32])


class _Shared:
    """Draws by their arguments; statistics, which hold arrays, are compared by identity."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._statistics: list[RoutingStatistics] = []
        self._drawn: dict[tuple[object, ...], object] = {}

    def get(
        self, statistics: RoutingStatistics, key: tuple[object, ...], draw: Callable[[], _Drawn]
    ) -> _Drawn:
        with self._lock:
            place = next((at for at, each in enumerate(self._statistics) if each is statistics), None)
            if place is None:
                place = len(self._statistics)
                self._statistics.append(statistics)
            whole = (place, *key)
            if whole not in self._drawn:
                self._drawn[whole] = draw()
            return self._drawn[whole]  # type: ignore[return-value]


_SHARED: ContextVar[_Shared | None] = ContextVar("shared draws", default=None)


@contextmanager
def shared_draws() -> Iterator[None]:
    """Keep the draws of the block until its end; those of :func:`in_threads` too."""
    if _SHARED.get() is not None:
        yield
        return
    token = _SHARED.set(_Shared())
    try:
        yield
    finally:
        _SHARED.reset(token)


def in_threads(function: Callable[[_Input], _Output], inputs: Sequence[_Input]) -> list[_Output]:
    """Results of a function for several inputs, each computed in a thread that shares these draws."""
    with ThreadPoolExecutor(max(1, min(len(inputs), os.cpu_count() or 1))) as pool:
        calls = [pool.submit(copy_context().run, function, each) for each in inputs]
        return [call.result() for call in calls]


def drawn_routing(statistics: RoutingStatistics, tokens: int) -> Trace:
    """:func:`moechat.simulate.drawn_routing.draw_routing`, from an earlier call if draws are shared."""
    shared = _SHARED.get()
    if shared is None:
        return draw_routing(statistics, tokens)
    return shared.get(statistics, ("routing", tokens), lambda: draw_routing(statistics, tokens))


def drawn_rankings(
    statistics: RoutingStatistics, trace: Trace, *, width: int, lookahead: int
) -> npt.NDArray[np.int32]:
    """Predictions for :func:`drawn_routing`, at each rank as accurate as in the statistics, shared like it.

    Args:
        statistics: Those that the trace was drawn from.
        trace: The trace.
        width: Number of experts to rank.
        lookahead: Most layers ahead.
    """

    def draw() -> npt.NDArray[np.int32]:
        return draw_rankings(trace, statistics.prediction_accuracy, width=width, lookahead=lookahead)

    shared = _SHARED.get()
    if shared is None:
        return draw()
    return shared.get(statistics, ("rankings", trace.tokens, width, lookahead), draw)
