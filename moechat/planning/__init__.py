"""Plans a model's memory and estimates its speed, on this or another machine, without loading weights."""

from moechat.planning.make import plan
from moechat.planning.result import Plan

__all__ = ["Plan", "plan"]
