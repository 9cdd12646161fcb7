"""Ends an answer at texts that the caller names."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text on until one of some texts appears in it; the result does not depend on its division.

    Args:
        stops: Texts, none of them empty.
    """

    # Invariant: _held is the longest end of the text so far that begins one of the stops.
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text.

        Returns:
            The text that is now certain, and the stop that it ran into, which is not part of it; of several
            the one that ends first, of those the longest.
        """
        self._held += text
        found = [
            (begin + len(stop), begin, stop) for stop in self._stops if (begin := self._held.find(stop)) >= 0
        ]
        if found:
            _, begin, stop = min(found)
            text, self._held = self._held[:begin], ""
            return text, stop
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - kept
        text, self._held = self._held[:cut], self._held[cut:]
        return text, None

    def flush(self) -> str:
        """The text held back, at the end of the answer."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that begin the stop."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0)
