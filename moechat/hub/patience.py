"""Whether a request that failed is made again, and when."""

from __future__ import annotations

import time
from typing import Any

from moechat.hub.failures import http_library, hub_utilities

# Before anything has come: an address that is wrong should be known soon. Each wait is twice the one before.
_TRIES = 5
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0
# After something has come: a router that starts anew, a train in a tunnel. Nobody watches a long download.
_PATIENCE_S = 600.0
_BUSY = (408, 425, 429, 500, 502, 503, 504)


class Patience:
    """How long failures that may pass are borne: few tries at first, minutes once something has come.

    One for all files of a download. Not for two threads at once, but for the flag that something came.
    """

    def __init__(self) -> None:
        self._has_come = False

    def came(self) -> None:
        """Bytes have come."""
        self._has_come = True

    def begin(self) -> Failures:
        """Begin to count the failures of one file."""
        return Failures(self)

    @property
    def has_come(self) -> bool:
        """Whether anything has come so far."""
        return self._has_come


class Failures:
    """Failures in a row, without a byte between them."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.forget()

    def forget(self) -> None:
        """Something came: the next failure is the first one."""
        self._tries = 0
        self._wait = _FIRST_WAIT_S
        self._since: float | None = None

    def pause(self, problem: Any) -> float | None:
        """Seconds until the next try after a failure; ``None``: there is to be none.

        Args:
            problem: What the HTTP client or huggingface_hub raised.
        """
        wanted = _wanted(problem)
        if wanted is None:
            return None
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        self._tries += 1
        wait, self._wait = max(self._wait, wanted), min(2 * self._wait, _LONGEST_WAIT_S)
        if wanted > 0:
            return wait if now + wait - self._since <= _PATIENCE_S else None
        if self._patience.has_come:
            return wait if now + wait - self._since <= _PATIENCE_S else None
        return wait if self._tries < _TRIES else None


def _wanted(problem: Any) -> float | None:
    """Seconds that the hub wants us to wait, 0 if it does not say; ``None``: waiting would not help."""
    response = getattr(problem, "response", None)
    if response is None:
        return 0.0 if isinstance(problem, http_library().TransportError) else None
    if response.status_code not in _BUSY:
        return None
    asked = response.headers.get("retry-after", "")
    if asked.isdecimal() and asked.isascii() and len(asked) < 9:
        return float(asked)
    parse = getattr(hub_utilities(), "parse_ratelimit_headers", None)
    limits = parse(response.headers) if parse is not None else None
    return float(limits.reset_in_seconds) if limits is not None and response.status_code == 429 else 0.0
