"""Recorded routing: which experts a model's routers chose, token by token, how it is replayed and counted."""

from moechat.routing.counter import RoutingCounter, rankings, statistics_of_trace
from moechat.routing.mapping import MappedTrace, map_trace
from moechat.routing.replay import Replay
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.trace import Trace

__all__ = [
    "MappedTrace",
    "Replay",
    "RoutingCounter",
    "RoutingStatistics",
    "Trace",
    "map_trace",
    "rankings",
    "statistics_of_trace",
]
