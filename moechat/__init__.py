"""moechat: Mixture-of-Experts language models that are far larger than the GPU's memory, on the PC you own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "Progress", "Stats", "Step", "__version__", "load"]

if TYPE_CHECKING:
    from moechat.engine import Engine, Progress, Stats, Step, load


def __getattr__(name: str) -> Any:
    """Load the engine, and torch with it, only when it is asked for."""
    if name in ("Engine", "Progress", "Stats", "Step", "load"):
        from moechat import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
