"""What a model would take and how fast it would be on a machine, at hand or not; no weight is loaded."""

from moechat.planning.make import plan
from moechat.planning.result import Plan

__all__ = ["Plan", "plan"]
