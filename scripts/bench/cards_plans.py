"""The figures of `moechat plan` for machines with a GPU, as a table to compare before and after a change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moechat import plan
from moechat.errors import DoesNotFitError
from moechat.planning.speed import PROMPTS


@dataclass(frozen=True)
class PlanRow:
    """What a plan expects.

    Attributes:
        machine: Name of the profile.
        model: Name of the shape.
        resident: Share of the experts in the GPU's memory.
        tokens_per_s: Decoded tokens a second; 0 if the model does not fit.
        parts_ms: Milliseconds of a token: dense, experts, waiting, head.
        ttft_s: Seconds to the first token, by tokens of the prompt.
        strategy: Chosen by simulation.
    """

    machine: str
    model: str
    resident: float
    tokens_per_s: float
    parts_ms: tuple[float, float, float, float]
    ttft_s: dict[int, float]
    strategy: str


def plan_rows(machines: Sequence[str], models: Sequence[str]) -> Iterator[PlanRow]:
    """Plan every model for every machine, with its whole memory and the default options."""
    for machine in machines:
        for model in models:
            try:
                made = plan(model, profile=machine)
            except DoesNotFitError:
                yield PlanRow(machine, model, 0.0, 0.0, (0.0, 0.0, 0.0, 0.0), {}, "does not fit")
                continue
            speed = made.speed
            assert speed is not None  # the profiles of machines have all figures
            decode = speed.decode
            yield PlanRow(
                machine,
                model,
                made.resident_share,
                speed.tokens_per_s,
                (1e3 * decode.dense, 1e3 * decode.experts, 1e3 * decode.waiting, 1e3 * decode.head),
                dict(speed.ttft_s or {}),
                made.strategy or "all experts in the GPU's memory",
            )


def plan_header() -> str:
    """Titles of the columns of :func:`plan_line`."""
    prompts = "".join(f" {f'TTFT {tokens}':>10}" for tokens in PROMPTS)
    return (
        f"{'machine':20} {'model':15} {'near':>6} {'tok/s':>7}{prompts}"
        "   dense + experts + waiting + head, ms; strategy"
    )


def plan_line(row: PlanRow) -> str:
    """One row, aligned."""
    prompts = "".join(f" {_seconds(row.ttft_s.get(tokens)):>10}" for tokens in PROMPTS)
    parts = " + ".join(f"{part:.1f}" for part in row.parts_ms)
    return (
        f"{row.machine:20} {row.model:15} {row.resident:6.1%} {row.tokens_per_s:7.1f}{prompts}"
        f"   {parts}; {row.strategy}"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
