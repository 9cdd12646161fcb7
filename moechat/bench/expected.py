"""The simulator's expectations of measured runs, from times that this measurement has taken itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from moechat.bench.decode import Bench
from moechat.bench.figures import Run
from moechat.bench.options import BenchOptions, System
from moechat.bench.predicted import (
    Recorded,
    busy_share,
    floor_timing,
    kernel_curve,
    link_times,
    predict,
    predictor_seconds,
    slowed,
)
from moechat.offload.settings import LinkSettings
from moechat.predict import Predictor
from moechat.simulate import Timing
from moechat.simulate.run import Tier

# Iterations to determine how busy a link is, which depends on itself; the third changes hardly anything.
_ROUNDS = 3


class Expectations:
    """Simulates runs of a measurement.

    Args:
        bench: The model.
        options: Options of the measurement.
        predictor: Predictor of its near tiers.
    """

    def __init__(self, bench: Bench, options: BenchOptions, predictor: Predictor) -> None:
        self._bench = bench
        self._options = options
        self._predictor = predictor
        self._curve: npt.NDArray[np.float64] | None = None

    def timing(self, floors: Sequence[Run], link: LinkSettings, bandwidth: float) -> Timing | None:
        """Times for the simulator; ``None`` if not all experts fit in memory.

        Args:
            floors: Runs with all experts in memory.
            link: The link.
            bandwidth: Its bytes per second.
        """
        if not floors:
            return None
        store, bench = self._bench.store, self._bench
        if self._curve is None:
            self._curve = kernel_curve(
                store,
                bench.top_k * store.geometry.blocks_per_expert,
                activation_bits=bench.activation_bits,
                seed=self._options.seed,
            )
        times = link_times(store, link, bandwidth)
        return floor_timing(floors, bench.layers, self._curve, times)

    def seconds(
        self, system: System, recorded: Recorded, tier: Tier, timing: Timing, slower: float
    ) -> float | None:
        """Median seconds per token by the simulator, comparable to the measured median.

        Args:
            system: The measured system.
            recorded: Routing and predictions of one of its runs.
            tier: The sizes of its near tier.
            timing: Times with an idle link.
            slower: Relative increase of times while the link is busy.
        """
        hidden_size = self._bench.store.geometry.hidden_size
        if recorded.rankings is not None:
            more = predictor_seconds(self._predictor, self._bench.layers, hidden_size)
            timing = replace(timing, attention=timing.attention + more)
        done, share = None, 0.0
        # Fixed-point iteration: the load of the link depends on the time per token, and vice versa.
        for _ in range(_ROUNDS if slower else 1):
            done = predict(
                recorded,
                system.settings,
                tier,
                slowed(timing, slower * share),
                fill=self._options.fill_tokens,
                timed=self._options.tokens,
                hidden_size=hidden_size,
            )
            share = 0.0 if done is None else busy_share(done)
        return None if done is None else float(np.median(done.seconds))
