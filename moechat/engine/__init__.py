"""The engine: loads a model, computes prompts and answers, recovers from errors, and describes itself.

Its public names are also those of the package: ``moechat.load``, ``moechat.Engine`` and so on.
"""

from moechat.engine.api import Engine, load
from moechat.engine.async_engine import AsyncEngine
from moechat.engine.describe import Description
from moechat.engine.prompt import Message
from moechat.engine.running_answer import Answer
from moechat.engine.stats import Stats
from moechat.engine.together import Advanced, AnswerGivenUp
from moechat.loading import Progress
from moechat.offload.upkeep import Replanned
from moechat.reply_formats.grammar import Grammar
from moechat.steps import FinishReason, Step, TokenLogprob
from moechat.tuner import Tuning

__all__ = [
    "Advanced",
    "Answer",
    "AnswerGivenUp",
    "AsyncEngine",
    "Description",
    "Engine",
    "FinishReason",
    "Grammar",
    "Message",
    "Progress",
    "Replanned",
    "Stats",
    "Step",
    "TokenLogprob",
    "Tuning",
    "load",
]
