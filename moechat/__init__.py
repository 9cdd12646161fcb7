"""moechat: Mixture-of-Experts language models far larger than the GPU's memory, on the PC you own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# What follows has to be said before torch is loaded; whoever has said otherwise is obeyed.
# torch's OpenMP threads would spin between their regions on the cores that the expert kernels' threads need:
# on two busy cores a token of a small model took several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Else the dense products are rounded differently by different numbers of threads. Measured on two cores
# with AVX2: 49 ms instead of 50 for 512x2048x4096, 1.15 ms instead of 1.06 for one row.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.1.0"
__all__ = ["Engine", "Plan", "Progress", "Stats", "Step", "__version__", "load", "plan"]

if TYPE_CHECKING:
    from moechat.engine import Engine, Progress, Stats, Step, load
    from moechat.planning import Plan, plan


def __getattr__(name: str) -> Any:
    """Load the engine, and torch with it, only when it is asked for."""
    if name in ("Engine", "Progress", "Stats", "Step", "load"):
        from moechat import engine

        return getattr(engine, name)
    if name in ("Plan", "plan"):
        from moechat import planning

        return getattr(planning, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
