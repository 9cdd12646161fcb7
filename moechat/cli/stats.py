"""The statistics of an answer as a table on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moechat.cli.progress import format_bytes, format_seconds
from moechat.cli.terminal import console

_TITLES = {
    "load_s": "loading",
    "prompt_tokens": "prompt tokens",
    "output_tokens": "answer tokens",
    "ttft_s": "time to first token",
    "tpot_s": "time per token after it",
    "expert_activations": "expert activations",
    "expert_bytes": "expert bytes read",
    "peak_rss_bytes": "peak memory",
    "seed": "seed",
}


def print_stats(statistics: Mapping[str, Any]) -> None:
    """Print ``Stats.to_json()``; names the table does not know are shown as they are.

    Args:
        statistics: Keys that end in ``_s`` are seconds, those that end in ``_bytes`` bytes.
    """
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for key, value in statistics.items():
        table.add_row(_TITLES.get(key, key.replace("_", " ")), _format(key, value))
    pace = statistics.get("tpot_s")
    if pace:
        table.add_row("tokens per second", f"{1 / pace:.2f}")
    console().print(table)


def _format(key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key.endswith("_s"):
        return format_seconds(value)
    if key.endswith("_bytes"):
        return format_bytes(value)
    return str(value) if key == "seed" else f"{value:,}"
