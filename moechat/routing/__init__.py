"""Recorded routing: which experts a model's routers chose, token by token, and how it is replayed."""

from moechat.routing.mapping import MappedTrace, map_trace
from moechat.routing.replay import Replay
from moechat.routing.trace import Trace

__all__ = ["MappedTrace", "Replay", "Trace", "map_trace"]
