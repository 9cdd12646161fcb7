"""The statistics of an answer as a table on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moechat.cli.terminal.consoles import console, print_notice
from moechat.cli.terminal.load_progress import format_bytes, format_seconds
from moechat.geometry import PACKED_KV_BITS

_TITLES = {
    "load_s": "loading",
    "prompt_tokens": "prompt tokens",
    "reused_tokens": "reused tokens",
    "output_tokens": "answer tokens",
    "drafted_tokens": "draft tokens",
    "accepted_tokens": "accepted draft tokens",
    "ttft_s": "time to first token",
    "tpot_s": "time per token after it",
    "busy_s": "total time",
    "expert_activations": "expert activations",
    "expert_bytes": "expert bytes read",
    "hit_rate_full": "experts found in memory",
    "hit_rate_prefetched": "prefetched",
    "hit_rate_top": "found in part",
    "hit_rate_miss": "missed",
    "demand_bytes": "fetched on demand",
    "prefetch_bytes": "fetched ahead",
    "preloaded_bytes": "loaded while waiting for a prompt",
    "shared_bytes": "computed by the CPU for the GPU",
    "stall_s": "waiting for experts",
    "link_busy_share": "time with transfers",
    "pages_peak_bytes": "memory for experts, peak",
    "budget_bytes": "memory budget",
    "peak_rss_bytes": "peak memory",
    "dense_weights": "dense weights",
    "kv_bits": "attention cache, bits",
    "kv_bytes": "attention cache, whole context",
    "seed": "seed",
    "plan": "allocation method",
    "tuned": "timed plan",
    "replans": "replans",
}
# Hidden if all experts are in memory, where they would be 0.
_OF_PAGES = ("hit_rate_", "demand_", "prefetch_", "stall_", "link_", "pages_peak_", "plan", "replans")
# Hidden if 0 or empty.
_IF_ANY = {
    "drafted_tokens",
    "accepted_tokens",
    "preloaded_bytes",
    "shared_bytes",
    "dense_weights",
    "plan",
    "tuned",
}
# Only in the JSON form; the table has them in another form.
_HIDDEN = {
    "hits_full",
    "hits_prefetched",
    "hits_top",
    "misses",
    "link_busy_s",
    "pages",
    "pages_peak",
    "page_bytes",
    "replan",
    "tuning",
}


def print_stats(statistics: Mapping[str, Any]) -> None:
    """Print ``Stats.to_json()``; keys without a title are shown as they are.

    Args:
        statistics: Keys that end in ``_s`` are in seconds, those that end in ``_bytes`` in bytes; those that
            begin with ``hit_rate_`` or end in ``_share`` are shares from 0 to 1.
    """
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for key, value in rows(statistics):
        table.add_row(_TITLES.get(key, key.replace("_", " ")), _format(key, value))
    pace = statistics.get("tpot_s")
    if pace:
        table.add_row("tokens per second", f"{1 / pace:.2f}")
    console().print(table)


def print_tuning(tuning: Mapping[str, Any]) -> None:
    """Print ``Tuning.to_json()``: the choice, its reason, and the times of each candidate."""
    from rich.table import Table

    when = {"measured": f"timed in {format_seconds(tuning['seconds'])}", "remembered": "remembered"}
    how = when.get(tuning["state"], "not timed")
    if tuning["state"] == "remembered":
        how += f" from {tuning['measured']}"
    print_notice(f"plan: {tuning['title']} ({how}: {tuning['why']})")
    if not tuning["candidates"]:
        return
    table = Table.grid(padding=(0, 2))
    table.add_column()
    for _ in range(4):
        table.add_column(justify="right")
    table.add_row("candidate", "ms a token", "to computed", "±", "tokens", style="dim")
    for entry in tuning["candidates"]:
        table.add_row(
            ("* " if entry["name"] == tuning["winner"] else "  ") + entry["name"],
            _milliseconds(entry["token_ms"]),
            "" if entry["slower"] is None else f"{100 * entry['slower']:+.1f} %",
            "" if entry["slower_error"] is None else f"{100 * entry['slower_error']:.1f} %",
            str(entry["tokens"]),
        )
    console().print(table)
    if not tuning["decided"]:
        print_notice("the next start goes on with the timing")
    for name, other in tuning["same_as"].items():
        print_notice(f"{name} is the same as {other}")


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def print_replanned(replanned: Mapping[str, Any]) -> None:
    """Print ``Replanned.to_json()`` as one line."""
    expected = ""
    if replanned["before_ms"] is not None and replanned["after_ms"] is not None:
        before, after = replanned["before_ms"], replanned["after_ms"]
        expected = f"; expected wait for experts: {before:.2f} ms a token before, {after:.2f} ms now"
    print_notice(
        f"(new plan after {replanned['tokens']:,} tokens, in {replanned['took_ms']:.0f} ms: "
        f"{replanned['layers_changed']} layers changed{expected}; from {replanned['statistics_from']})"
    )


def rows(statistics: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The rows of the table, in the order of the titles; keys without a title come last."""
    pages = statistics.get("pages")
    packed = statistics.get("kv_bits") == PACKED_KV_BITS
    known = dict(statistics)
    if pages:
        known["pages_peak_bytes"] = statistics.get("pages_peak", 0) * statistics.get("page_bytes", 0)
    order = {key: place for place, key in enumerate(_TITLES)}
    shown = [
        (key, value)
        for key, value in known.items()
        if key not in _HIDDEN
        and (pages or not key.startswith(_OF_PAGES))
        and (packed or not key.startswith("kv_"))
        and (value or key not in _IF_ANY)
        and not (key == "seed" and value is None)
    ]
    return sorted(shown, key=lambda row: order.get(row[0], len(order)))


def _format(key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key.startswith("hit_rate_") or key.endswith("_share"):
        return f"{100 * value:.1f} %"
    if key.endswith("_s"):
        return format_seconds(value)
    if key.endswith("_bytes"):
        return format_bytes(value)
    return str(value) if key == "seed" else f"{value:,}"
