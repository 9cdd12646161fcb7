"""Simulates decoding from a recorded trace: the engine's decisions on a virtual clock.

It needs neither a model's weights nor the simulated machine. Cache, policies, transfers and their order are
the engine's own native code; see ``native/src/simulate/timeline.h``.
"""

from moechat.simulate.run import SimulatedRun, simulate
from moechat.simulate.timing import Timing, timing_of

__all__ = ["SimulatedRun", "Timing", "simulate", "timing_of"]
