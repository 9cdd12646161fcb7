"""Predictors: which experts a layer to come will probably need.

No predictor at all is ``None`` wherever one can be given.
"""

from moechat.predict.next_router import NextRouterPredictor
from moechat.predict.predictor import Predictor
from moechat.predict.replayed import ReplayPredictor

__all__ = ["NextRouterPredictor", "Predictor", "ReplayPredictor"]
