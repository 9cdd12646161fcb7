"""Predictors of the experts that upcoming layers need; ``None`` in place of a predictor disables
prediction.

Those that read hidden states import torch, and are loaded when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moechat.predict.next_router import NextRouterPredictor
    from moechat.predict.predictor import Predictor
    from moechat.predict.replayed import ReplayPredictor

__all__ = ["NextRouterPredictor", "Predictor", "ReplayPredictor"]

_PLACES = {"NextRouterPredictor": "next_router", "Predictor": "predictor", "ReplayPredictor": "replayed"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
