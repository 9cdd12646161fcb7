"""Predictors of the experts that upcoming layers need; ``None`` in place of a predictor disables
prediction.
"""

from moechat.predict.next_router import NextRouterPredictor
from moechat.predict.predictor import Predictor
from moechat.predict.replayed import ReplayPredictor

__all__ = ["NextRouterPredictor", "Predictor", "ReplayPredictor"]
