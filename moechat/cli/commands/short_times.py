"""Formats short times."""

from __future__ import annotations

from moechat.cli.terminal.load_progress import format_seconds


def format_short(seconds: float) -> str:
    """``0.35 ms``, ``12.3 ms`` or ``1.2 s``; microseconds below 0.1 ms."""
    if seconds < 1e-4:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else format_seconds(seconds)
