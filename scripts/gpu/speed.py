"""The fourth stage: real shapes with all their layers at budgets that PCs have, every system in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moechat
from gpu.record import Cell, Say
from gpu.rounds import Rounds, copied_rate, measure, read_rate
from moechat.bench.synthetic_models import load_shape, synthetic_store
from moechat.errors import MoechatError
from moechat.hardware.measure import measure_machine
from moechat.hardware.profile_json import profile_to_json
from moechat.offload.accelerator import Accelerator
from moechat.offload.cuda_card import open_card
from moechat.offload.settings import LinkSettings, OffloadOptions
from moechat.routing import Trace

CASES = tuple(
    f"{model}@{budget}"
    for budget in ("8G", "12G", "24G")
    for model in ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b")
)
# auto must not be slower than any of these.
USUAL_SYSTEMS = ("auto", "mixtral-offloading", "on-demand", "fiddler", "static")


@dataclass(frozen=True)
class Speeds:
    """What the stage measures.

    Attributes:
        work: Directory for stores.
        cases: ``shape@budget``.
        systems: Names of systems.
        rounds: How much.
        dense_bits: Of a dense weight.
        layers: Decoder layers to keep; ``None``: all.
        trace: Routing to play back; ``None``: the routers of random weights choose, nearly evenly.
    """

    work: Path
    cases: Sequence[str] = CASES
    systems: Sequence[str] = USUAL_SYSTEMS
    rounds: Rounds = field(default_factory=Rounds)
    dense_bits: int = 16
    layers: int | None = None
    trace: Trace | None = None


def cells(gpu: Accelerator, speeds: Speeds, say: Say) -> list[Cell]:
    """The machine's profile, then a cell for each case."""
    found = [Cell("profile", lambda: profile(say), 90)]
    for case in speeds.cases:
        found.append(Cell(case, lambda case=case: measured(gpu, speeds, case, say), 150))
    return found


def profile(say: Say) -> dict[str, Any]:
    """What ``moechat profile`` measures; plans use it from now on."""
    found = measure_machine(say, open_card=open_card)
    return {
        "ok": "gpu" in found.links,
        "profile": found.name,
        "title": found.title,
        "measured": profile_to_json(found),
    }


def measured(
    gpu: Accelerator,
    speeds: Speeds,
    case: str,
    say: Say,
    *,
    link: LinkSettings | None = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    machine: str | None = None,
) -> dict[str, Any]:
    """One shape at one budget: all systems, and what ``plan`` expects of ``auto``.

    Args:
        gpu: The GPU.
        speeds: What to measure.
        case: ``shape@budget``.
        say: Takes a line for people.
        link: The link into the GPU.
        around: As for :func:`gpu.rounds.measure`.
        machine: Reference profile that the plan is made for; ``None``: this machine.
    """
    name, _, budget = case.partition("@")
    rates = {"link": copied_rate(gpu), "vram": read_rate(gpu)}
    say(f"{case}: store")
    store = synthetic_store(load_shape(name, layers=speeds.layers), speeds.work, bits=4)
    longest = max(speeds.rounds.prompts) + speeds.rounds.warm + speeds.rounds.tokens + 8
    options: dict[str, Any] = {"vram": budget, "ctx": longest, "dense_bits": speeds.dense_bits}
    say(f"{case}: load")
    gpu.release()
    gpu.reset_peak()
    offload = OffloadOptions(accelerator=gpu, link=link or LinkSettings())
    with moechat.load(store.path, device="cuda", offload=offload, **options) as engine:
        found = measure(
            engine,
            speeds.systems,
            speeds.rounds,
            rates=rates,
            trace=speeds.trace,
            say=lambda text: say(f"{case}: {text}"),
            around=around,
        )
        notices = engine.notices()
    found["notices"] = notices
    found["expected"] = expected(store.path, machine, options)
    found["ok"] = found["peak_bytes"] <= found["budget_bytes"]
    found["rates"] = rates
    return found


def expected(path: Path, machine: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """What the plan of a machine says: seconds of a token, and to the first one."""
    try:
        speed = moechat.plan(path, profile=machine, **options).to_json()["speed"]
    except MoechatError as error:
        return {"error": str(error)}
    return dict(speed) if speed else {"error": "the plan has no speed"}


def table(cells: dict[str, Any]) -> str:
    """The cells of the stage, for people."""
    lines = []
    for case, found in cells.items():
        if "systems" not in found:
            continue
        budget, peak = found["budget_bytes"] / 2**30, found["peak_bytes"] / 2**30
        lines.append(f"\n{case}: budget {budget:.2f} GiB, peak {peak:.2f} GiB, {found['pages']} pages")
        lengths = next(iter(found["systems"].values()))["first_token_s"]
        head = "".join(f"{f'first {length}':>12}" for length in lengths)
        lines.append(
            f"{'system':<20}{'context':>9}{'ms a token':>11}{'floor ms':>10}{'share':>7}{head}"
            f"{'hits':>7}{'MB a token':>12}{'busy':>6}{'CPU MB':>9}"
        )
        for system, one in found["systems"].items():
            first = "".join(f"{seconds:>11.3f}s" for seconds in one["first_token_s"].values())
            for context, at in one["decode"].items():
                hits = at["hit_rates"]["full"] + at["hit_rates"]["prefetch"]
                lines.append(
                    f"{system:<20}{context:>9}{at['token_ms']:>11.2f}{at['floor_ms']:>10.2f}{at['floor_share']:>7.2f}"
                    f"{first}{hits:>7.2f}{at['link_bytes_a_token'] / 1e6:>12.1f}{at['link_busy_share']:>6.2f}"
                    f"{at['cpu_bytes_a_token'] / 1e6:>9.1f}"
                )
                first = " " * len(first)
        lines.append(f"plan: {found['expected']}")
    return "\n".join(lines)
