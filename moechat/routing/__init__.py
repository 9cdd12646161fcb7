"""Recorded routing: the experts that routers chose for each token, its replay and its statistics."""

from moechat.routing.counter import RoutingCounter, rankings, statistics_of_trace
from moechat.routing.replay import Replay
from moechat.routing.statistics import RoutingStatistics
from moechat.routing.trace import Trace
from moechat.routing.trace_mapping import MappedTrace, map_trace

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
