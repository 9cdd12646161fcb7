"""Loads experts that will be used, while the program waits for its user.

At first these are the experts that earlier runs have used most, in free pages. The order is by expected
benefit, over all layers: an expert that was chosen for a larger share of the tokens saves more transfers from
the same pages. Only counts of the model itself say which experts these are; the defaults of a family do not.
Settings whose experts stay load them again and again, in place of others (:func:`most_used`). After a new
plan, settings that admit whatever was used load what the targets ask for (:func:`of_targets`; MoEpic, section
3.4.2).

The link moves these blocks behind everything else, and no more of them at a time than other prefetches. So a
demand that comes meanwhile waits for those in flight alone. Pages of the reserve are left alone. The experts
are not accessed: no hit or miss is counted, and the policy learns nothing but the shares, as a ranking of
experts that it has not seen yet.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moechat import _native
from moechat.configurator.targets import EXPERTS
from moechat.routing.hot_experts import hottest_first, long_run

# Bytes that are given to the link at a time, and seconds between two looks at it: up to 20 GB/s.
_QUEUED_BYTES, _PAUSE_S = 64 << 20, 0.003


@dataclass(frozen=True)
class Order:
    """What is to be loaded, and in place of what.

    Attributes:
        experts: int32 ``[n, 2]``, layer and expert, most important first.
        replaceable: int32 ``[m, 2]``, none of them among ``experts``: these make way, in this order.
        to_targets: No more blocks of an expert than the target of its layer.
    """

    experts: npt.NDArray[np.int32]
    replaceable: npt.NDArray[np.int32] | None = None
    to_targets: bool = False


def into_free_pages(shares: npt.NDArray[np.float64]) -> Order:
    """The experts that were used most, as far as pages are free. shares: float64 ``[layers, experts]``."""
    return Order(hottest_first(shares))


def most_used(shares: npt.NDArray[np.float64], room: int) -> Order:
    """The experts that were used most, in place of all others.

    Args:
        shares: float64 ``[layers, experts]``.
        room: Experts that there are pages for.
    """
    return Order(*long_run(shares, room))


def of_targets(keys: npt.NDArray[np.float64], targets: npt.NDArray[np.int32]) -> Order:
    """Of each layer, the experts with the highest keys, as many as its target keeps; others make way.

    Args:
        keys: float64 ``[layers, experts]``, of the policy.
        targets: int32 ``[layers, 2]``.
    """
    best = np.argsort(-keys, axis=1, kind="stable")
    layers = np.broadcast_to(np.arange(len(keys))[:, None], best.shape)
    # Rank by rank over all layers: the best of each first.
    pairs = np.stack([layers.T, best.T], axis=2).astype(np.int32)
    kept = (np.arange(best.shape[1])[:, None] < targets[:, EXPERTS][None, :])[..., None]
    wanted = pairs[np.broadcast_to(kept, pairs.shape)].reshape(-1, 2)
    others = pairs[np.broadcast_to(~kept, pairs.shape)].reshape(-1, 2)[::-1]
    return Order(np.ascontiguousarray(wanted), np.ascontiguousarray(others), to_targets=True)


class Preloader:
    """Keeps one preload going on a thread of its own. Its methods are for one thread at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._runner: _native.ExpertRunner | None = None
        self._stop = threading.Event()

    @property
    def running(self) -> bool:
        """Whether blocks are still to be queued, or on their way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, runner: _native.ExpertRunner, order: Order) -> None:
        """Begin, or begin again with another order."""
        self.stop()
        if len(order.experts) == 0:
            return
        self._stop = threading.Event()
        self._runner = runner
        self._thread = threading.Thread(
            target=_load, args=(runner, order, self._stop), name="moechat-preload", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End it at once: what has not started is cancelled. Harmless when nothing runs."""
        thread, runner = self._thread, self._runner
        if thread is None or runner is None:
            return
        self._thread = self._runner = None
        self._stop.set()
        thread.join()
        try:
            runner.stop_preload()
        except RuntimeError:  # closed, or of another process
            return


def _load(runner: _native.ExpertRunner, order: Order, stop: threading.Event) -> None:
    experts, done, idle = order.experts, 0, False
    while not stop.is_set():
        try:
            # This also books what has landed, so it is called once more after the link has become idle.
            done += runner.preload(experts[done:], _QUEUED_BYTES, order.replaceable, order.to_targets)
            if idle:
                return
            stats = runner.stats()
        except RuntimeError:  # closed meanwhile
            return
        idle = done >= len(experts) and stats["link_queued"] + stats["link_in_flight"] == 0
        if not idle:
            stop.wait(_PAUSE_S)
