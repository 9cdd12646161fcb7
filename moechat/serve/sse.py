"""Server-sent events, the form of all streams of answers."""

from __future__ import annotations

import json
from typing import Any


def event(data: Any, name: str = "") -> bytes:
    """One event with a JSON value."""
    head = f"event: {name}\n" if name else ""
    # Without escapes: a line break within JSON is always escaped, and other separators end no line.
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def comment(text: str) -> bytes:
    """A line that clients skip; it keeps connections open."""
    return f": {text}\n\n".encode()


HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
