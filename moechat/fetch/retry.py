"""When to retry a failed request to the hub."""

from __future__ import annotations

import time
from typing import Any

from moechat.fetch.hub_client import http_library, hub_utilities

# Before the first byte: few tries, so that a wrong address is reported soon. Waits double.
_FIRST_TRIES = 5
_FIRST_WAIT_S = 0.5
_MAX_WAIT_S = 60.0
# After the first byte: long enough for a router to restart, or a train to leave a tunnel.
_MAX_OUTAGE_S = 600.0
_BUSY_STATUSES = (408, 425, 429, 500, 502, 503, 504)


class RetryPolicy:
    """Few tries until the first byte of a download has arrived, then retries for up to ten minutes.

    One policy serves all files of a download. Only :meth:`record_progress` may be called from several
    threads.
    """

    def __init__(self) -> None:
        self._has_progress = False

    def record_progress(self) -> None:
        """Record that bytes have arrived."""
        self._has_progress = True

    @property
    def has_progress(self) -> bool:
        """Whether any bytes have arrived so far."""
        return self._has_progress

    def start_file(self) -> FailureCount:
        """A count of consecutive failures for one file."""
        return FailureCount(self)


class FailureCount:
    """Consecutive failures, without a byte between them."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.reset()

    def reset(self) -> None:
        """Start again from zero failures."""
        self._tries = 0
        self._wait = _FIRST_WAIT_S
        self._since: float | None = None

    def pause(self, problem: Any) -> float | None:
        """Count a failure; returns the seconds until the next try, or ``None`` to give up.

        Args:
            problem: The exception of the HTTP client or of huggingface_hub.
        """
        requested = _requested_wait(problem)
        if requested is None:
            return None
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        self._tries += 1
        wait, self._wait = max(self._wait, requested), min(2 * self._wait, _MAX_WAIT_S)
        if requested > 0 or self._policy.has_progress:
            return wait if now + wait - self._since <= _MAX_OUTAGE_S else None
        return wait if self._tries < _FIRST_TRIES else None


def _requested_wait(problem: Any) -> float | None:
    """Seconds that the hub asks to wait, 0 if it names none; ``None`` if a retry cannot help."""
    response = getattr(problem, "response", None)
    if response is None:
        return 0.0 if isinstance(problem, http_library().TransportError) else None
    if response.status_code not in _BUSY_STATUSES:
        return None
    header = response.headers.get("retry-after", "")
    if header.isdecimal() and header.isascii() and len(header) < 9:
        return float(header)
    parse = getattr(hub_utilities(), "parse_ratelimit_headers", None)
    limits = parse(response.headers) if parse is not None else None
    return float(limits.reset_in_seconds) if limits is not None and response.status_code == 429 else 0.0
