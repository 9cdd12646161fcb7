"""Counters of a server, and their form for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moechat.hardware.memory import peak_resident_bytes

if TYPE_CHECKING:
    from moechat import Engine, Stats

# Upper ends, in seconds.
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


# Fields of statistics that count experts needed by a token, and their names in hit rates.
HIT_KINDS: Mapping[str, str] = {
    "hits_full": "full",
    "hits_prefetched": "prefetched",
    "hits_top": "top",
    "misses": "miss",
}


class Histogram:
    """Counts of seconds below some ends."""

    def __init__(self) -> None:
        self._below = [0] * len(_BUCKETS)
        self._count = 0
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self._count += 1
        self._sum += seconds
        for place, end in enumerate(_BUCKETS):
            self._below[place] += seconds <= end

    def lines(self, name: str) -> list[str]:
        """In Prometheus' text format."""
        counts = [f'{name}_bucket{{le="{end:g}"}} {n}' for end, n in zip(_BUCKETS, self._below, strict=True)]
        return [
            *counts,
            f'{name}_bucket{{le="+Inf"}} {self._count}',
            f"{name}_sum {self._sum:.6f}",
            f"{name}_count {self._count}",
        ]


@dataclass(frozen=True)
class Gauge:
    """A value now.

    Attributes:
        name: Without the prefix.
        help: One sentence.
        value: The value.
        kind: Of Prometheus.
    """

    name: str
    help: str
    value: float
    kind: str = "gauge"


class Counters:
    """What a server has done; used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._waits, self._ttft, self._tpot = Histogram(), Histogram(), Histogram()
        self.budget_bytes = 0

    def loaded(self, engine: Engine) -> None:
        """A model was loaded."""
        with self._lock:
            self._counts["loads"] += 1
            self.budget_bytes = engine.stats.budget_bytes

    def requested(self, route: str, status: int) -> None:
        """A request was answered over HTTP."""
        with self._lock:
            self._requests[route, status] += 1

    def begun(self, waited_s: float) -> None:
        """An answer begins that has waited so long."""
        with self._lock:
            self._waits.add(waited_s)

    def cancelled(self) -> None:
        """A client left before the end of its answer."""
        with self._lock:
            self._counts["cancelled"] += 1

    def failed(self, error: Exception) -> None:
        """An answer ended with an error."""
        with self._lock:
            self._counts["failed"] += 1

    def answered(self, stats: Stats) -> None:
        """An answer is complete."""
        with self._lock:
            self._counts["answers"] += 1
            for name in (
                "prompt_tokens", "reused_tokens", "output_tokens", "hits_full", "hits_prefetched", "hits_top",
                "misses", "demand_bytes", "prefetch_bytes", "shared_bytes", "expert_bytes",
            ):  # fmt: skip
                self._counts[name] += getattr(stats, name)
            for name in ("stall_s", "link_busy_s", "busy_s"):
                self._seconds[name] += getattr(stats, name)
            self._ttft.add(stats.ttft_s)
            if stats.output_tokens > 1:
                self._tpot.add(stats.tpot_s)

    def hits(self) -> Mapping[str, int]:
        """Experts needed by a token of complete answers, by where they were found; see ``HIT_KINDS``."""
        with self._lock:
            return {kind: self._counts[kind] for kind in HIT_KINDS}

    def text(self, gauges: list[Gauge]) -> str:
        """All of them in Prometheus' text format, version 0.0.4."""
        with self._lock:
            lines: list[str] = []

            def series(name: str, help_: str, kind: str, rows: list[str]) -> None:
                lines.extend([f"# HELP moechat_{name} {help_}", f"# TYPE moechat_{name} {kind}", *rows])

            series(
                "http_requests_total", "Requests by route and status.", "counter",
                [
                    f'moechat_http_requests_total{{route="{route}",status="{status}"}} {count}'
                    for (route, status), count in sorted(self._requests.items())
                ],
            )  # fmt: skip
            for key, name, help_ in _COUNTED:
                series(name, help_, "counter", [f"moechat_{name} {self._counts[key]}"])
            series(
                "expert_accesses_total",
                "Experts needed by a token, by where they were found. None where all experts are mapped.",
                "counter",
                [
                    f'moechat_expert_accesses_total{{found="{label}"}} {self._counts[key]}'
                    for key, label in _FOUND
                ],
            )
            for key, name, help_ in _TIMED:
                series(name, help_, "counter", [f"moechat_{name} {self._seconds[key]:.6f}"])
            for name, help_, histogram in (
                ("queue_seconds", "Time in the queue.", self._waits),
                (
                    "time_to_first_token_seconds",
                    "From the begin of an answer to its first token.",
                    self._ttft,
                ),
                ("time_per_output_token_seconds", "Mean of an answer, after its first token.", self._tpot),
            ):
                series(name, help_, "histogram", histogram.lines(f"moechat_{name}"))
            memory = [
                Gauge("memory_budget_bytes", "Memory budget of the process.", self.budget_bytes),
                Gauge("memory_peak_bytes", "Largest resident set so far.", peak_resident_bytes()),
            ]
            for gauge in [*gauges, *memory]:
                series(gauge.name, gauge.help, gauge.kind, [f"moechat_{gauge.name} {gauge.value:g}"])
        return "\n".join(lines) + "\n"


_COUNTED = (
    ("answers", "answers_total", "Complete answers."),
    ("failed", "answers_failed_total", "Answers that ended with an error."),
    ("cancelled", "answers_cancelled_total", "Answers whose client left."),
    ("loads", "model_loads_total", "Models loaded."),
    ("prompt_tokens", "prompt_tokens_total", "Tokens of prompts."),
    ("reused_tokens", "prompt_tokens_cached_total", "Tokens of prompts that were in an attention cache."),
    ("output_tokens", "output_tokens_total", "Tokens of answers."),
    ("demand_bytes", "link_demand_bytes_total", "Moved by the link after a router had chosen the expert."),
    ("prefetch_bytes", "link_prefetch_bytes_total", "Moved by the link before that."),
    ("shared_bytes", "shared_bytes_total", "Missing on the GPU and computed by the CPU in place."),
    ("expert_bytes", "expert_bytes_total", "Expert blocks read by the kernels."),
)
_FOUND = (
    ("hits_full", "memory"),
    ("hits_prefetched", "prefetched"),
    ("hits_top", "partly"),
    ("misses", "missing"),
)
_TIMED = (
    ("busy_s", "busy_seconds_total", "Time of answers, from request to last token."),
    ("stall_s", "stall_seconds_total", "Time in which the computation waited for the link."),
    ("link_busy_s", "link_busy_seconds_total", "Time with a transfer under way."),
)
