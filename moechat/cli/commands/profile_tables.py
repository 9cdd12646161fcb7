"""Formats profiles of machines as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moechat.cli.commands.gpu_tables import render_gpu
from moechat.cli.commands.short_times import format_short
from moechat.cli.terminal.load_progress import format_bytes, format_seconds
from moechat.cli.terminal.page import Page

if TYPE_CHECKING:
    from moechat.hardware.measured_file import Measurement
    from moechat.hardware.profile import Figure, LinkFigures, ModelTimes

_LINKS = {"file": "disk to memory", "gpu": "memory to GPU"}


@dataclass(frozen=True)
class TimedModel:
    """The times of a model, with the conditions that they were measured under."""

    name: str
    dtype: str
    threads: int
    bits: int
    expert_layers: int
    times: ModelTimes

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        named = {key: getattr(self, key) for key in ("name", "dtype", "threads", "bits", "expert_layers")}
        return named | asdict(self.times)


def render_list(found: Mapping[str, Any]) -> str:
    """Saved and reference profiles as text; see :func:`moechat.cli.commands.profile.profile`."""
    page = Page()
    rows: list[Sequence[str]]
    if found["saved"]:
        rows = [
            (
                item["name"],
                item["title"],
                format_age(item["age_s"]),
                "this machine" if item["current"] else "",
            )
            for item in found["saved"]
        ]
        columns = (("name", "left"), ("machine", "left"), ("when", "right"), ("", "left"))
        page.table("measured", columns, rows)
    else:
        page.line("no machine has been measured yet: `moechat profile` measures this one")
    page.line()
    rows = [(item["name"], item["title"]) for item in found["reference"]]
    page.table("machines to plan for", (("name", "left"), ("machine", "left")), rows)
    return page.text


def render_profile(measurement: Measurement, timed: TimedModel | None) -> str:
    """The figures of a machine, and the times of a model, as text."""
    profile, missing = measurement.profile, measurement.missing
    page = Page()
    page.line(profile.title, "bold")
    page.line(f"measured {format_age(measurement.age)}, in {format_seconds(measurement.seconds)}", "dim")
    page.line()
    page.pairs(_machine(measurement))
    page.line()
    _links(page, profile.links, missing)
    page.line()
    _kernels(page, measurement)
    if profile.gpu is not None:
        render_gpu(page, profile.gpu, profile.links.get("gpu"), missing)
    if timed is not None:
        page.line()
        _times(page, timed)
    for remark in measurement.remarks:
        page.line()
        page.line(remark, "dim")
    if "together" in missing:
        page.line()
        page.line(f"disk and kernels together: not measured: {missing['together']}", "dim")
    return page.text


def _machine(measurement: Measurement) -> list[tuple[str, str]]:
    profile, facts = measurement.profile, measurement.facts
    cores = f"{profile.cores} usable core{'' if profile.cores == 1 else 's'}"
    if facts.get("cpus"):
        cores += f", {facts['cpus']} CPUs in total"
    rows = [
        ("processor", f"{profile.cpu}; {cores}"),
        ("kernels", f"{profile.isa}, of {', '.join(facts.get('kernels', [profile.isa]))}"),
    ]
    if facts.get("instruction_sets"):
        rows.append(("instructions", " ".join(facts["instruction_sets"])))
    memory = f"{format_bytes(profile.ram.value)}, read at {_rate(profile.ram_bandwidth)}"
    if facts.get("huge_pages"):
        memory += f"; pages of {format_bytes(facts['page_bytes'])}, huge pages: {facts['huge_pages']}"
    rows.append(("memory", memory))
    disk = facts.get("disk", {})
    words = [str(disk[key]) for key in ("device", "file_system") if disk.get(key)]
    if disk.get("bytes"):
        words.append(format_bytes(disk["bytes"]))
    if facts.get("disk_read_bytes"):
        how = "direct reads" if facts.get("direct_reads") else "reads through the page cache"
        words.append(f"{how} of {format_bytes(facts['disk_read_bytes'])} ({facts.get('disk_read')})")
    rows.append(("disk", ", ".join(words) or "unknown"))
    gpu = profile.gpu
    if gpu is None:
        rows.append(("GPU", f"not measured: {measurement.missing.get('gpu', 'none found')}"))
    for device in facts.get("gpus", []):
        rows.append(("GPU", _gpu_line(device)))
    if gpu is not None and gpu.bandwidth.origin != "measured":
        rows.append(("GPU estimates", f"memory {_rate(gpu.bandwidth)}, {gpu.flops.value / 1e12:.0f} TFLOP/s"))
    if facts.get("gpu_driver"):
        rows.append(("GPU driver", str(facts["gpu_driver"])))
    return rows


def _gpu_line(device: Mapping[str, Any]) -> str:
    def of_limit(now: object, limit: object) -> str:
        return "unknown" if now is None and limit is None else f"{now or '?'} of {limit or '?'}"

    generation = of_limit(device["pcie_generation"], device["pcie_generation_max"])
    lanes = of_limit(device["pcie_lanes"], device["pcie_lanes_max"])
    free, total = format_bytes(device["vram_free_bytes"]), format_bytes(device["vram_bytes"])
    return f"{device['name']}, {free} of {total} free; PCIe generation {generation}, lanes {lanes}"


def _links(page: Page, links: Mapping[str, LinkFigures], missing: Mapping[str, str]) -> None:
    sizes = sorted({size for link in links.values() for size in (*link.bandwidth, *link.latencies)})
    for kind, name in _LINKS.items():
        if kind not in links and f"link {kind}" in missing:
            page.line(f"{name}: not measured: {missing[f'link {kind}']}")
    if not links:
        return
    rows = []
    for kind, link in links.items():
        waits = {min(link.bandwidth): link.latency, **link.latencies}
        rates = (_rate(link.bandwidth.get(size)) for size in sizes)
        rows.append((_LINKS[kind], *rates, _rate(link.together)))
        rows.append(("  latency, idle", *(_wait(waits.get(size)) for size in sizes), ""))
    columns = [("", "left"), *((format_bytes(size), "right") for size in sizes)]
    page.table("link, by bytes per request", [*columns, ("while computing", "right")], rows)


def _kernels(page: Page, measurement: Measurement) -> None:
    profile = measurement.profile
    threads = sorted({count for rates in profile.expert_rate.values() for count in rates})
    rows = []
    for bits, rates in sorted(profile.expert_rate.items()):
        many = profile.expert_flops.get(bits)
        rows.append(
            (
                str(bits),
                *(_rate(rates.get(count)) for count in threads),
                _rate(profile.expert_rate_together.get(bits)),
                "-" if many is None else f"{many.value / 1e9:.0f} GFLOP/s",
            )
        )
    counts = [(f"{count} thread{'' if count == 1 else 's'}", "right") for count in threads]
    columns = [("bits", "right"), *counts, ("while loading", "right"), ("many tokens", "right")]
    page.table("expert kernels, blocks computed from memory", columns, rows)


def _times(page: Page, timed: TimedModel) -> None:
    times = timed.times
    conditions = (
        f"{timed.bits} bits, {timed.dtype}, {timed.threads} threads, {timed.expert_layers} expert layers"
    )
    page.line(f"{timed.name}: {conditions}", "bold")
    token = timed.expert_layers * (times.attention.value + times.moe.value) + times.head.value
    rows = [
        ("a layer without its experts (T_att)", format_short(times.attention.value)),
        ("a layer's experts (T_moe)", format_short(times.moe.value)),
        ("once per token (T_head)", format_short(times.head.value)),
        ("a token with all experts in memory", format_short(token)),
    ]
    page.table("", (("", "left"), ("time", "right")), rows)
    page.line(times.moe.source, "dim")


def _rate(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.value / 1e9:.2f} GB/s"


def _wait(figure: Figure | None) -> str:
    return "-" if figure is None else format_short(figure.value)


def format_age(seconds: float | None) -> str:
    """``just now``, ``5 minutes ago``, ``3 days ago``; ``at an unknown time``."""
    if seconds is None:
        return "at an unknown time"
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length)
        if count:
            return f"{count} {name}{'' if count == 1 else 's'} ago"
    return "just now"
