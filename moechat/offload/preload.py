"""Loads the experts that earlier runs have used into free pages, while the program waits for its user.

The order is by expected benefit, over all layers: an expert that was chosen for a larger share of the tokens
saves more transfers from the same pages. Only counts of the model itself say which experts these are; the
defaults of a family do not.

The link moves these blocks behind everything else, and no more of them at a time than other prefetches. So a
demand that comes meanwhile waits for those in flight alone. Pages of the reserve, and pages that hold another
expert, are left alone. The experts are not accessed: no hit or miss is counted, and the policy learns nothing
but the shares, as a ranking of experts that it has not seen yet.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from moechat import _native

# Counted tokens from which an order is worth following.
LEAST_TOKENS = 100
# Bytes that are given to the link at a time, and seconds between two looks at it: up to 20 GB/s.
_QUEUED_BYTES, _PAUSE_S = 64 << 20, 0.003


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

    def start(self, runner: _native.ExpertRunner, experts: npt.NDArray[np.int32]) -> None:
        """Begin, or begin again with another order.

        Args:
            runner: The native runner.
            experts: int32 ``[n, 2]``, layer and expert, hottest first.
        """
        self.stop()
        if len(experts) == 0:
            return
        self._stop = threading.Event()
        self._runner = runner
        self._thread = threading.Thread(
            target=_load, args=(runner, experts, self._stop), name="moechat-preload", daemon=True
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


def _load(runner: _native.ExpertRunner, experts: npt.NDArray[np.int32], stop: threading.Event) -> None:
    done, idle = 0, False
    while not stop.is_set():
        try:
            # This also books what has landed, so it is called once more after the link has become idle.
            done += runner.preload(experts[done:], _QUEUED_BYTES)
            if idle:
                return
            stats = runner.stats()
        except RuntimeError:  # closed meanwhile
            return
        idle = done >= len(experts) and stats["link_queued"] + stats["link_in_flight"] == 0
        if not idle:
            stop.wait(_PAUSE_S)
