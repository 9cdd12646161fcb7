"""What ``moechat download`` shows before it begins: sizes, places, times, the expected speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moechat.cli.terminal.consoles import neutralise
from moechat.cli.terminal.load_progress import format_bytes, format_seconds
from moechat.errors import DoesNotFitError, MoechatError
from moechat.safe_text import one_line

if TYPE_CHECKING:
    from moechat.fetch.download_plan import DownloadPlan
    from moechat.fetch.sources import Choice
    from moechat.planning.expect import Expected

_BITS_PER_SECOND = 100_000_000  # assumed rate, named with the estimated time
_TOO_SMALL_BUDGET = 1 << 20  # makes planning name the least
_MOST_SOURCES = 3
ASSUMED = (
    "speeds are those of an ordinary desktop: this machine has not been measured (`moechat profile`, 20 s)"
)
_BASIS: Mapping[str, str] = {
    "measured": "by what was measured of this machine",
    "estimate": "by figures of this machine, some of them published or estimates",
    "assumed": "if this machine is an ordinary desktop: `moechat profile` measures it in 20 s",
}


def describe(plan: DownloadPlan, choice: Choice | None, load: Mapping[str, Any]) -> str:
    """Sizes, places, times and the expected speed, one per line.

    Args:
        plan: The download.
        choice: How its source was chosen, if it was.
        load: Options of loading, for the speed.
    """
    stated = f" (the files have {one_line(plan.source_format)})" if plan.source_format else ""
    form = plan.geometry.title + stated
    licence = f", licence {one_line(plan.remote.licence)}" if plan.remote.licence else ""
    source = [] if choice is None else [f"source    {_source(choice)}"]
    speed = _speed_text(_expected(plan, load))
    lines = [
        f"{plan.remote.title}{licence}",
        *source,
        f"download  {_to_come(plan)}",
        f"store     {format_bytes(plan.store_bytes)} with {form}, in {plan.destination}",
        f"disk      {_disk(plan)}",
        f"memory    {_memory_text(plan)}",
        *([f"speed     {speed}"] if speed else []),
        f"time      {_time(plan)}",
        *([] if plan.has_tokenizer else ["text      none: the repository has no tokenizer"]),
    ]
    return neutralise("\n".join(lines))


def _source(choice: Choice) -> str:
    file = choice.sources[0].variant
    others = [f"{source.name} ({format_bytes(source.nbytes)})" for source in choice.sources[1:]]
    more = f" and {len(others) - _MOST_SOURCES} more" if len(others) > _MOST_SOURCES else ""
    text = choice.why if file is None else f"{file}, {choice.why}"
    return text + (f"; others: {', '.join(others[:_MOST_SOURCES])}{more}" if others else "")


def _to_come(plan: DownloadPlan) -> str:
    others = plan.files - plan.weight_files
    files = (
        f"{plan.weight_files} file{'s' if plan.weight_files != 1 else ''} of weights and {others} "
        f"other{'s' if others != 1 else ''}"
    )
    if plan.finished:
        return f"nothing: all of the {files} is here, converted"
    done = plan.download_bytes - plan.missing_bytes
    total = format_bytes(plan.download_bytes)
    if not done:
        return f"{total} in {files}"
    return f"{format_bytes(plan.missing_bytes)}; {format_bytes(done)} of the {total} in {files} are done"


def _disk(plan: DownloadPlan) -> str:
    text = f"{format_bytes(plan.disk_bytes)} while it is made; {format_bytes(plan.free_bytes)} free"
    if plan.disk_bytes <= plan.free_bytes < plan.ahead_bytes:
        text += f" ({format_bytes(plan.ahead_bytes)} would let it download while it converts)"
    return text


@dataclass(frozen=True)
class _Memory:
    """Memory for the model on the CPU, in bytes.

    Attributes:
        least: The least budget it runs with; ``None`` if unknown.
        everything: Approximate budget to keep all experts in memory.
        available: Available memory.
    """

    least: int | None
    everything: int | None
    available: int


def _memory(plan: DownloadPlan) -> _Memory:
    from moechat.hardware.memory import available_bytes
    from moechat.planning.make import brief_plan

    least: int | None = None
    try:
        brief_plan(str(plan.config), keep=False, bits=plan.geometry.bits, ram=_TOO_SMALL_BUDGET)
    except DoesNotFitError as error:
        least = error.least_bytes
    except MoechatError:  # the download works without a memory plan
        pass
    return _Memory(least, None if least is None else least + plan.expert_bytes, available_bytes())


def _memory_text(plan: DownloadPlan) -> str:
    memory = _memory(plan)
    available = f"{format_bytes(memory.available)} are available"
    if memory.least is None or memory.everything is None:
        return available
    everything = format_bytes(memory.everything)
    return f"runs with {format_bytes(memory.least)}, all in memory with about {everything}; {available}"


def _expected(plan: DownloadPlan, load: Mapping[str, Any]) -> Expected | DoesNotFitError | None:
    """The speed on this machine; ``None`` if it cannot be estimated."""
    from moechat.planning.expect import expect

    try:
        return expect(str(plan.config), **{**load, "bits": plan.geometry.bits})
    except DoesNotFitError as error:
        return error
    except MoechatError:  # the download works without an estimate
        return None


def _speed_text(expected: Expected | DoesNotFitError | None) -> str:
    if expected is None:
        return ""
    if isinstance(expected, DoesNotFitError):
        return "it does not fit into the memory that is available now"
    return speed_text(expected)


def speed_text(expected: Expected) -> str:
    """A sentence about the speed and its origin."""
    text = f"about {short_rate(expected.tokens_per_s)} tokens a second"
    if expected.low is not None and expected.high is not None:
        low, high = short_rate(expected.low), short_rate(expected.high)
        text += f" ({low} to {high}, by how the model routes)"
    return f"{text}, {_BASIS[expected.basis]}"


def short_rate(rate: float) -> str:
    """Tokens a second in two or three digits."""
    return f"{rate:.2g}" if rate < 1 else f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _download_seconds(plan: DownloadPlan) -> float:
    return plan.missing_bytes * 8 / _BITS_PER_SECOND


def _time(plan: DownloadPlan) -> str:
    parts = [f"{format_seconds(_download_seconds(plan))} of downloading at 100 Mbit/s"]
    if plan.convert_s is not None:
        overlap = "; they overlap" if plan.overlaps else ""
        parts.append(f"about {format_seconds(plan.convert_s)} of converting on this machine{overlap}")
    return ", ".join(parts)


def plan_json(
    plan: DownloadPlan, status: str, choice: Choice | None, load: Mapping[str, Any]
) -> dict[str, Any]:
    """The plan as JSON, in bytes and seconds, as before the download."""
    memory, expected = _memory(plan), _expected(plan, load)
    return {
        "status": status,
        "name": plan.name,
        "repository": plan.remote.repository,
        "revision": plan.remote.revision,
        "commit": plan.remote.commit,
        "licence": plan.remote.licence,
        "bits": plan.bits or None,
        "experts": plan.geometry.title,
        "source_format": plan.source_format,
        "files": plan.files,
        "weight_files": plan.weight_files,
        "download_bytes": plan.download_bytes,
        "missing_bytes": plan.missing_bytes,
        "store_bytes": plan.store_bytes,
        "disk_bytes": plan.disk_bytes,
        "free_bytes": plan.free_bytes,
        "ram_least_bytes": memory.least,
        "ram_all_bytes": memory.everything,
        "ram_available_bytes": memory.available,
        "download_s": _download_seconds(plan),
        "convert_s": plan.convert_s,
        "overlap": plan.overlaps,
        "calibrated": plan.calibrated,
        "speed": None if expected is None or isinstance(expected, DoesNotFitError) else expected.to_json(),
        "source": None
        if choice is None
        else {
            "why": choice.why,
            "others": [{"name": source.name, "bytes": source.nbytes} for source in choice.sources[1:]],
        },
        "destination": str(plan.destination),
        "finished": plan.finished or status == "finished",
    }
