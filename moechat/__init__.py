"""moechat: Mixture-of-Experts language models far larger than the GPU's memory, on the PC you own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from moechat.errors import (
    CheckpointError,
    DeviceLostError,
    DeviceUnavailableError,
    DoesNotFitError,
    DownloadError,
    InUseError,
    ModelNotFoundError,
    MoechatError,
    MoechatWarning,
    NotAllowedError,
    NotFiniteError,
    NotInLibraryError,
    OfflineError,
    PromptTooLongError,
    StorageError,
    StoreDamagedError,
    StoreFormatError,
    StoreReadError,
    UnsupportedModelError,
    UsageError,
)

# Defaults that must be set before torch is imported; existing values win.
# Otherwise torch's OpenMP threads spin between parallel regions on the cores that the expert kernels need: on
# two busy cores a token of a small model took several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Otherwise dense products round differently with different numbers of threads. Measured on two cores
# with AVX2: 49 ms instead of 50 for 512x2048x4096, 1.15 ms instead of 1.06 for one row.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "AsyncEngine",
    "CheckpointError",
    "Description",
    "DeviceLostError",
    "DeviceUnavailableError",
    "DoesNotFitError",
    "DownloadError",
    "Engine",
    "Grammar",
    "InUseError",
    "LoadOptions",
    "ModelNotFoundError",
    "MoechatError",
    "MoechatWarning",
    "NotAllowedError",
    "NotFiniteError",
    "NotInLibraryError",
    "OfflineError",
    "Plan",
    "Progress",
    "PromptTooLongError",
    "Replanned",
    "Stats",
    "Step",
    "StorageError",
    "StoreDamagedError",
    "StoreFormatError",
    "StoreReadError",
    "TokenLogprob",
    "Tuning",
    "UnsupportedModelError",
    "UsageError",
    "__version__",
    "load",
    "plan",
]

if TYPE_CHECKING:
    from moechat.engine import (
        Answer,
        AsyncEngine,
        Description,
        Engine,
        Grammar,
        Progress,
        Replanned,
        Stats,
        Step,
        TokenLogprob,
        Tuning,
        load,
    )
    from moechat.options import LoadOptions
    from moechat.planning import Plan, plan


def __getattr__(name: str) -> Any:
    """Import a public name, and torch with the engine, only when it is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "LoadOptions":
        from moechat import options

        return getattr(options, name)
    if name in ("Plan", "plan"):
        from moechat import planning

        return getattr(planning, name)
    from moechat import engine

    return getattr(engine, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
