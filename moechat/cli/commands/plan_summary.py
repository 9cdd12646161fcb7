"""The beginning of ``moechat plan``: whether the model fits, how fast it will be, and what limits it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moechat.cli.terminal.load_progress import format_bytes, format_seconds
from moechat.planning.words import NO_DISK_SPEED, UNMEASURED, is_detail

if TYPE_CHECKING:
    from moechat.planning import Plan
    from moechat.planning.result import Speed

TIERS = {"vram": "VRAM", "ram": "RAM"}
_PROMPT_TOKENS = 1024
_FULL = 0.95  # share of a budget from which it is not worth a word that some is left


def summary_rows(made: Plan) -> list[tuple[str, str]]:
    """Names with values: memory, speed, what limits it where that is known, and notes on the model."""
    rows = [("fits", _memory(made))]
    if made.speed is None:
        reason = next((note for note in made.notes if note in (UNMEASURED, NO_DISK_SPEED)), "not known")
        rows.append(("speed", reason))
    else:
        rows += [("speed", _speed(made.speed)), ("limit", made.speed.bottleneck)]
    return rows + [("note", note) for note in made.notes if not is_detail(note)]


def _memory(made: Plan) -> str:
    near, tier = TIERS[made.near], made.tiers[0]
    budget = format_bytes(tier.budget + tier.beyond)
    if tier.used < _FULL * tier.budget:
        budget = f"{format_bytes(tier.used)} of {budget}"
    context = f"{made.context:,} tokens of context" + (
        ", memory allows no more" if made.context_limited else ""
    )
    if made.far is None:
        return f"all experts in {budget} of {near}; {context}"
    if made.resident_share >= 1:
        return f"all experts in {budget} of {near} while conversations are short; {context}"
    kept = f"{100 * made.resident_share:.0f} % of the experts in {budget} of {near}"
    others = {
        "ram": "all of them in RAM",
        "disk": "the others on the disk",
        "ram+disk": f"{100 * made.far.share:.0f} % in RAM, the others on the disk",
    }[made.far.kind]
    return f"{kept}, {others}; {context}"


def _speed(speed: Speed) -> str:
    rates = [speed.tokens_per_s]
    if speed.routing_range is not None:
        rates += [speed.routing_range.low.tokens_per_s, speed.routing_range.high.tokens_per_s]
    rates += speed.cpu_rates or ()
    expected, low, high = (_rate(rate) for rate in (speed.tokens_per_s, min(rates), max(rates)))
    text = f"about {expected} tokens a second"
    if low != high:
        text += f", {low} to {high}"
    if any(figure.origin != "measured" for figure in speed.figures):
        text += " (an estimate, not measured)"
    if speed.ttft_s and _PROMPT_TOKENS in speed.ttft_s:
        first = format_seconds(speed.ttft_s[_PROMPT_TOKENS])
        text += f"; first token after {first} with a prompt of {_PROMPT_TOKENS:,}"
    return text


def _rate(rate: float) -> str:
    return f"{rate:.2g}" if rate < 1 else f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"
